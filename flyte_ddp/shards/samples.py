"""The samples of one shard: which members each has, and where these are."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.errors import UserError
from flyte_ddp.shards.tar import BLOCK, MOST_BYTES, Member

SEPARATOR = "\0"  # cannot be in a tar file's names


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

    def members(self, sample: int) -> list[Member]:
        """The members of a sample, in their order."""
        rows = slice(int(self.starts[sample]), int(self.starts[sample + 1]))
        key = self.keys[sample]
        columns = (column[rows].tolist() for column in (self.kinds, self.offsets, self.sizes, self.headers))
        return [Member(key, self.extensions[kind], *place) for kind, *place in zip(*columns, strict=True)]

    def to_bytes(self) -> bytes:
        """In numpy's ``.npz`` format."""
        buffer = io.BytesIO()
        columns = {name: getattr(self, name) for name in DTYPES}
        np.savez_compressed(buffer, keys=encoded(self.keys), extensions=encoded(self.extensions), **columns)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, digest: str, size: int = -1) -> SampleTable:
        """Reads what :meth:`to_bytes` made.

        Args:
            content: the table as it is stored.
            digest: of that, as in the index.
            size: bytes of the shard; -1 where that is not known.

        Raises:
            ValueError: it is not what has this digest, or whoever made it meant no shard of this size.
        """
        if digest_of(content) != digest:
            raise ValueError("another table, or a damaged one")
        try:
            columns: dict[str, Any] = unpacked(content, size)
            columns |= {name: decoded(columns[name]) for name in NAMES}
        except Exception as error:  # numpy and zipfile have many words for what is none of theirs
            raise ValueError(f"no table of samples: {error}") from None
        table = cls(**columns)
        table.check(size)
        return table

    def check(self, size: int) -> None:
        """Refuses numbers that cannot be those of a shard of so many bytes, -1 where that is not known.

        Raises:
            ValueError: there are such.
        """
        most = size if size >= 0 else MOST_BYTES
        count = len(self.kinds)
        fits = (
            len(self.offsets) == len(self.sizes) == len(self.headers) == count
            and len(self.starts) == len(self.keys) + 1
            and (self.starts[0], self.starts[-1]) == (0, count)
            and (self.starts[1:] > self.starts[:-1]).all()
            and (self.kinds < len(self.extensions)).all()
            and ((self.offsets >= BLOCK) & (self.offsets <= most)).all()
            and ((self.sizes >= 0) & (self.sizes <= most - self.offsets)).all()
        )
        if not fits:
            raise ValueError(f"no table of a shard's samples ({len(self.keys):,}, with {count:,} members)")


def digest_of(content: bytes) -> str:
    """Half of the SHA-256 (hex) of a table's bytes, which tells it from any other."""
    return hashlib.sha256(content).hexdigest()[:32]


DTYPES = {"starts": np.int32, "kinds": np.uint32, "offsets": np.int64, "sizes": np.int64, "headers": np.uint32}
NAMES = {"keys": np.uint8, "extensions": np.uint8}
OVERHEAD = 10_000  # bytes of a table without samples, and more


def unpacked(content: bytes, size: int) -> dict[str, NDArray[Any]]:
    """The columns of a table of a shard of so many bytes, and its names as bytes.

    Raises:
        ValueError: a column is not of its kind, or the table is larger than its shard.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        length = sum(found.file_size for found in archive.infolist())
    if 0 <= size < length - OVERHEAD:  # a member takes more room in the shard than in the table
        raise ValueError(f"{length:,} bytes")
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        columns = {name: stored[name] for name in {**DTYPES, **NAMES}}
    for name, dtype in {**DTYPES, **NAMES}.items():
        if columns[name].dtype != dtype or columns[name].ndim != 1:
            raise ValueError(f"{name} is of kind {columns[name].dtype} and shape {columns[name].shape}")
    return columns


def encoded(names: tuple[str, ...]) -> NDArray[np.uint8]:
    """Names as bytes."""
    return np.frombuffer("".join(f"{name}{SEPARATOR}" for name in names).encode("utf-8", "surrogateescape"), np.uint8)


def decoded(content: NDArray[np.uint8]) -> tuple[str, ...]:
    """The names again."""
    return tuple(content.tobytes().decode("utf-8", "surrogateescape").split(SEPARATOR)[:-1])


def tabulate(members: Iterable[Member], shard: str) -> SampleTable:
    """Groups a shard's members into samples.

    Raises:
        UserError: two members of one sample with the same extension, or two samples with the same key.
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
                "pack the shard anew with one of each kind"
            )
        of_sample.add(member.extension)
        kind = extensions.setdefault(member.extension, len(extensions))
        rows.append((kind, member.offset, member.size, member.header))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return SampleTable(
        keys=tuple(keys),
        extensions=tuple(extensions),
        starts=np.array([*starts, len(rows)], dtype=np.int32),
        kinds=columns[:, 0].astype(np.uint32),
        offsets=np.ascontiguousarray(columns[:, 1]),
        sizes=np.ascontiguousarray(columns[:, 2]),
        headers=columns[:, 3].astype(np.uint32),
    )
