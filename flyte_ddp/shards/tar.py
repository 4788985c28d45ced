"""Which files a shard holds, and where in it they are.

A shard is an uncompressed tar file in webdataset's convention: files next to each other whose names are equal up to the
first dot of their last part make up one sample. It is read strictly, because training relies on what is found here.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Container, Iterator
from pathlib import PurePosixPath
from typing import IO, NamedTuple

from flyte_ddp.errors import UserError

BLOCK = 512
SAMPLE_NAME = re.compile(r"((?:.*/)?.*?)(\..*)", re.DOTALL)  # wids' rule: key and extension, the dot included


class DamagedShardError(UserError):
    """A shard that is not what its index says or not a tar file; fetched again it may be whole."""


class Member(NamedTuple):
    """A file in a shard: its sample's key, its extension with the dot, and the place of its content in bytes."""

    key: str
    extension: str
    offset: int
    size: int


class DamagedHeaderError(Exception):
    """A header that is none."""


# Not in tarfile's stubs.
DAMAGED_HEADERS = (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError)  # type: ignore[attr-defined]


class StrictTarInfo(tarfile.TarInfo):
    """Where a header is damaged tarfile behaves as if the archive ended there; this one says so."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> StrictTarInfo:
        """Reads the next header."""
        try:
            return super().fromtarfile(tarfile)
        except DAMAGED_HEADERS as error:
            raise DamagedHeaderError(f"at byte {tarfile.offset:,}: {error}") from None


def members(
    file: IO[bytes], shard: str, *, stream: bool = False, read: Container[str] = ()
) -> Iterator[tuple[Member, bytes | None]]:
    """The files of a shard in their order; folders and files without an extension are left out, as in wids.

    Args:
        file: the tar file.
        shard: its name, for errors.
        stream: the file can only be read from its start to its end.
        read: extensions of members whose content is wanted, too.

    Raises:
        DamagedShardError: not a tar file, or one that is damaged or cut short.
        UserError: a link, a device, or a name that leads out of the folder in which the archive would be unpacked.
    """
    try:
        with tarfile.open(fileobj=file, mode="r|" if stream else "r:", tarinfo=StrictTarInfo) as archive:
            for found in archive:
                archive.members = []  # type: ignore[attr-defined]  # else all headers stay in memory
                if found.isdir():
                    continue
                check_member(found, shard)
                if match := SAMPLE_NAME.fullmatch(found.name):
                    content = archive.extractfile(found) if match[2] in read else None
                    member = Member(match[1], match[2], found.offset_data, found.size)
                    yield member, content.read() if content else None
    except (tarfile.TarError, EOFError, DamagedHeaderError) as error:
        raise DamagedShardError(
            f"shard {shard}: not a whole, uncompressed tar file ({error}); unpack or copy it again"
        ) from None


def check_member(found: tarfile.TarInfo, shard: str) -> None:
    """Refuses what no data set needs and an attack would."""
    if not found.isreg() or found.issparse():
        raise UserError(
            f"shard {shard}: {found.name!r} is a link, a device or a sparse file; pack plain files only "
            "(tar --dereference --hard-dereference)"
        )
    path = PurePosixPath(found.name)
    if path.is_absolute() or ".." in path.parts:
        raise UserError(f"shard {shard}: the name {found.name!r} leads out of its folder; pack with relative names")


def content_of(block: bytes, size: int) -> bytes | None:
    """A member's content, given its header (one block) and what follows; None if there is no member of that size."""
    if len(block) != BLOCK + size or block[257:262] != b"ustar":
        return None
    try:
        stated = tarfile.nti(block[124:136])  # type: ignore[attr-defined]
    except tarfile.InvalidHeaderError:  # type: ignore[attr-defined]
        return None
    return block[BLOCK:] if stated == size else None
