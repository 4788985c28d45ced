"""A look at the first sample of a shard, which tells, before a rank starts, whether training can read its kind."""

from __future__ import annotations

from flyte_ddp import storage
from flyte_ddp.shards.decoding import LABEL, class_number, image_and_label
from flyte_ddp.shards.index import Shard, ShardIndex
from flyte_ddp.shards.scanning import HashedStream
from flyte_ddp.shards.tar import members
from flyte_ddp.shards.verification import failed


def refuse_unfit(index: ShardIndex, *, patient: bool = True) -> None:
    """Refuse an index whose first sample, or that of one of its parts, training cannot read.

    Opens one shard of each part and reads it up to the end of its first sample: whoever has made the index need not
    have looked at members.

    Args:
        index: of shards, here or remote.
        patient: whether to try again, with pauses of seconds, what fails for a while.

    Raises:
        UserError: the sample has no image or no label, or its shard cannot be read or is no tar file.
    """
    firsts: dict[int, Shard] = {}
    for shard in index.shards:
        if shard.samples:
            firsts.setdefault(shard.part, shard)
    for shard in firsts.values():
        try:
            if patient:
                storage.retried(shard.url, refuse_first)
            else:
                refuse_first(shard.url)
        except storage.UnavailableError as failure:
            raise failed(shard, failure) from None


def refuse_first(url: str) -> None:
    """Refuse a shard whose first sample training cannot read; see :func:`refuse_unfit`."""
    found: dict[str, bytes | None] = {}
    first = None
    with storage.open_file(url) as file:
        stream = HashedStream(file.chunks)
        for member, content in members(stream, url, lambda extension: extension.lower() == LABEL):  # type: ignore[arg-type]
            if first not in (None, member.key):
                break
            first = member.key
            found[member.extension] = content
    name = f"sample {first!r} in shard {url}"
    _, label = image_and_label(name, found)
    class_number(name, found[label] or b"")
