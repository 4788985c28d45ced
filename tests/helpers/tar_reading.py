"""Read tar files as seekable files and as streams."""

import io

from flyte_ddp.shards.samples import SampleTable, tabulate
from flyte_ddp.shards.tar import Member, members


class Stream(io.RawIOBase):
    """Bytes that can be read only once and come in small pieces, as from a network."""

    def __init__(self, content: bytes) -> None:
        self.rest = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        return self.rest.readinto(memoryview(buffer)[:700])


def members_of(content: bytes) -> list[Member]:
    """Return the members; assert that a seekable file and a stream give the same."""
    seekable, stream = (list(members(file, "x.tar")) for file in (io.BytesIO(content), Stream(content)))
    assert seekable == stream
    return [member for member, _ in seekable]


def table_of(content: bytes) -> SampleTable:
    return tabulate(members_of(content), "x.tar")
