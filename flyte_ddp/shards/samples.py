"""The table of a shard's samples: the members of each sample, with their places in the shard."""

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

SEPARATOR = "\0"  # ends each name in a stored table; no name in a tar file contains it
COLUMNS = {"starts": np.int32, "kinds": np.uint32, "offsets": np.int64, "sizes": np.int64}


@dataclass(frozen=True, eq=False)
class SampleTable:
    """The samples of a shard and their members, stored in columns, which take little memory."""

    keys: tuple[str, ...]  # of the samples
    extensions: tuple[str, ...]  # all that occur in the shard, each with its dot
    starts: NDArray[np.int32]  # [samples + 1] number of each sample's first member
    kinds: NDArray[np.uint32]  # [members] position in ``extensions``
    offsets: NDArray[np.int64]  # [members] byte of the shard where the content begins
    sizes: NDArray[np.int64]  # [members] bytes of the content

    def __len__(self) -> int:
        return len(self.keys)

    def sample_members(self, sample: int) -> list[Member]:
        rows = slice(int(self.starts[sample]), int(self.starts[sample + 1]))
        key = self.keys[sample]
        columns = (column[rows].tolist() for column in (self.kinds, self.offsets, self.sizes))
        return [Member(key, self.extensions[kind], *place) for kind, *place in zip(*columns, strict=True)]

    def to_bytes(self) -> bytes:
        """Return the table in numpy's compressed ``.npz`` format."""
        buffer = io.BytesIO()
        columns = {name: getattr(self, name) for name in COLUMNS}
        for column, names in (("keys", self.keys), ("extensions", self.extensions)):
            text = "".join(f"{name}{SEPARATOR}" for name in names)
            columns[column] = np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        np.savez_compressed(buffer, **columns)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> SampleTable:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            texts = (stored[name].tobytes().decode("utf-8", "surrogateescape") for name in ("keys", "extensions"))
            keys, extensions = (tuple(text.split(SEPARATOR)[:-1]) for text in texts)
            return cls(keys, extensions, **{name: stored[name] for name in COLUMNS})


def read_table_or_none(shard: Shard) -> SampleTable | None:
    """Read the shard's stored table, once; return None if it is missing, damaged, unreadable or another shard's."""
    if shard.table is None:
        return None
    address, start, length, digest = shard.table
    try:
        content = storage.read_file(address, (start, start + length))
        return SampleTable.from_bytes(content) if table_digest(content) == digest else None
    except (storage.UnavailableError, ValueError):
        return None


def table_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def tabulate_members(members: Iterable[Member], shard: str) -> SampleTable:
    """Group a shard's members into samples; UserError if those of one are scattered or have equal extensions."""
    keys: dict[str, None] = {}
    extensions: dict[str, int] = {}
    starts: list[int] = []
    rows: list[tuple[int, int, int]] = []
    last_key, sample_extensions = None, set[str]()
    for member in members:
        if member.key != last_key:
            if member.key in keys:
                problem = f"the members of sample {member.key!r} are in two places, or two samples have that name"
                fix = "pack the members of a sample next to each other, under a name of its own"
                raise UserError(f"shard {shard}: {problem}, as {member.key + member.extension!r} says; {fix}")
            keys[member.key] = None
            starts.append(len(rows))
            last_key, sample_extensions = member.key, set()
        if member.extension in sample_extensions:
            problem = f"sample {member.key!r} has two members {member.extension}"
            raise UserError(f"shard {shard}: {problem}; pack the shard again with one of each kind")
        sample_extensions.add(member.extension)
        kind = extensions.setdefault(member.extension, len(extensions))
        rows.append((kind, member.offset, member.size))
    kinds, offsets, sizes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    columns = {"starts": np.array([*starts, len(rows)]), "kinds": kinds, "offsets": offsets, "sizes": sizes}
    typed = {name: np.ascontiguousarray(columns[name], dtype) for name, dtype in COLUMNS.items()}
    return SampleTable(tuple(keys), tuple(extensions), **typed)
