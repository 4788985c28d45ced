"""A data set of shards, of which any sample can be had by its number."""

from __future__ import annotations

import fcntl
import operator
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.locks import unlock
from flyte_ddp.shards.cache import CacheFullError, ShardCache, mark_used
from flyte_ddp.shards.decoding import decode_sample
from flyte_ddp.shards.index import Shard, ShardIndex, read_index
from flyte_ddp.shards.samples import SampleTable, read_table, tabulate
from flyte_ddp.shards.tar import BLOCK, DamagedShardError, members
from flyte_ddp.shards.verification import explain_failure

MOST_OPEN = 32  # shards that one process keeps open, each with its table of samples
FETCHED_AHEAD = 4  # shards at the same time
WAIT_FOR_ROOM = 60.0  # seconds, in which others may finish with what fills the cache
MARKED_EVERY = 1.0  # seconds, the time of its last use on a shard that is read from

Sample = dict[str, Any]


class OpenShard:
    """A shard with its table of samples, opened for the first thread that reads from it, for several to use.

    Args:
        shard: as the index describes it.
        cache: through which it is opened. While no thread uses the shard, it may be evicted from the cache.
    """

    def __init__(self, shard: Shard, cache: ShardCache) -> None:
        self.shard, self.cache = shard, cache
        self.cached = storage.local_path(shard.url) is None
        self.users, self.marked = 0, time.monotonic()
        self.lock = threading.Lock()
        self.close: Callable[[], object] | None = None

    @contextmanager
    def in_use(self) -> Iterator[OpenShard]:
        """Keep the shard open and in the cache until the end of the block; see :meth:`open` for exceptions."""
        with self.lock:
            if self.close is None or (self.users == 0 and not self.lock_again()):
                self.open()
            if self.cached and time.monotonic() > self.marked + MARKED_EVERY:
                self.marked = time.monotonic()
                mark_used(self.file)
            self.users += 1
        try:
            yield self
        finally:
            with self.lock:
                self.users -= 1
                if self.cached and self.users == 0:
                    unlock(self.file)

    def lock_again(self) -> bool:
        """Lock the open file, if it is in a cache; return False if it was evicted, or is about to be."""
        if not self.cached:
            return True
        try:
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return os.fstat(self.file).st_nlink > 0

    def open(self) -> None:
        """Open the file, and read its table of samples, or make one where no table can be read.

        Raises DamagedShardError, or UserError if it cannot be had or has another number of samples than in the index.
        """
        shard = self.shard
        if self.close is not None:
            self.close()
            self.close = None
        with wait_for_room(shard, self.cache) as file:
            try:
                found = (member for member, _ in members(file, shard.url))
                self.table = read_table_or_none(shard) or tabulate(found, shard.url)
            except OSError as error:
                raise explain_failure(shard, error) from None
            if len(self.table) != shard.samples:
                raise UserError(
                    f"shard {shard.url}: has {len(self.table):,} samples and not the {shard.samples:,} that the index "
                    "says; renew the index: python -m flyte_ddp.shards create"
                )
            self.file = os.dup(file.fileno())  # which may be in use when Python collects the file
            self.close = weakref.finalize(self, os.close, self.file)

    def read(self, sample: int, wanted: Container[str] | None = None) -> tuple[str, dict[str, bytes]]:
        """Return the key of the shard's sample of that number, and its members; see :func:`read_members`."""
        try:
            return read_members(self.shard, self.table, sample, partial(read_at, self.file), wanted)
        except OSError as error:
            raise explain_failure(self.shard, error) from None


