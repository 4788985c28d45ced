"""The samples of one shard: which members each has, and where these are."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.errors import UserError
from flyte_ddp.shards.tar import Member

SEPARATOR = "\0"  # cannot be in a tar file's names


@dataclass(frozen=True, eq=False)
class SampleTable:
    """A shard's samples, in columns, so that thousands of them take little memory.

    Sample i has the members ``starts[i]`` to ``starts[i + 1]``, each with its kind (a position in ``extensions``) and
    the place of its content in bytes.
    """

    keys: tuple[str, ...]
    extensions: tuple[str, ...]
    starts: NDArray[np.int32]  # [samples + 1]
    kinds: NDArray[np.uint16]  # [members]
    offsets: NDArray[np.int64]  # [members]
    sizes: NDArray[np.int64]  # [members]

    def __len__(self) -> int:
        return len(self.keys)

    def members(self, sample: int) -> list[Member]:
        """The members of a sample, in their order."""
        rows = slice(int(self.starts[sample]), int(self.starts[sample + 1]))
        key = self.keys[sample]
        places = zip(self.kinds[rows].tolist(), self.offsets[rows].tolist(), self.sizes[rows].tolist(), strict=True)
        return [Member(key, self.extensions[kind], offset, size) for kind, offset, size in places]

    def to_bytes(self) -> bytes:
        """In numpy's ``.npz`` format, whose checksums tell of damage."""
        buffer = io.BytesIO()
        columns = {name: getattr(self, name) for name in COLUMNS}
        np.savez_compressed(buffer, keys=encoded(self.keys), extensions=encoded(self.extensions), **columns)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> SampleTable:
        """Reads what :meth:`to_bytes` made.

        Raises:
            ValueError: it is damaged.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as stored:
                columns = {name: stored[name] for name in COLUMNS}
                table = cls(decoded(stored["keys"]), decoded(stored["extensions"]), **columns)
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, OSError) as error:
            raise ValueError(f"damaged table of samples ({error})") from None
        if len(table.starts) != len(table) + 1:
            raise ValueError("damaged table of samples")
        return table


COLUMNS = ("starts", "kinds", "offsets", "sizes")


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
    rows: list[tuple[int, int, int]] = []
    last, of_sample = None, set[str]()
    for member in members:
        if member.key != last:
            if member.key in keys:
                raise UserError(
                    f"shard {shard}: the members of sample {member.key!r} are in two places, or two samples have that "
                    "name; pack the members of a sample next to each other, under a name of its own"
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
        rows.append((extensions.setdefault(member.extension, len(extensions)), member.offset, member.size))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return SampleTable(
        keys=tuple(keys),
        extensions=tuple(extensions),
        starts=np.array([*starts, len(rows)], dtype=np.int32),
        kinds=columns[:, 0].astype(np.uint16),
        offsets=np.ascontiguousarray(columns[:, 1]),
        sizes=np.ascontiguousarray(columns[:, 2]),
    )
