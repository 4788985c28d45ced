"""Read single samples of an index, if possible without reading their whole shards."""

import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import replace_file
from flyte_ddp.shards.cache import unusable_shard_error
from flyte_ddp.shards.dataset import Sample, ShardDataset, make_sample, read_sample_members
from flyte_ddp.shards.decoding import LABEL, find_image_and_label, parse_class_number
from flyte_ddp.shards.index import Shard, ShardIndex, read_index
from flyte_ddp.shards.samples import read_table_or_none
from flyte_ddp.shards.scanning import HashedStream
from flyte_ddp.shards.tar import iterate_members


def read_sample(index: ShardIndex | str, number: int) -> Sample:
    """Read one sample of an index, or of the index at an address, and return it as a dict.

    The dict has the sample's members (bytes, by extension) and wids' keys, such as ``__key__``. Reads only the members
    if the shard has a table of its samples, else the whole shard; downloads a remote one into a temporary folder.
    Raises UserError if the sample cannot be read.
    """
    index = index if isinstance(index, ShardIndex) else read_index(index)
    if not 0 <= number < len(index):
        raise UserError(f"sample {number}: the index has {len(index):,}, so it must be 0..{len(index) - 1}")
    shard_number, inside = index.locate(number)
    shard = index.shards[shard_number]

    def read_bytes(start: int, length: int) -> bytes:
        return storage.retry(shard.url, partial(storage.read_file, span=(start, start + length)))

    table = read_table_or_none(shard)
    if table is not None and len(table) == shard.samples:
        with suppress(storage.UnavailableError):  # the server may give no parts of files
            return make_sample(index, number, *read_sample_members(shard, table, inside, read_bytes))
    with tempfile.TemporaryDirectory() as folder:
        return ShardDataset(index, folder, decode=False)[number]


def write_members(key: str, members: dict[str, bytes], folder: Path) -> None:
    """Write each member of a sample to a file in a folder, named key + extension, with "_" for "/"."""
    for extension, content in members.items():
        with replace_file(folder / f"{key}{extension}".replace("/", "_")) as file:
            file.write(content)


def refuse_unfit_samples(index: ShardIndex, *, patient: bool = True) -> None:
    """Raise UserError if training cannot read the first sample of one of the data sets in an index.

    Reads one shard of each data set until its first sample ends; with up to 3 retries if ``patient``.
    """
    first: dict[int, Shard] = {}  # shard with a sample of each part
    for shard in index.shards:
        if shard.samples:
            first.setdefault(shard.part, shard)
    for shard in first.values():
        try:
            if patient:
                storage.retry(shard.url, refuse_unfit_first_sample)
            else:
                refuse_unfit_first_sample(shard.url)
        except storage.UnavailableError as failure:
            raise unusable_shard_error(shard, failure) from None


def refuse_unfit_first_sample(url: str) -> None:
    """Read a shard until its first sample ends; raise UserError if the sample has no image or no class number."""
    key, found = None, dict[str, bytes | None]()
    with storage.open_file(url) as file:
        stream = HashedStream(file.chunks)
        for member, content in iterate_members(stream, url, lambda extension: extension.lower() == LABEL):
            if key not in (None, member.key):
                break
            key = member.key
            found[member.extension] = content
    name = f"sample {key!r} in shard {url}"
    _, label = find_image_and_label(name, found)
    parse_class_number(name, found[label] or b"")
