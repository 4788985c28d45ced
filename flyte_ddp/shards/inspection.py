"""A look at single samples, without fetching their shards where that can be helped."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.shards.dataset import ShardDataset, stored_table
from flyte_ddp.shards.index import read_index
from flyte_ddp.shards.tar import BLOCK, content_of


def read_sample(address: str, number: int) -> dict[str, Any]:
    """A sample with its members as bytes, as :class:`flyte_ddp.shards.dataset.ShardDataset` gives it.

    Raises:
        UserError: no such sample, or it cannot be had.
    """
    index = read_index(address)
    if not 0 <= number < len(index):
        raise UserError(f"sample {number}: the index has {len(index):,}, so it must be 0..{len(index) - 1}")
    found, inside = index.locate(number)
    shard = index.shards[found]
    table = stored_table(shard)
    if table is None or storage.local_path(shard.url) is not None:
        with tempfile.TemporaryDirectory() as folder:
            whole: dict[str, Any] = ShardDataset(index, Path(folder), decode=False)[number]
            return whole
    sample: dict[str, Any] = {}
    for member in table.members(inside):
        span = (member.offset - BLOCK, member.offset + member.size)
        try:
            block = storage.with_retries(shard.url, [shard.url], partial(storage.read, span=span))
        except storage.AllFailedError as error:
            failure = next(iter(error.failures.values()))
            raise UserError(f"shard {shard.url}: cannot be read ({failure}); check the address") from None
        content = content_of(block, member.size)
        if content is None:
            raise UserError(f"shard {shard.url}: is not the one that the tables beside {address} are of; renew these")
        sample[member.extension] = content
    return sample | {
        "__key__": table.keys[inside],
        "__dataset__": index.parts[shard.part].name,
        "__index__": number,
        "__shard__": shard.url,
        "__shardindex__": inside,
    }
