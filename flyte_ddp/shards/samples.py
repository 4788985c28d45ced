"""The samples of one shard: which members each has, and where these are."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.shards.index import Shard
from flyte_ddp.shards.tar import Member

SEPARATOR = "\0"  # cannot be in a tar file's names
COLUMNS = {"starts": np.int32, "kinds": np.uint32, "offsets": np.int64, "sizes": np.int64, "headers": np.uint32}


@dataclass(frozen=True, eq=False)
class SampleTable:
    """A shard's samples, in columns, so that thousands of them take little memory.

    Sample i has the members ``starts[i]`` to ``starts[i + 1]``, each with its kind (a position in ``extensions``), the
    place of its content in bytes, and the checksum of its header.
    """

    keys: tuple[str, ...]
    extensions: tuple[str, ...]
    starts: NDArray[np.int32]  # [samples + 1]
    kinds: NDArray[np.uint32]  # [members]
    offsets: NDArray[np.int64]  # [members]
    sizes: NDArray[np.int64]  # [members]
    headers: NDArray[np.uint32]  # [members]

    def __len__(self) -> int:
        return len(self.keys)

    def extensions_of(self, sample: int) -> list[str]:
        """Return the extensions of a sample's members, in their order."""
        return [self.extensions[kind] for kind in self.kinds[self.starts[sample] : self.starts[sample + 1]].tolist()]

    def members(self, sample: int) -> list[Member]:
        """Return the members of a sample, in their order."""
        rows = slice(int(self.starts[sample]), int(self.starts[sample + 1]))
        key = self.keys[sample]
        columns = (column[rows].tolist() for column in (self.kinds, self.offsets, self.sizes, self.headers))
        return [Member(key, self.extensions[kind], *place) for kind, *place in zip(*columns, strict=True)]

    def to_bytes(self) -> bytes:
        """Return the table in numpy's ``.npz`` format, with names as bytes, each ended by ``SEPARATOR``."""
        buffer = io.BytesIO()
        columns = {name: getattr(self, name) for name in COLUMNS}
        for column, names in (("keys", self.keys), ("extensions", self.extensions)):
            text = "".join(f"{name}{SEPARATOR}" for name in names)
            columns[column] = np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        np.savez_compressed(buffer, **columns)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> SampleTable:
        """Return the table that :meth:`to_bytes` has given."""
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            texts = (stored[name].tobytes().decode("utf-8", "surrogateescape") for name in ("keys", "extensions"))
            keys, extensions = (tuple(text.split(SEPARATOR)[:-1]) for text in texts)
            return cls(keys, extensions, **{name: stored[name] for name in COLUMNS})


def read_table(shard: Shard) -> SampleTable:
    """Return the table of a shard that has one, read from the file with the tables.

    Raises UnavailableError if the file cannot be read, or ValueError if there is another table, or none.
    """
    assert shard.table is not None
    address, start, length, digest = shard.table
    content = storage.read(address, (start, start + length))
    if table_digest(content) != digest:
        raise ValueError("another table, or a damaged one")
    return SampleTable.from_bytes(content)


def table_digest(content: bytes) -> str:
    """Return half of the SHA-256 (hex) of a table's bytes, which tells it from any other."""
    return hashlib.sha256(content).hexdigest()[:32]


def tabulate(members: Iterable[Member], shard: str) -> SampleTable:
    """Return the table of a shard's samples, grouped from its members in their order.

    Raises UserError if a sample's members are in two places, or if two of them have one extension.
    """
    keys: dict[str, None] = {}
    extensions: dict[str, int] = {}
    starts: list[int] = []
    rows: list[tuple[int, int, int, int]] = []
    last, of_sample = None, set[str]()
    for member in members:
        if member.key != last:
            if member.key in keys:
                raise UserError(
                    f"shard {shard}: the members of sample {member.key!r} are in two places, or two samples have that "
                    f"name, as {member.key + member.extension!r} says; pack the members of a sample next to each "
                    "other, under a name of its own"
                )
            keys[member.key] = None
            starts.append(len(rows))
            last, of_sample = member.key, set()
        if member.extension in of_sample:
            raise UserError(
                f"shard {shard}: sample {member.key!r} has two members {member.extension}; "
                "pack the shard again with one of each kind"
            )
        of_sample.add(member.extension)
        kind = extensions.setdefault(member.extension, len(extensions))
        rows.append((kind, member.offset, member.size, member.header))
    kinds, offsets, sizes, headers = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    columns = {"kinds": kinds, "offsets": offsets, "sizes": sizes, "headers": headers}
    columns["starts"] = np.array([*starts, len(rows)])
    typed = {name: np.ascontiguousarray(columns[name], dtype) for name, dtype in COLUMNS.items()}
    return SampleTable(tuple(keys), tuple(extensions), **typed)
