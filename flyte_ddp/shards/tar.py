"""Find the files in a shard with their positions, and build the table of a shard's samples.

A shard is an uncompressed tar file in webdataset's convention. Adjacent files form a sample if their names are equal up
to the first dot of the last part. Python's tarfile reads the headers. At damage or without an end mark, tarfile ends
without an error. For this reason the last block that was read is compared with the end mark.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.shards.index import MOST_BYTES, Shard

BLOCK = tarfile.BLOCKSIZE
MOST_HEADER_BYTES = 1 << 20  # maximum of a metadata header (long names, pax records), which tarfile reads into memory
PIECE_BYTES = 1 << 20  # maximum of one read, because a header may claim any size
SAMPLE_NAME = re.compile(r"((?:.*/)?.*?)(\..*)", re.DOTALL)  # wids' rule: key, and extension with the dot
# Exceptions of tarfile for malformed headers. A thousand metadata headers in a row raise RecursionError.
MALFORMED = (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError)
SEPARATOR = "\0"  # ends each name in a stored table; no name in a tar file contains it
COLUMNS = {"starts": np.int32, "kinds": np.uint32, "offsets": np.int64, "sizes": np.int64}


class Member(NamedTuple):
    """A file in a shard."""

    key: str  # of the sample
    extension: str  # with the dot
    offset: int  # byte of the shard where the content begins
    size: int  # bytes of the content


def iterate_tar_members(
    file: Any, shard: str, is_wanted: Callable[[Member], bool] = lambda _: False
) -> Iterator[tuple[Member, bytes | None]]:
    """Yield the files in a tar file, in order, each with its content if ``is_wanted(member)``, else with None.

    Reads ``file`` to its end. Skips folders, files without an extension (like wids), names that begin with a dot (like
    webdataset), and the ``._x.jpg`` files that a Mac's tar adds.

    Args:
        file: The tar file. It need not be seekable, and ``file.read(n)`` may return fewer bytes only at the end.
        shard: The name of the tar file in errors.
        is_wanted: Whether to read the content of a member.

    Raises:
        UserError: The file is no whole tar file, or has a link, a device, a sparse file, or a name outside its folder.
            Raised during the iteration.
    """
    archive = Archive(file, shard)
    for header in archive.iterate_headers():
        if header.isdir() or (header.isreg() and header.name.endswith("/")):
            continue
        # No data set needs these members, and an attacker could use them.
        if not header.isreg() or header.issparse():
            fix = "a link, a device or a sparse file; pack regular files only (tar --dereference --hard-dereference)"
            raise UserError(f"shard {shard}: has {header.name!r}, {fix}")
        if header.name.startswith("/") or ".." in header.name.split("/"):
            fix = "points outside its folder; pack with relative names"
            raise UserError(f"shard {shard}: the name {header.name!r} {fix}")
        if "\0" in header.name or not header.name:
            raise archive.make_damage_error(f"invalid name {header.name!r}")
        match = SAMPLE_NAME.fullmatch(header.name)
        if match is None:
            continue
        key, extension = match.groups()
        if key.strip("./") and not (key.endswith("/") and extension.startswith("._")):
            member = Member(key, extension, header.offset_data, header.size)
            yield member, archive.read_exactly(header.size) if is_wanted(member) else None


class Archive:
    """A tar file that is read once from start to end. ``place`` is the position of the next byte.

    The methods ``read``, ``tell`` and ``seek`` are those of a file, because tarfile reads headers through this object.
    """

    def __init__(self, file: Any, shard: str) -> None:
        self.file, self.shard, self.place = file, shard, 0
        self.block = b""  # the last block of headers that was read

    def iterate_headers(self) -> Iterator[tarfile.TarInfo]:
        """Yield the header of each entry of the tar file, including folders and links.

        After the last entry, reads the file to its end.

        Raises:
            UserError: The archive is damaged or cut short, or another archive follows.
        """
        try:
            archive = tarfile.TarFile(fileobj=self, encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
            for header in iter(archive.next, None):
                if not 0 <= header.size <= MOST_BYTES:
                    raise self.make_damage_error("a header with an impossible size")
                yield header
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all headers
        except UserError:
            raise
        except MALFORMED:
            raise self.make_damage_error("missing or damaged header") from None
        if self.block != bytes(BLOCK):  # at damage, tarfile ends without an error
            raise self.make_damage_error("missing or damaged header")
        while rest := self.file.read(PIECE_BYTES):
            if rest.strip(b"\0"):
                raise self.make_damage_error("bytes follow the end mark, as in archives joined with cat,")

    def read(self, length: int) -> bytes:
        """Return the next ``length`` bytes, and keep their last block. Only tarfile calls this method, for headers.

        Raises:
            UserError: ``length`` is above the limit of a header, or the file ends before.
        """
        if length > MOST_HEADER_BYTES:
            raise self.make_damage_error(
                f"a metadata header of {length:,} bytes, above the {MOST_HEADER_BYTES:,} allowed,"
            )
        content = self.read_exactly(length)
        self.block = content[-BLOCK:]
        return content

    def read_exactly(self, length: int) -> bytes:
        """Return the next ``length`` bytes.

        Raises:
            UserError: The file ends before.
        """
        content = io.BytesIO()
        while (missing := length - content.tell()) and (piece := self.file.read(min(missing, PIECE_BYTES))):
            content.write(piece)
        self.place += content.tell()
        if missing:
            raise self.make_damage_error("cut short" if self.place else "empty")
        return content.getvalue()

    def tell(self) -> int:
        return self.place

    def seek(self, place: int) -> None:
        """Move forward to byte ``place``. A file that is not seekable is read to ``place``.

        If a seekable file ends before ``place``, the next read raises the UserError.

        Raises:
            UserError: The file is not seekable, and ends before ``place``.
        """
        if self.file.seekable():
            self.file.seek(place - self.place, 1)
            self.place = place
        while self.place < place:
            self.read_exactly(min(place - self.place, PIECE_BYTES))

    def make_damage_error(self, problem: str) -> UserError:
        why = f"not a complete, uncompressed tar file ({problem} at byte {self.place:,})"
        return UserError(f"shard {self.shard}: {why}; unpack or copy it again")


@dataclass(frozen=True, eq=False)
class SampleTable:
    """The samples of a shard and their members, stored in columns to save memory."""

    keys: tuple[str, ...]  # of the samples
    extensions: tuple[str, ...]  # all extensions in the shard, with the dot
    starts: NDArray[np.int32]  # [samples + 1] number of each sample's first member
    kinds: NDArray[np.uint32]  # [members] position in ``extensions``
    offsets: NDArray[np.int64]  # [members] byte of the shard where the content begins
    sizes: NDArray[np.int64]  # [members] bytes of the content

    def __len__(self) -> int:
        return len(self.keys)

    def list_sample_members(self, sample: int) -> list[Member]:
        """Return the members of a sample, in the order of the shard."""
        rows = slice(int(self.starts[sample]), int(self.starts[sample + 1]))
        key = self.keys[sample]
        columns = (column[rows].tolist() for column in (self.kinds, self.offsets, self.sizes))
        return [Member(key, self.extensions[kind], *place) for kind, *place in zip(*columns, strict=True)]

    def to_npz_bytes(self) -> bytes:
        """Return the table in NumPy's compressed ``.npz`` format."""
        buffer = io.BytesIO()
        columns = {name: getattr(self, name) for name in COLUMNS}
        for column, names in (("keys", self.keys), ("extensions", self.extensions)):
            text = "".join(f"{name}{SEPARATOR}" for name in names)
            columns[column] = np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        np.savez_compressed(buffer, **columns)
        return buffer.getvalue()

    @classmethod
    def from_npz_bytes(cls, content: bytes, shard_size: int) -> SampleTable:
        """Return the table that :meth:`to_npz_bytes` stored for a shard of ``shard_size`` bytes.

        If ``content`` is no table of such a shard, raises an exception of any type.
        """
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if any(column.file_size > shard_size for column in archive.infolist()):
                raise ValueError("a column is larger than the shard, in which each file has a header of 512 bytes")
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            texts = (stored[name].tobytes().decode("utf-8", "surrogateescape") for name in ("keys", "extensions"))
            keys, extensions = (tuple(text.split(SEPARATOR)[:-1]) for text in texts)
            table = cls(keys, extensions, **{name: stored[name] for name in COLUMNS})
        table.check_table_columns(shard_size)
        return table

    def check_table_columns(self, shard_size: int) -> None:
        """Raise ValueError if the columns do not fit together, or do not fit a shard of ``shard_size`` bytes."""
        members = len(self.kinds)
        shapes = dict.fromkeys(COLUMNS, (members,)) | {"starts": (len(self) + 1,)}
        right = all(
            getattr(self, name).dtype == dtype and getattr(self, name).shape == shapes[name]
            for name, dtype in COLUMNS.items()
        )
        if not (
            right
            and (self.starts[0], self.starts[-1]) == (0, members)
            and (np.diff(self.starts) > 0).all()
            and (self.kinds < len(self.extensions)).all()
            and (self.offsets >= 0).all()
            and (self.sizes >= 0).all()
            and (self.sizes <= shard_size - self.offsets).all()
        ):
            raise ValueError("the columns do not match each other or the shard")


