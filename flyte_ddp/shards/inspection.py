"""Refuse shards that training cannot read, by the first sample of each data set."""

from flyte_ddp import storage
from flyte_ddp.shards.cache import unusable_shard_error
from flyte_ddp.shards.decoding import LABEL, find_image_and_label, parse_class_number
from flyte_ddp.shards.index import Shard, ShardIndex
from flyte_ddp.shards.scanning import HashedStream
from flyte_ddp.shards.tar import iterate_members


def refuse_unfit_samples(index: ShardIndex) -> None:
    """Read, with retries, the first sample of each data set in an index; UserError if training cannot use it."""
    first: dict[int, Shard] = {}  # shard with a sample of each part
    for shard in index.shards:
        if shard.samples:
            first.setdefault(shard.part, shard)
    for shard in first.values():
        try:
            storage.retry(shard.url, refuse_unfit_first_sample)
        except storage.UnavailableError as failure:
            raise unusable_shard_error(shard, failure) from None


def refuse_unfit_first_sample(url: str) -> None:
    """Read a shard until its first sample ends; UserError if that has no image or no class number."""
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
