"""Which files a shard holds, and where in it they are.

A shard is an uncompressed tar file in webdataset's convention: files next to each other whose names are equal up to the
first dot of their last part make up one sample. It is read strictly, because training relies on what is found here:
Python's own tarfile takes a damaged header for the end of the archive, and a missing end for none. Known are plain
files and folders in the formats v7, ustar, pax and GNU (which differ in how they store long names and sizes).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, NamedTuple

from flyte_ddp.errors import UserError

BLOCK = 512
END = bytes(BLOCK)
MOST_METADATA = 1 << 20  # bytes of a pax header or a long name: what is read of one into memory
SAMPLE_NAME = re.compile(r"((?:.*/)?.*?)(\..*)", re.DOTALL)  # wids' rule: key and extension, the dot included
MOST_BYTES = 1 << 60  # of a file
OCTAL = re.compile(rb" *([0-7]*)(?:[ \0].*)?", re.DOTALL)
PAX_RECORD = re.compile(rb"(\d{1,9}) ([^=\n]+)=")
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK")  # how gzip, bzip2, xz, zstd and zip begin

# The kinds of members, as in their headers.
FILE, OLD_FILE, CONTIGUOUS_FILE, FOLDER = b"0", b"\0", b"7", b"5"
LONG_NAME, LONG_LINK, PAX, SOLARIS_PAX, GLOBAL_PAX = b"L", b"K", b"x", b"X", b"g"


class DamagedShardError(UserError):
    """A shard that is not what its index says, or not a tar file; another copy of it may be whole."""


class Member(NamedTuple):
    """A file in a shard: its sample's key, its extension with the dot, and the place of its content in bytes.

    ``header`` is the CRC-32 of the block before the content, by which the member is known again.
    """

    key: str
    extension: str
    offset: int
    size: int
    header: int

    def content(self, stored: bytes) -> bytes | None:
        """The content, given the header and what follows it; None if another member is there, or none."""
        if len(stored) != BLOCK + self.size or zlib.crc32(stored[:BLOCK]) != self.header:
            return None
        return stored[BLOCK:]


def members(
    file: IO[bytes], shard: str, wanted: Callable[[str], bool] = lambda _: False
) -> Iterator[tuple[Member, bytes | None]]:
    """The files of a shard in their order; folders and files without an extension are left out, as in wids.

    Left out are also files without a name before their first dot, as in webdataset, and in folders those that a Mac's
    tar adds (``._x.jpg`` beside ``x.jpg``), of which webdataset would make a sample.

    Args:
        file: the tar file at its start; it need not be seekable.
        shard: its name, for errors.
        wanted: says whether the content of members with an extension is wanted, too.

    Raises:
        DamagedShardError: not a tar file, or one that is damaged or cut short.
        UserError: a link, a device, or a name that leads out of the folder in which the archive would be unpacked.
    """
    archive = Archive(file, shard)
    for found in archive.files():
        match = SAMPLE_NAME.fullmatch(found.name)
        if match and is_hidden(*match.groups()):
            continue
        content = archive.read(found.size) if match and wanted(match[2]) else None
        if match:
            yield Member(match[1], match[2], found.offset, found.size, found.header), content


def is_hidden(key: str, extension: str) -> bool:
    """Whether a file is no member of a sample because its name begins with a dot."""
    return not key.strip("./") or (key.endswith("/") and extension.startswith("._"))


class Header(NamedTuple):
    """A member's header as it is stored."""

    name: bytes
    kind: bytes
    size: int


class StoredFile(NamedTuple):
    """A plain file in an archive."""

    name: str
    offset: int
    size: int
    header: int


