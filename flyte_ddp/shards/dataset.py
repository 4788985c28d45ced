"""Read any sample of a data set of shards by its number."""

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
from flyte_ddp.shards.cache import CacheFullError, ShardCache, mark_as_used
from flyte_ddp.shards.decoding import decode_sample
from flyte_ddp.shards.index import Shard, ShardIndex, read_index
from flyte_ddp.shards.samples import SampleTable, read_table, tabulate
from flyte_ddp.shards.tar import BLOCK, DamagedShardError, members
from flyte_ddp.shards.verification import unusable_shard_error

MOST_OPEN = 32  # shards that one process keeps open, each with its table of samples
FETCHED_AHEAD = 4  # shards that threads fetch before they are read, and at the same time
WAIT_FOR_ROOM = 60.0  # seconds that a reader waits for other readers to release shards in a full cache
MARKED_EVERY = 1.0  # seconds between two updates of the time of last use of a shard that is being read

Sample = dict[str, Any]


class OpenShard:
    """A shard and its table of samples, shared by the threads of a process; opened when a thread first uses it.

    While no thread uses the shard, the file stays open without a lock, so the shard may be evicted from the cache.

    Args:
        shard: the shard's entry in the index.
        cache: the cache that opens or fetches the shard.
    """

    def __init__(self, shard: Shard, cache: ShardCache) -> None:
        self.shard, self.cache = shard, cache
        self.cached = storage.local_path(shard.url) is None
        self.users, self.marked = 0, time.monotonic()
        self.lock = threading.Lock()
        self.close: Callable[[], object] | None = None

    @contextmanager
    def keep_open(self) -> Iterator[OpenShard]:
        """Yield this shard, open and protected from eviction in the block; open or fetch it if necessary.

        Updates the time of last use of a cached shard, once a second. Waits up to 60 s for room in the cache.

        Raises:
            DamagedShardError: the shard is damaged.
            UserError: the shard cannot be opened or fetched, or has another number of samples than the index says.
        """
        with self.lock:
            if self.close is None or (self.users == 0 and not self.lock_file()):
                self.open_file()
            if self.cached and time.monotonic() > self.marked + MARKED_EVERY:
                self.marked = time.monotonic()
                mark_as_used(self.file)
            self.users += 1
        try:
            yield self
        finally:
            with self.lock:
                self.users -= 1
                if self.cached and self.users == 0:
                    unlock(self.file)

    def lock_file(self) -> bool:
        """Lock the open file against eviction; return False if it was evicted or is being evicted.

        A shard that lies on this machine in its own place needs no lock: returns True.
        """
        if not self.cached:
            return True
        try:
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return os.fstat(self.file).st_nlink > 0

    def open_file(self) -> None:
        """Open the shard's file and read its table of samples; set ``file``, ``table`` and ``close``.

        Closes the file that was open before. Fetches the shard if it is not in the cache, and waits for room there. If
        there is no table beside the index, or it does not fit, reads the whole shard to make one.

        Raises:
            DamagedShardError: the shard is damaged.
            UserError: the shard cannot be opened or fetched, or has another number of samples than the index says.
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
                raise unusable_shard_error(shard, error) from None
            if len(self.table) != shard.samples:
                raise UserError(
                    f"shard {shard.url}: has {len(self.table):,} samples and not the {shard.samples:,} that the index "
                    "says; renew the index: python -m flyte_ddp.shards create"
                )
            self.file = os.dup(file.fileno())  # a descriptor of its own, as the block closes the file
            self.close = weakref.finalize(self, os.close, self.file)  # after the last reader has dropped this object

    def read_sample(self, number: int, wanted: Container[str] | None = None) -> tuple[str, dict[str, bytes]]:
        """Read a sample from the open file; return its key, and its members' contents by their extensions.

        Args:
            number: the sample's number in the shard.
            wanted: extensions (lower case) of the members to read; None for all members.

        Raises:
            DamagedShardError: a member is not where the table says.
            UserError: the file cannot be read.
        """
        try:
            return read_members(self.shard, self.table, number, partial(read_at, self.file), wanted)
        except OSError as error:
            raise unusable_shard_error(self.shard, error) from None


def read_members(
    shard: Shard,
    table: SampleTable,
    sample: int,
    read_bytes: Callable[[int, int], bytes],
    wanted: Container[str] | None = None,
) -> tuple[str, dict[str, bytes]]:
    """Read a sample of a shard; return its key, and its members' contents by their extensions.

    Args:
        shard: the shard's entry in the index, for errors.
        table: the table of the shard's samples.
        sample: the sample's number in the shard.
        read_bytes: called with a first byte and a length; returns these bytes of the shard.
        wanted: extensions (lower case) of the members to read, whose own case is ignored; None for all members.

    Raises:
        DamagedShardError: the shard has other bytes than the table says.
    """
    contents = {}
    for member in table.sample_members(sample):
        if wanted is None or member.extension.lower() in wanted:
            content = member.extract_content(read_bytes(member.offset - BLOCK, BLOCK + member.size))
            if content is None:
                raise DamagedShardError(
                    f"shard {shard.url}: damaged at byte {member.offset:,}, where {member.key}{member.extension} "
                    "should be; copy it again, or renew the index"
                )
            contents[member.extension] = content
    return table.keys[sample], contents


def read_at(file: int, start: int, length: int) -> bytes:
    """Read ``length`` bytes of a file (a descriptor) from byte ``start``; return fewer if the file ends before."""
    content = piece = os.pread(file, length, start)
    while piece and len(content) < length:  # Linux reads at most 2 GB with one call
        piece = os.pread(file, length - len(content), start + len(content))
        content += piece
    return content


class OpenShards:
    """The shards that one process has open, is fetching, or will fetch."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.lock = threading.Lock()
        self.shards: OrderedDict[int, OpenShard] = OrderedDict()  # by their numbers; the one used last comes last
        self.wanted: dict[int, None] = {}  # numbers of shards to fetch, in the order in which they will be read
        self.ahead: set[int] = set()  # numbers of shards that are being fetched or were fetched, and not read yet
        self.fetching = threading.Semaphore(FETCHED_AHEAD)