def read_members(
    shard: Shard,
    table: SampleTable,
    sample: int,
    read: Callable[[int, int], bytes],
    wanted: Container[str] | None = None,
) -> tuple[str, dict[str, bytes]]:
    """Return a sample's key, and the contents of its members by their extensions.

    Args:
        shard: as the index describes it.
        table: of the shard's samples.
        sample: its number in the shard.
        read: gives bytes of the shard, by their place and number. DamagedShardError: they are no such member.
        wanted: extensions in small letters, which stand for those in capitals, too; None for all members.
    """
    contents = {}
    for member in table.members(sample):
        if wanted is None or member.extension.lower() in wanted:
            content = member.content(read(member.offset - BLOCK, BLOCK + member.size))
            if content is None:
                raise DamagedShardError(
                    f"shard {shard.url}: damaged at byte {member.offset:,}, where {member.key}{member.extension} "
                    "should be; copy it again, or renew the index"
                )
            contents[member.extension] = content
    return table.keys[sample], contents


def read_at(file: int, start: int, length: int) -> bytes:
    """Return so many bytes of a file, or as many as there are; the system gives no more than 2 GB at a time."""
    content = piece = os.pread(file, length, start)
    while piece and len(content) < length:
        piece = os.pread(file, length - len(content), start + len(content))
        content += piece
    return content


class OpenShards:
    """The shards that one process has open, and those that it is to fetch."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.lock = threading.Lock()
        self.shards: OrderedDict[int, OpenShard] = OrderedDict()  # used last comes last
        self.wanted: dict[int, None] = {}  # to be fetched, in the order in which they will be read
        self.ahead: set[int] = set()  # fetched, or being fetched, and not read from yet
        self.fetching = threading.Semaphore(FETCHED_AHEAD)


class ShardReader:
    """Reads samples from shards, of which it keeps those used last open. Threads may share it.

    Args:
        index: of the shards.
        cache: for shards that are not on this machine.
        most_open: how many shards it keeps open.
        most_ahead: how many it fetches before they are read, as more would fill a small cache.
    """

    def __init__(
        self, index: ShardIndex, cache: ShardCache, most_open: int = MOST_OPEN, most_ahead: int = FETCHED_AHEAD
    ) -> None:
        self.index, self.cache, self.most_open, self.most_ahead = index, cache, most_open, most_ahead
        self.open_shards = OpenShards()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardReader, (self.index, self.cache, self.most_open, self.most_ahead)

    @property
    def own(self) -> OpenShards:
        """What this process has open: a forked child begins without any, and without locks that its parent held."""
        if self.open_shards.process != os.getpid():
            self.open_shards = OpenShards()
        return self.open_shards

    def read(self, sample: int, wanted: Container[str] | None = None) -> tuple[str, dict[str, bytes]]:
        """Return the key and the members (see :func:`read_members`) of the index's sample of that number.

        Fetches its shard if it is not here, and once more if it is damaged. Raises DamagedShardError if it still is, or
        UserError if it cannot be had.
        """
        number, inside = self.index.locate(sample)
        try:
            with self.using(number) as shard:
                return shard.read(inside, wanted)
        except DamagedShardError:
            self.heal(sample, damaged=True)
        with self.using(number) as shard:  # in any case: another process may have healed it
            return shard.read(inside, wanted)

    def heal(self, sample: int, *, damaged: bool = False) -> bool:
        """Remove the cached copy of the sample's shard if it is damaged, so that the next read fetches it again.

        For a sample that cannot be decoded, or with ``damaged`` for a shard that cannot be read. Returns False if the
        copy is as it was fetched, or if that cannot be known.
        """
        number, _ = self.index.locate(sample)
        healed = self.cache.heal(self.index.shards[number], damaged=damaged)
        with self.own.lock:  # afterwards: before, another thread could open the damaged one once more
            self.own.shards.pop(number, None)
        return healed

    @contextmanager
    def using(self, number: int) -> Iterator[OpenShard]:
        """Give the shard of that number, fetched if it is not here; it is not evicted until the end of the block."""
        own = self.own
        with own.lock:
            shard = own.shards.setdefault(number, OpenShard(self.index.shards[number], self.cache))
            own.shards.move_to_end(number)
            while len(own.shards) > self.most_open:  # closed when nobody uses it any more
                own.shards.popitem(last=False)
        with shard.in_use():
            if number in own.ahead or number in own.wanted:
                with own.lock:
                    own.ahead.discard(number)
                    own.wanted.pop(number, None)
                self.prefetch([])
            yield shard

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Let threads fetch shards that will be read after those asked for before; errors are left to who reads."""
        own = self.own
        with own.lock:
            own.wanted |= {number: None for number in numbers if number not in own.ahead}
            while own.wanted and len(own.ahead) < self.most_ahead:
                number = next(iter(own.wanted))
                del own.wanted[number]
                if number in own.shards:
                    continue
                own.ahead.add(number)
                if not self.cache.holds(self.index.shards[number]):
                    # A daemon: nobody waits for it at the end of a process, and a download can be cut off at any time.
                    name = f"prefetch {number}"
                    threading.Thread(target=self.fetch, args=(own, number), name=name, daemon=True).start()

    def fetch(self, own: OpenShards, number: int) -> None:
        """Fetch a shard into the cache; leave its errors to who reads it."""
        with own.fetching, suppress(UserError), self.cache.open(self.index.shards[number]) as file:
            unlock(file.fileno())

    def close(self) -> None:
        """Close all shards, those in use when their users are done."""
        with self.own.lock:
            self.own.shards.clear()