@dataclass
class Archive:
    """A tar file that is read from its start to its end; what comes next is at byte ``place``."""

    file: IO[bytes]
    shard: str
    place: int = 0

    def files(self) -> Iterator[StoredFile]:
        """The plain files; who wants a file's content reads it before asking for the next file."""
        said: dict[bytes, bytes] = {}  # about the next member, in headers of their own
        while (block := self.read(BLOCK)) != END:
            header = self.parsed(block)
            if header.kind in (LONG_NAME, LONG_LINK, PAX, SOLARIS_PAX, GLOBAL_PAX):
                said |= self.metadata(header)
                continue
            name = (said.get(b"path") or header.name).decode("utf-8", "surrogateescape")
            size = self.stated_size(said, header)
            is_folder = header.kind == FOLDER or (header.kind in (FILE, OLD_FILE) and name.endswith("/"))
            said = {}
            if not is_folder:
                self.check(name, header.kind)
                offset = self.place
                yield StoredFile(name, offset, size, zlib.crc32(block))
                self.skip(offset + padded(size) - self.place)
        if said:
            raise self.damaged("no file follows the last header")
        while rest := self.file.read(1 << 20):
            if rest.strip(b"\0"):
                raise self.damaged("there is more after the end mark, as in archives that were put together with cat")

    def read(self, length: int) -> bytes:
        """So many bytes."""
        pieces, missing = [], length
        while missing and (piece := self.file.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        self.place += length - missing
        if missing:
            raise self.damaged("cut short" if self.place else "empty")
        return b"".join(pieces)

    def skip(self, length: int) -> None:
        """Leaves out so many bytes."""
        if self.file.seekable():
            self.file.seek(length, 1)  # beyond the end of a file that was cut short; the next header is not there then
            self.place += length
            return
        while length:
            length -= len(self.read(min(length, 1 << 20)))

    def parsed(self, block: bytes) -> Header:
        """What a header says."""
        if number(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            compressed = self.place == BLOCK and block.startswith(COMPRESSED)
            raise self.damaged("compressed" if compressed else "no header, or a damaged one,")
        size = number(block[124:136])
        if size is None or size > MOST_BYTES:
            raise self.damaged("a header without a size")
        name, prefix = (field.partition(b"\0")[0] for field in (block[:100], block[345:500]))
        if prefix and block[257:263] == b"ustar\0":
            name = prefix + b"/" + name
        return Header(name, block[156:157], size)

    def metadata(self, header: Header) -> dict[bytes, bytes]:
        """What a header of headers says about the next member, in pax's words."""
        if header.size > MOST_METADATA:
            raise self.damaged(f"a name of {header.size:,} bytes")
        content = self.read(padded(header.size))[: header.size]
        if header.kind in (LONG_NAME, LONG_LINK):
            return {b"path": content.partition(b"\0")[0]} if header.kind == LONG_NAME else {}
        records, place = {}, 0
        while place < len(content):
            match = PAX_RECORD.match(content, place)
            end = place + int(match[1]) if match else 0
            if match is None or not match.end() < end <= len(content) or content[end - 1] != ord("\n"):
                raise self.damaged("a damaged pax header")
            records[match[2]] = content[match.end() : end - 1]
            place = end
        if any(name.startswith(b"GNU.sparse.") for name in records):
            raise self.unwanted("a sparse file")
        if header.kind == GLOBAL_PAX:
            if {b"path", b"size"} & records.keys():
                raise self.damaged("one name or size for all files")
            return {}
        return records

    def stated_size(self, said: dict[bytes, bytes], header: Header) -> int:
        """The size of a member, which is in a pax header where it is too large for the member's own."""
        size = said.get(b"size")
        if not size:
            return header.size
        if not size.isdigit() or len(size) > 18:
            raise self.damaged("a damaged pax header")
        return int(size)

    def check(self, name: str, kind: bytes) -> None:
        """Refuses what no data set needs and an attack would."""
        if kind not in (FILE, OLD_FILE, CONTIGUOUS_FILE):
            raise self.unwanted(f"{name!r}, a link, a device or a sparse file")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise UserError(f"shard {self.shard}: the name {name!r} leads out of its folder; pack with relative names")
        if "\0" in name or not name:
            raise self.damaged(f"the name {name!r}")

    def unwanted(self, what: str) -> UserError:
        """The error for a member of another kind."""
        return UserError(
            f"shard {self.shard}: has {what}; pack plain files only (tar --dereference --hard-dereference)"
        )

    def damaged(self, what: str) -> DamagedShardError:
        """The error for what is there before ``place``."""
        return DamagedShardError(
            f"shard {self.shard}: not a whole, uncompressed tar file ({what} at byte {self.place:,}); "
            "unpack or copy it again"
        )


def padded(size: int) -> int:
    """Sizes are rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def number(field: bytes) -> int | None:
    """A number in a header: octal digits, or, for GNU, bytes after a mark; None if it is none."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    match = OCTAL.fullmatch(field)
    return int(match[1] or b"0", 8) if match else None
