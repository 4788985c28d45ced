"""Find out, before ranks start, whether training can read the samples of an index: it reads the first ones."""

from flyte_ddp import storage
from flyte_ddp.shards.decoding import LABEL, find_image_and_label, parse_class_number
from flyte_ddp.shards.index import Shard, ShardIndex
from flyte_ddp.shards.scanning import HashedStream
from flyte_ddp.shards.tar import members
from flyte_ddp.shards.verification import unusable_shard_error


def refuse_unfit_samples(index: ShardIndex, *, patient: bool = True) -> None:
    """Read the first sample of each part of an index; raise UserError if training cannot read it.

    Opens one shard of each part, and reads it until its first sample ends.

    Args:
        index: the index, of any tool.
        patient: whether transient errors are retried, with pauses of some seconds.

    Raises:
        UserError: a first sample has no image or no label, or its shard cannot be read or is no tar file.
    """
    firsts: dict[int, Shard] = {}
    for shard in index.shards:
        if shard.samples:
            firsts.setdefault(shard.part, shard)
    for shard in firsts.values():
        try:
            if patient:
                storage.retry(shard.url, refuse_unfit_shard)
            else:
                refuse_unfit_shard(shard.url)
        except storage.UnavailableError as failure:
            raise unusable_shard_error(shard, failure) from None


def refuse_unfit_shard(url: str) -> None:
    """Read a shard until its first sample ends; raise UserError if the sample has no image or no label.

    Raises UnavailableError if the shard cannot be read, DamagedShardError if it is no tar file.
    """
    found: dict[str, bytes | None] = {}
    key = None
    with storage.open_file(url) as file:
        stream = HashedStream(file.chunks)
        for member, content in members(stream, url, lambda extension: extension.lower() == LABEL):  # type: ignore[arg-type]
            if key not in (None, member.key):
                break
            key = member.key
            found[member.extension] = content
    name = f"sample {key!r} in shard {url}"
    _, label = find_image_and_label(name, found)
    parse_class_number(name, found[label] or b"")
