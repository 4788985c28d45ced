"""Read single samples, if possible without reading their whole shards."""

import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import replace_file
from flyte_ddp.shards.dataset import Sample, ShardDataset, make_sample, read_members, read_table_or_none
from flyte_ddp.shards.index import read_index


def read_sample(address: str, number: int) -> Sample:
    """Read one sample; return a dict of its members (bytes, by extension) and wids' keys (``__key__``, ...).

    Reads only the shard's table and the sample's members. If there is no table, or the server gives no parts of files,
    fetches the whole shard into a temporary folder.

    Args:
        address: address of the index.
        number: the sample's number in the index.

    Raises:
        UserError: there is no such sample, or the index or the shard cannot be read.
    """
    index = read_index(address)
    if not 0 <= number < len(index):
        raise UserError(f"sample {number}: the index has {len(index):,}, so it must be 0..{len(index) - 1}")
    shard_number, inside = index.locate(number)
    shard = index.shards[shard_number]

    def read_bytes(start: int, length: int) -> bytes:
        """Read bytes of the shard, with retries, and return them."""
        return storage.retry(shard.url, partial(storage.read_file, span=(start, start + length)))

    table = read_table_or_none(shard)
    if table is not None and len(table) == shard.samples:
        with suppress(storage.UnavailableError):  # the server may give no parts of files
            return make_sample(index, number, *read_members(shard, table, inside, read_bytes))
    with tempfile.TemporaryDirectory() as folder:
        return ShardDataset(index, folder, decode=False)[number]


def write_members(key: str, members: dict[str, bytes], folder: Path) -> None:
    """Write each member of a sample to a file in a folder; the file's name is key + extension, with "_" for "/".

    Makes the folder; replaces files of the same names. Raises UserError if a file cannot be written.
    """
    for extension, content in members.items():
        with replace_file(folder / f"{key}{extension}".replace("/", "_")) as file:
            file.write(content)