def read_stored_table_or_none(shard: Shard, size: int) -> SampleTable | None:
    """Read the stored table of samples of a shard of ``size`` bytes, in one try.

    If the table is missing, unreadable or unfit, return None.
    """
    if shard.table is None:
        return None
    address, start, length, digest = shard.table
    try:
        content = storage.read_file(address, (start, start + length))
        return SampleTable.from_npz_bytes(content, size) if hash_table(content) == digest else None
    except Exception:  # zipfile and np.load raise many kinds of errors
        return None


def hash_table(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def group_members_into_samples(members: Iterable[Member], shard: str) -> SampleTable:
    """Group the members of a shard into samples, and return the table of samples.

    ``shard`` names the shard in errors.

    Raises:
        UserError: The members of a sample are not adjacent, or two members of a sample have the same extension.
    """
    keys: dict[str, None] = {}
    extensions: dict[str, int] = {}
    starts: list[int] = []
    rows: list[tuple[int, int, int]] = []
    last_key, sample_extensions = None, set[str]()
    for member in members:
        if member.key != last_key:
            if member.key in keys:
                problem = (
                    f"the members of sample {member.key!r} are not next to each other, or two samples have this key"
                )
                fix = "pack the members of a sample next to each other, with a unique key"
                raise UserError(f"shard {shard}: {problem} (found at {member.key + member.extension!r}); {fix}")
            keys[member.key] = None
            starts.append(len(rows))
            last_key, sample_extensions = member.key, set()
        if member.extension in sample_extensions:
            problem = f"sample {member.key!r} has two members {member.extension}"
            raise UserError(f"shard {shard}: {problem}; pack the shard again with one member of each extension")
        sample_extensions.add(member.extension)
        kind = extensions.setdefault(member.extension, len(extensions))
        rows.append((kind, member.offset, member.size))
    kinds, offsets, sizes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    columns = {"starts": np.array([*starts, len(rows)]), "kinds": kinds, "offsets": offsets, "sizes": sizes}
    typed = {name: np.ascontiguousarray(columns[name], dtype) for name, dtype in COLUMNS.items()}
    return SampleTable(tuple(keys), tuple(extensions), **typed)