def wait_for_room(shard: Shard, cache: ShardCache) -> BinaryIO:
    """Open the shard's file, waiting up to WAIT_FOR_ROOM for room in the cache.

    Other readers release their shards after each sample, so room normally appears soon.
    """
    deadline, pause = time.monotonic() + WAIT_FOR_ROOM, 0.01
    while True:
        try:
            return cache.open(shard)
        except CacheFullError:
            if time.monotonic() > deadline:
                raise
            time.sleep(pause)
            pause = min(2 * pause, 1.0)


def read_table_or_none(shard: Shard) -> SampleTable | None:
    """Return the table beside the index, or None if it cannot be read: the shard itself has all that is in it."""
    try:
        return None if shard.table is None else read_table(shard)
    except (storage.UnavailableError, ValueError):
        return None


class ShardDataset:
    """A map-style data set, for ``torch.utils.data.DataLoader`` or anything that takes numbers to samples.

    A sample is a dict with its members by their extensions (``.jpg``, ``.cls``), decoded by their kind
    (:func:`flyte_ddp.shards.decoding.decode_sample`), and ``__key__``, ``__shard__``, ``__shardindex__``,
    ``__index__`` and ``__dataset__`` as in wids.

    Args:
        index: an index or its address.
        cache: a cache or its folder, for shards that are not on this machine.
        decode: whether to decode; else members are bytes.

    Raises:
        UserError: no such index, or one that is none.
    """

    def __init__(self, index: ShardIndex | Path | str, cache: ShardCache | Path | str, *, decode: bool = True) -> None:
        self.index = index if isinstance(index, ShardIndex) else read_index(str(index))
        self.reader = ShardReader(self.index, cache if isinstance(cache, ShardCache) else ShardCache(Path(cache)))
        self.decode = decode

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: Any) -> Sample:
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        number %= len(self)
        sample = make_sample(self.index, number, *self.reader.read(number))
        if not self.decode:
            return sample
        try:
            return decode_sample(sample)
        except UserError:
            if not self.reader.heal(number):
                raise
            return decode_sample(make_sample(self.index, number, *self.reader.read(number)))

    def close(self) -> None:
        """Close the open shards."""
        self.reader.close()


def make_sample(index: ShardIndex, number: int, key: str, contents: dict[str, bytes]) -> Sample:
    """Return a sample's members, and the other keys that wids has."""
    found, inside = index.locate(number)
    shard = index.shards[found]
    return {
        **contents,
        "__key__": key,
        "__dataset__": index.parts[shard.part].name,
        "__index__": number,
        "__shard__": shard.url,
        "__shardindex__": inside,
    }
