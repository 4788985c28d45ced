"""A look at the first sample of a shard, which tells, before a rank starts, whether training can read its kind."""

from flyte_ddp import storage
from flyte_ddp.shards.decoding import LABEL, class_number, image_and_label
from flyte_ddp.shards.index import Shard, ShardIndex
from flyte_ddp.shards.scanning import HashedStream
from flyte_ddp.shards.tar import members
from flyte_ddp.shards.verification import explain_failure


def refuse_unfit(index: ShardIndex, *, patient: bool = True) -> None:
    """Refuse an index whose first sample, or that of one of its parts, training cannot read.

    Opens one shard of each part and reads it up to the end of its first sample: whoever has made the index need not
    have looked at members.

    Raises UserError if the sample has no image or no label, or its shard cannot be read or is no tar file; if
    ``patient``, what may fail for a while is tried again, with pauses of seconds.
    """
    firsts: dict[int, Shard] = {}
    for shard in index.shards:
        if shard.samples:
            firsts.setdefault(shard.part, shard)
    for shard in firsts.values():
        try:
            if patient:
                storage.retried(shard.url, refuse_unfit_shard)
            else:
                refuse_unfit_shard(shard.url)
        except storage.UnavailableError as failure:
            raise explain_failure(shard, failure) from None


def refuse_unfit_shard(url: str) -> None:
    """Refuse a shard whose first sample training cannot read; see :func:`refuse_unfit`."""
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
    _, label = image_and_label(name, found)
    class_number(name, found[label] or b"")
