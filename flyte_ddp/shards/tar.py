"""Which files a shard holds, and where in it they are.

A shard is an uncompressed tar file in webdataset's convention: files next to each other whose names are equal up to the
first dot of their last part make up one sample. Headers are read by Python's tarfile, one by one: its own loop takes a
damaged header for the end of the archive, and a missing end for none, while training relies on what is found here.
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

from flyte_ddp.errors import UserError

BLOCK = tarfile.BLOCKSIZE
MOST_METADATA = 1 << 20  # bytes of a pax header or a long name: what is read of one into memory
SAMPLE_NAME = re.compile(r"((?:.*/)?.*?)(\..*)", re.DOTALL)  # wids' rule: key and extension, the dot included
MOST_BYTES = 1 << 60  # of a file
METADATA = (b"x", b"X", b"g", b"L", b"K")  # members that describe the next one: pax's kinds, and GNU's
# What tarfile raises on headers that are none; the last for a thousand headers of headers.
MALFORMED = (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError)


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
        """Return the content, given the header block and what follows; None if another member is there, or none."""
        if len(stored) != BLOCK + self.size or zlib.crc32(stored[:BLOCK]) != self.header:
            return None
        return stored[BLOCK:]


def members(
    file: IO[bytes], shard: str, wanted: Callable[[str], bool] = lambda _: False
) -> Iterator[tuple[Member, bytes | None]]:
    """Yield the files of a shard in their order, and the content of those whose extension is wanted, else None.

    Folders and files without an extension are left out, as in wids; also files without a name before their first dot,
    as in webdataset, and in folders those that a Mac's tar adds (``._x.jpg`` beside ``x.jpg``).

    Args:
        file: the tar file at its start; it need not be seekable.
        shard: its name, for errors.
        wanted: says of an extension whether the contents of such members are wanted.

    Raises:
        DamagedShardError: not a tar file, or one that is damaged or cut short.
        UserError: a link, a device, or a name that leads out of the folder in which the archive would be unpacked.
    """
    archive = Archive(file, shard)
    for found in archive.headers():
        if found.isdir() or (found.isreg() and found.name.endswith("/")):
            continue
        archive.refuse_unsafe(found)
        match = SAMPLE_NAME.fullmatch(found.name)
        if match and not is_hidden(*match.groups()):
            member = Member(match[1], match[2], found.offset_data, found.size, found.crc)
            yield member, archive.read(found.size) if wanted(member.extension) else None


def is_hidden(key: str, extension: str) -> bool:
    """Return whether a file is no member of a sample because its name begins with a dot."""
    return not key.strip("./") or (key.endswith("/") and extension.startswith("._"))


class Header(tarfile.TarInfo):
    """A member's header, with the CRC-32 of its block, the last one of several."""

    crc = 0

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Header:
        """Return the header in a block, as tarfile does; refuse sizes that would fill the memory."""
        found = super().frombuf(buf, encoding, errors)
        if not 0 <= found.size <= (MOST_METADATA if found.type in METADATA else MOST_BYTES):
            raise tarfile.HeaderError("size")
        found.crc = zlib.crc32(buf)
        return found


class Archive:
    """A tar file that is read from its start to its end, for tarfile; what comes next is at byte ``place``."""

    def __init__(self, file: IO[bytes], shard: str) -> None:
        self.file, self.shard, self.place = file, shard, 0

    def headers(self) -> Iterator[Header]:
        """Yield the headers of all members; a member's content can be read before the next header is asked for."""
        try:
            archive = tarfile.TarFile(fileobj=self, tarinfo=Header, encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
            found = archive.next()
            while found is not None:
                assert isinstance(found, Header)
                if not 0 <= found.size <= MOST_BYTES:
                    raise self.damaged("a header without a size")
                yield found
                self.skip(archive.offset - self.place)
                found = Header.fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # not in the documentation
            pass
        except UserError:
            raise
        except MALFORMED:
            raise self.damaged("no header, or a damaged one,") from None
        while rest := self.file.read(1 << 20):
            if rest.strip(b"\0"):
                raise self.damaged("there is more after the end mark, as in archives that were put together with cat")

    def read(self, length: int) -> bytes:
        """Return the next bytes; raise DamagedShardError if there are fewer."""
        pieces, missing = [], length
        while missing and (piece := self.file.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        self.place += length - missing
        if missing:
            raise self.damaged("cut short" if self.place else "empty")
        return b"".join(pieces)

    def tell(self) -> int:
        """Return ``place``."""
        return self.place

    def skip(self, length: int) -> None:
        """Leave out so many bytes, without reading them if the file is seekable."""
        if self.file.seekable():
            self.file.seek(length, 1)  # beyond the end of a file that was cut short; the next header is not there then
            self.place += length
            return
        while length:
            length -= len(self.read(min(length, 1 << 20)))

    def refuse_unsafe(self, found: Header) -> None:
        """Raise UserError for a member that no data set needs, and an attacker might use."""
        if not found.isreg() or found.issparse():
            fix = "a link, a device or a sparse file; pack plain files only (tar --dereference --hard-dereference)"
            raise UserError(f"shard {self.shard}: has {found.name!r}, {fix}")
        if found.name.startswith("/") or ".." in found.name.split("/"):
            fix = "leads out of its folder; pack with relative names"
            raise UserError(f"shard {self.shard}: the name {found.name!r} {fix}")
        if "\0" in found.name or not found.name:
            raise self.damaged(f"the name {found.name!r}")

    def damaged(self, what: str) -> DamagedShardError:
        """Return the error for what is there before ``place``."""
        why = f"not a whole, uncompressed tar file ({what} at byte {self.place:,})"
        return DamagedShardError(f"shard {self.shard}: {why}; unpack or copy it again")