class ShardReader:
    """Reads samples from shards and keeps the shards used last open. Threads may share a reader; it can be pickled.

    Args:
        index: the index of the shards.
        cache: the cache for remote shards.
        most_open: maximum number of shards that stay open.
        most_ahead: maximum number of shards that are fetched before they are read; more would fill a small cache.
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
        """The state of this process: a forked child starts with no open shards and with free locks."""
        if self.open_shards.process != os.getpid():
            self.open_shards = OpenShards()
        return self.open_shards

    def read_sample(self, sample: int, wanted: Container[str] | None = None) -> tuple[str, dict[str, bytes]]:
        """Read a sample; return its key, and its members' contents by their extensions.

        Fetches the sample's shard if it is not in the cache, and fetches it once more if it is damaged.

        Args:
            sample: the sample's number in the index.
            wanted: extensions (lower case) of the members to read; None for all members.

        Raises:
            DamagedShardError: the shard is still damaged.
            UserError: the shard cannot be opened or fetched.
        """
        number, inside = self.index.locate(sample)
        try:
            with self.open_shard(number) as shard:
                return shard.read_sample(inside, wanted)
        except DamagedShardError:
            self.remove_damaged_shard(sample, damaged=True)
        with self.open_shard(number) as shard:  # also if this process removed nothing: another one may have
            return shard.read_sample(inside, wanted)

    def remove_damaged_shard(self, sample: int, *, damaged: bool = False) -> bool:
        """Remove the sample's shard from the cache if it is damaged; return whether the next read fetches it again.

        Reads the whole shard to compute its digest, and closes the shard.

        Args:
            sample: the index's number of a sample that could not be read or decoded.
            damaged: whether the shard could not be read; decides if the index has no digest.
        """
        number, _ = self.index.locate(sample)
        removed = self.cache.heal(self.index.shards[number], damaged=damaged)
        with self.own.lock:  # after the removal: before it, another thread could open the damaged shard again
            self.own.shards.pop(number, None)
        return removed

    @contextmanager
    def open_shard(self, number: int) -> Iterator[OpenShard]:
        """Give the open shard of that number in the block; fetch it if necessary, and protect it from eviction.

        Closes the shards that were not used for longest if more than ``most_open`` are open. Starts threads that fetch
        the next wanted shards. Raises DamagedShardError or UserError if the shard cannot be opened.
        """
        own = self.own
        with own.lock:
            shard = own.shards.setdefault(number, OpenShard(self.index.shards[number], self.cache))
            own.shards.move_to_end(number)
            while len(own.shards) > self.most_open:
                own.shards.popitem(last=False)  # weakref closes the file when its last reader drops the object
        with shard.keep_open():
            if number in own.ahead or number in own.wanted:
                with own.lock:
                    own.ahead.discard(number)
                    own.wanted.pop(number, None)
                self.prefetch_shards([])
            yield shard

    def prefetch_shards(self, numbers: Iterable[int]) -> None:
        """Start daemon threads that fetch shards into the cache, at most ``most_ahead`` before they are read.

        Shards beyond that are remembered and fetched later. Errors are not reported: the read meets them again.

        Args:
            numbers: numbers of the shards, in the order in which they will be read; they follow those of earlier calls.
        """
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
                    # A daemon: the process need not wait for it, because a download can be killed at any time.
                    name = f"prefetch {number}"
                    threading.Thread(target=self.prefetch_shard, args=(own, number), name=name, daemon=True).start()

    def prefetch_shard(self, own: OpenShards, number: int) -> None:
        """Fetch a shard into the cache and unlock it; ignore UserErrors, because the read meets them again.

        Waits until fewer than FETCHED_AHEAD threads of the process fetch.
        """
        with own.fetching, suppress(UserError), self.cache.open(self.index.shards[number]) as file:
            unlock(file.fileno())

    def close(self) -> None:
        """Close all open shards; a shard that a thread is reading is closed after that read."""
        with self.own.lock:
            self.own.shards.clear()


def wait_for_room(shard: Shard, cache: ShardCache) -> BinaryIO:
    """Open the shard's file, and return it; wait up to WAIT_FOR_ROOM (60 s) while the cache is full.

    Other readers release their shards after each sample, so room normally appears soon. Raises CacheFullError if the
    cache is still full, and the other errors of :meth:`ShardCache.open` at once.
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
    """Read the shard's table of samples from the file beside the index; return None if there is none or it is damaged.

    A caller can then make the table from the shard itself.
    """
    try:
        return None if shard.table is None else read_table(shard)
    except (storage.UnavailableError, ValueError):
        return None


