"""A look at single samples, without reading all of their shards where that can be helped."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing
from flyte_ddp.shards.dataset import Sample, ShardDataset, described, stored_table
from flyte_ddp.shards.index import Shard, read_index
from flyte_ddp.shards.tar import BLOCK


def read_sample(address: str, number: int) -> Sample:
    """A sample with its members as bytes, as :class:`flyte_ddp.shards.dataset.ShardDataset` gives it.

    Raises:
        UserError: no such sample, or it cannot be had.
    """
    index = read_index(address)
    if not 0 <= number < len(index):
        raise UserError(f"sample {number}: the index has {len(index):,}, so it must be 0..{len(index) - 1}")
    found, inside = index.locate(number)
    shard = index.shards[found]
    part = read_part(shard, inside)
    if part is None:
        with tempfile.TemporaryDirectory() as folder:
            return ShardDataset(index, folder, decode=False).stored(number)
    key, contents = part
    return described(index, number, key, contents)


def read_part(shard: Shard, inside: int) -> tuple[str, dict[str, bytes]] | None:
    """A sample's key and members from a shard of which nothing else is read; None where that cannot be done."""
    table = stored_table(shard)
    if table is None or len(table) != shard.samples:
        return None
    contents = {}
    for member in table.members(inside):
        span = (member.offset - BLOCK, member.offset + member.size)
        try:
            stored = storage.retried(shard.url, partial(storage.read, span=span))
        except storage.UnavailableError:  # it may be a server that gives no parts of files; if not, it will be said
            return None
        content = member.content(stored)
        if content is None:
            raise UserError(
                f"shard {shard.url}: is not the one that the index is of; copy it again, or renew the index"
            )
        contents[member.extension] = content
    return table.keys[inside], contents


def write_members(key: str, members: dict[str, bytes], folder: Path) -> None:
    """Writes a sample's members into a folder, as files with plain names."""
    for extension, content in members.items():
        path = folder / f"{key}{extension}".replace("/", "_")
        with replacing(path) as file:
            file.write(content)
