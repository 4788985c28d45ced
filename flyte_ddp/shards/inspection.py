"""A look at single samples, without reading all of their shards where that can be helped."""

import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing
from flyte_ddp.shards.dataset import Sample, ShardDataset, make_sample, read_members, read_table_or_none
from flyte_ddp.shards.index import read_index


def read_sample(address: str, number: int) -> Sample:
    """Return a sample with its members as bytes, as :class:`flyte_ddp.shards.dataset.ShardDataset` gives it.

    Reads the sample's table and members only, if there is a table; otherwise fetches its shard into a temporary folder.

    Raises:
        UserError: no such sample, or it cannot be had.
    """
    index = read_index(address)
    if not 0 <= number < len(index):
        raise UserError(f"sample {number}: the index has {len(index):,}, so it must be 0..{len(index) - 1}")
    found, inside = index.locate(number)
    shard = index.shards[found]

    def read(start: int, length: int) -> bytes:
        return storage.retried(shard.url, partial(storage.read, span=(start, start + length)))

    table = read_table_or_none(shard)
    if table is not None and len(table) == shard.samples:
        with suppress(storage.UnavailableError):  # a server may give no parts of files
            return make_sample(index, number, *read_members(shard, table, inside, read))
    with tempfile.TemporaryDirectory() as folder:
        return ShardDataset(index, folder, decode=False)[number]


def write_members(key: str, members: dict[str, bytes], folder: Path) -> None:
    """Write a sample's members into a folder, as files with plain names."""
    for extension, content in members.items():
        with replacing(folder / f"{key}{extension}".replace("/", "_")) as file:
            file.write(content)
