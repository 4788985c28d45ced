"""Find the files in a shard, with their places.

A shard is an uncompressed tar file in webdataset's convention: adjacent files whose names are equal up to the first dot
of the last part are one sample. Python's tarfile parses each header, but the loop over the headers is here: tarfile's
own loop ends without an error at a damaged header and at a missing end.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flyte_ddp.errors import UserError

BLOCK = tarfile.BLOCKSIZE
MOST_BYTES = 1 << 60  # of a file
SAMPLE_NAME = re.compile(r"((?:.*/)?.*?)(\..*)", re.DOTALL)  # wids' rule: key, and extension with its dot
# Exceptions of tarfile for malformed headers; RecursionError for a thousand metadata headers in a row.
MALFORMED = (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError)


class Member(NamedTuple):
    """A file in a shard."""

    key: str  # of its sample
    extension: str  # with the dot
    offset: int  # byte of the shard where the content begins
    size: int  # bytes of the content


def iterate_members(
    file: Any, shard: str, is_wanted: Callable[[str], bool] = lambda _: False
) -> Iterator[tuple[Member, bytes | None]]:
    """Yield the members of a tar file in their order, each with its content if ``is_wanted(extension)``, else None.

    Reads the file, which need not be seekable, to its end; ``file.read(n)`` may return fewer bytes only there. Skips
    folders, files without an extension (as wids), names that begin with a dot (as webdataset), and ``._x.jpg``, which a
    Mac's tar adds. Raises UserError if the file is no whole tar file, or has a link, a device, a sparse file, or a name
    outside its folder.
    """
    archive = Archive(file, shard)
    for header in archive.read_headers():
        if header.isdir() or (header.isreg() and header.name.endswith("/")):
            continue
        # No data set needs these members, and an attacker could use them.
        if not header.isreg() or header.issparse():
            fix = "a link, a device or a sparse file; pack plain files only (tar --dereference --hard-dereference)"
            raise UserError(f"shard {shard}: has {header.name!r}, {fix}")
        if header.name.startswith("/") or ".." in header.name.split("/"):
            fix = "leads out of its folder; pack with relative names"
            raise UserError(f"shard {shard}: the name {header.name!r} {fix}")
        if "\0" in header.name or not header.name:
            raise archive.damage_error(f"the name {header.name!r}")
        match = SAMPLE_NAME.fullmatch(header.name)
        if match is None:
            continue
        key, extension = match.groups()
        if key.strip("./") and not (key.endswith("/") and extension.startswith("._")):
            member = Member(key, extension, header.offset_data, header.size)
            yield member, archive.read_content(header.size) if is_wanted(extension) else None


class Archive:
    """A tar file that is read once from start to end; ``place`` is the number of the next byte.

    tarfile reads headers through this object, so ``read``, ``tell`` and ``seek`` have the names of a file's methods.
    """

    def __init__(self, file: Any, shard: str) -> None:
        self.file, self.shard, self.place = file, shard, 0
        self.block = b""  # the last block that was read of headers

    def read_headers(self) -> Iterator[tarfile.TarInfo]:
        """Yield the header of each entry, also of folders and links; UserError for damage or joined archives."""
        try:
            archive = tarfile.TarFile(fileobj=self, encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
            for header in iter(archive.next, None):
                if not 0 <= header.size <= MOST_BYTES:
                    raise self.damage_error("a header without a size")
                yield header
                archive.members.clear()  # else it would keep all headers
        except UserError:
            raise
        except MALFORMED:
            raise self.damage_error("no header, or a damaged one,") from None
        if self.block != bytes(BLOCK):  # where tarfile ends without an error
            raise self.damage_error("no header, or a damaged one,")
        while rest := self.file.read(1 << 20):
            if rest.strip(b"\0"):
                raise self.damage_error("bytes follow the end mark, as in archives that were joined with cat")

    def read(self, length: int) -> bytes:
        """Return the next ``length`` bytes of a header to tarfile, and keep the last block of them."""
        content = self.read_content(length)
        self.block = content[-BLOCK:]
        return content

    def read_content(self, length: int) -> bytes:
        content: bytes = self.file.read(length)
        self.place += len(content)
        if len(content) < length:
            raise self.damage_error("cut short" if self.place else "empty")
        return content

    def tell(self) -> int:
        return self.place

    def seek(self, place: int) -> None:
        """Move forward to byte ``place``; if a seekable file ends before it, the next read raises the error."""
        if self.file.seekable():
            self.file.seek(place - self.place, 1)
            self.place = place
        while self.place < place:
            self.read_content(min(place - self.place, 1 << 20))

    def damage_error(self, problem: str) -> UserError:
        why = f"not a whole, uncompressed tar file ({problem} at byte {self.place:,})"
        return UserError(f"shard {self.shard}: {why}; unpack or copy it again")
