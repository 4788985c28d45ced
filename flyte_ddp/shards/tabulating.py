"""Read a shard once: its digest, the table of its samples, and problems of its samples."""

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from flyte_ddp import storage
from flyte_ddp.catalog import IMAGES
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.lookahead import map_in_threads
from flyte_ddp.core.samples.pictures import convert_to_opaque_8_bit
from flyte_ddp.shards.index import (
    Shard,
)
from flyte_ddp.shards.members import LABEL, choose_image_and_label, open_image_lazily, parse_class_number
from flyte_ddp.shards.tar import Member, SampleTable, group_members_into_samples, iterate_tar_members

THREADS = 8  # shards that are read at the same time
MOST_LABEL_BYTES = 1 << 10  # a header may claim any size
MOST_CLASSES = 1_000_000  # maximum without class names: a higher number is probably no label
Item = TypeVar("Item")
Result = TypeVar("Result")


class ScannedShard(NamedTuple):
    """The result of reading a whole shard."""

    shard: Shard
    table: SampleTable
    labels: int  # the highest class number in a ``.cls`` member plus 1, or 0 without ``.cls`` members
    damaged: list[str]  # a sentence about each image that cannot be decoded


class HashedStream:
    """A file of byte chunks that can be read once, with digests and number of the bytes read so far."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks = chunks
        self.rest = bytearray()
        self.md5, self.sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
        self.count = 0

    def seekable(self) -> bool:
        """Return False, because skipped bytes must be read for the digests."""
        return False

    def read(self, length: int) -> bytes:
        """Return the next ``length`` bytes, or fewer at the end of the file. Adds the bytes read to the digests."""
        while len(self.rest) < length and (chunk := next(self.chunks, None)) is not None:
            self.md5.update(chunk)
            self.sha256.update(chunk)
            self.count += len(chunk)
            self.rest += chunk
        piece = bytes(self.rest[:length])
        del self.rest[:length]
        return piece


def is_label_member(member: Member, shard: str) -> bool:
    """Return whether a member is a label (``.cls``). ``shard`` names the shard in errors.

    Raises:
        UserError: The label has more than 1,024 bytes.
    """
    if member.extension.lower() != LABEL:
        return False
    if member.size > MOST_LABEL_BYTES:
        what = f"its {member.extension} has {member.size:,} bytes"
        raise UserError(f"sample {member.key!r} in {shard}: {what}; must be a class number")
    return True


def hash_and_tabulate_shard(url: str, stopped: threading.Event, *, decode: bool = False) -> ScannedShard:
    """Read a whole shard, and return its digests and the table of its samples. Tries up to 4 times.

    Args:
        url: The address of the shard.
        stopped: If set, reading stops, and the call ends with an error.
        decode: If True, images are decoded, and the result lists images that cannot be decoded.

    Raises:
        UserError: The shard is unreadable or malformed, or a label is no class number.
    """

    def is_wanted(member: Member) -> bool:
        return is_label_member(member, url) or (decode and member.extension.rpartition(".")[2].lower() in IMAGES)

    def hash_and_tabulate_once(address: str) -> ScannedShard:
        """Read the shard at ``address`` in one try, and return its digests and the table of its samples.

        Raises:
            UnavailableError: The shard is unreadable or cut short.
        """
        found, damaged, labels = list[Member](), list[str](), 0
        with storage.open_file(address) as file:
            # Once ``stopped`` is set, the shard seems to be cut short.
            stream = HashedStream(itertools.takewhile(lambda _: not stopped.is_set(), file.chunks))
            for member, content in iterate_tar_members(stream, url, is_wanted):
                found.append(member)
                if content is None:
                    continue
                sample = f"sample {member.key!r} in {url}"
                if is_label_member(member, url):
                    label = parse_class_number(sample, content)
                    if label < 0:
                        raise UserError(f"{sample}: label {label}; must be at least 0")
                    labels = max(labels, label + 1)
                elif problem := describe_decoding_problem(content):
                    damaged.append(f"{sample}: {member.extension} cannot be decoded ({problem}); pack it again")
        storage.check_received_length(stream.count, file.size, remote=storage.find_local_path(address) is None)
        table = group_members_into_samples(found, url)
        shard = Shard(url, len(table), stream.count, stream.md5.hexdigest(), stream.sha256.hexdigest())
        return ScannedShard(shard, table, labels, damaged)

    try:
        return storage.call_with_retries(url, hash_and_tabulate_once)
    except storage.UnavailableError as failure:
        raise failure.to_user_error(f"shard {url}: cannot be read ({failure}); check the address") from None


@contextmanager
def map_in_stoppable_threads(
    scan: Callable[[Item, threading.Event], Result], items: Sequence[Item]
) -> Iterator[Iterator[Result]]:
    """Yield an iterator over ``scan(item, stopped)`` of all items in order, computed by 8 threads.

    The iterator raises errors of ``scan``. The end of the block sets ``stopped``, and does not wait for running calls.
    ``scan`` must return soon after ``stopped`` is set.
    """
    stopped = threading.Event()
    try:
        with map_in_threads(lambda item: scan(item, stopped), items, THREADS) as scanned:
            yield scanned
    finally:
        stopped.set()  # at exit, Python would wait for threads that still read


def describe_unfit_samples(table: SampleTable, url: str) -> list[str]:
    """Return a sentence about each sample of a shard without an image or a label. ``url`` is named in the sentences."""
    unfit = []
    for number, key in enumerate(table.keys):
        try:
            extensions = (member.extension for member in table.list_sample_members(number))
            choose_image_and_label(f"sample {key!r} in shard {url}", extensions)
        except UserError as error:
            unfit.append(error.message)
    return unfit


def describe_decoding_problem(content: bytes) -> str:
    """Return why Pillow cannot decode the bytes of an image, or "" if Pillow can.

    Some images that Pillow rejects can be decoded by torchcodec.
    """
    try:
        image = open_image_lazily(content)
        image.load()
        convert_to_opaque_8_bit(image)
    except Exception as error:  # Pillow raises many kinds of errors
        return str(error) or type(error).__name__
    return ""