class ShardDataset:
    """A map-style data set, for example for ``torch.utils.data.DataLoader``.

    A sample is a dict with the sample's members by their extensions (``.jpg``, ``.cls``), decoded by
    :func:`flyte_ddp.shards.decoding.decode_sample`, and with ``__key__``, ``__shard__``, ``__shardindex__``,
    ``__index__`` and ``__dataset__`` as in wids.

    Args:
        index: an index or its address.
        cache: a cache or its folder, for remote shards.
        decode: whether members are decoded; otherwise they are bytes.

    Raises:
        UserError: the index cannot be read, or is no index.
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
        sample = make_sample(self.index, number, *self.reader.read_sample(number))
        if not self.decode:
            return sample
        try:
            return decode_sample(sample)
        except UserError:
            if not self.reader.remove_damaged_shard(number):
                raise
            return decode_sample(make_sample(self.index, number, *self.reader.read_sample(number)))

    def close(self) -> None:
        """Close all open shards."""
        self.reader.close()


def make_sample(index: ShardIndex, number: int, key: str, contents: dict[str, bytes]) -> Sample:
    """Return a sample as a dict: its members and wids' keys (``__key__``, ``__shard__`` and so on).

    Args:
        index: the index of the shards.
        number: the sample's number in the index.
        key: the sample's key.
        contents: the members' contents by their extensions.
    """
    shard_number, inside = index.locate(number)
    shard = index.shards[shard_number]
    return {
        **contents,
        "__key__": key,
        "__dataset__": index.parts[shard.part].name,
        "__index__": number,
        "__shard__": shard.url,
        "__shardindex__": inside,
    }
