"""Read tar files as seekable files and as streams."""

import io

from flyte_ddp.shards.samples import SampleTable, tabulate_members
from flyte_ddp.shards.scanning import HashedStream
from flyte_ddp.shards.tar import Member, iterate_members


def as_stream(content: bytes) -> HashedStream:
    """Return a file that can be read only once and comes in small pieces, as from a network."""
    return HashedStream(content[start : start + 700] for start in range(0, len(content), 700))


def members_of(content: bytes) -> list[Member]:
    """Return the members; assert that a seekable file and a stream give the same."""
    seekable, stream = (list(iterate_members(file, "x.tar")) for file in (io.BytesIO(content), as_stream(content)))
    assert seekable == stream
    return [member for member, _ in seekable]


def table_of(content: bytes) -> SampleTable:
    return tabulate_members(members_of(content), "x.tar")
