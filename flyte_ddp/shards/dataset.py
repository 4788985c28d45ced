"""A data set of shards, of which any sample can be had by its number."""

from __future__ import annotations

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
from flyte_ddp.shards.locks import lock_again
from flyte_ddp.shards.samples import SampleTable, tabulate
from flyte_ddp.shards.tar import BLOCK, DamagedShardError, members
from flyte_ddp.shards.verification import failed

MOST_OPEN = 32  # shards that one process keeps open, each with its table of samples
FETCHED_AHEAD = 4  # shards at the same time
WAIT_FOR_ROOM = 60.0  # seconds, in which others may finish with what fills the cache
MARKED_EVERY = 1.0  # seconds, the time of its last use on a shard that is read from

Sample = dict[str, Any]


class OpenShard:
    """A shard with its table of samples, in use by whoever has opened it.

    Args:
        shard: as the index describes it.
        file: locked, if it is in a cache; unlocked while no thread uses it, and then it may be evicted.
        table: of its samples.
    """

    def __init__(self, shard: Shard, file: BinaryIO, table: SampleTable) -> None:
        self.shard, self.table = shard, table
        self.file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.file)
        self.cached = storage.local_path(shard.url) is None
        self.users, self.marked = 1, time.monotonic()
        self.lock = threading.Lock()

    def begin(self) -> bool:
        """Begins to use it, in one of several threads; False if it was evicted."""
        with self.lock:
            if self.cached:
                if self.users == 0 and not lock_again(self.file):
                    return False
                if time.monotonic() > self.marked + MARKED_EVERY:
                    self.marked = time.monotonic()
                    mark_used(self.file)
            self.users += 1
            return True

    def end(self) -> None:
        """Ends what :meth:`begin` began."""
        with self.lock:
            self.users -= 1
            if self.cached and self.users == 0:
                unlock(self.file)

    def read(self, sample: int, wanted: Container[str] | None = None) -> tuple[str, dict[str, bytes]]:
        """A sample's key, and the contents of its members by their extensions: of all, or of those that are wanted.

        Args:
            sample: its number in the shard.
            wanted: extensions in small letters, which stand for those in capitals, too.

        Raises:
            DamagedShardError: they are not where the table says.
            UserError: the file cannot be read.
        """
        try:
            return read_members(self.shard, self.table, sample, partial(read_at, self.file), wanted)
        except OSError as error:
            raise failed(self.shard, error) from None


def read_members(
    shard: Shard,
    table: SampleTable,
    sample: int,
    read: Callable[[int, int], bytes],
    wanted: Container[str] | None = None,
) -> tuple[str, dict[str, bytes]]:
    """See :meth:`OpenShard.read`; ``read`` gives bytes of the shard, by their place and number."""
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
    """So many bytes of a file, or as many as there are; the system gives no more than 2 GB at a time."""
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
        self.opening: dict[int, threading.Lock] = {}
        self.shards: OrderedDict[int, OpenShard] = OrderedDict()  # used last comes last
        self.wanted: dict[int, None] = {}  # not begun with, in the order in which they will be read
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
    def ours(self) -> OpenShards:
        """What this process has open: a forked child begins without any, and without locks that its parent held."""
        ours = self.open_shards
        if ours.process != os.getpid():
            ours = self.open_shards = OpenShards()
        return ours

    def read(self, sample: int, wanted: Container[str] | None = None) -> tuple[str, dict[str, bytes]]:
        """A sample's key, and the contents of its members by their extensions: of all, or of those that are wanted.

        Args:
            sample: its number in the index.
            wanted: extensions in small letters, which stand for those in capitals, too.

        Raises:
            DamagedShardError: the shard is damaged, also when fetched again.
            UserError: the shard cannot be had.
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
        """Has the sample's shard fetched again if it is not what it was; False if it is, or if that cannot be known.

        For a sample that cannot be decoded: that may be the sample, or our copy of it. ``damaged``: the shard itself
        could not be read.
        """
        number, _ = self.index.locate(sample)
        healed = self.cache.heal(self.index.shards[number], damaged=damaged)
        with self.ours.lock:  # afterwards: before, another thread could open the damaged one once more
            self.ours.shards.pop(number, None)
        return healed

    @contextmanager
    def using(self, number: int) -> Iterator[OpenShard]:
        """A shard, fetched if it is not here, that is not evicted until the end of the block."""
        shard = self.begin(number)
        try:
            ours = self.ours
            if number in ours.ahead or number in ours.wanted:
                with ours.lock:
                    ours.ahead.discard(number)
                    ours.wanted.pop(number, None)
                self.prefetch([])
            yield shard
        finally:
            shard.end()

    def begin(self, number: int) -> OpenShard:
        """A shard in use."""
        ours = self.ours
        with ours.lock:
            opening = ours.opening.setdefault(number, threading.Lock())
        with opening:  # one thread opens it, and others may go on with other shards
            with ours.lock:
                shard = ours.shards.get(number)
                if shard is not None and shard.begin():
                    ours.shards.move_to_end(number)
                    return shard
                ours.shards.pop(number, None)
            shard = open_shard(self.index.shards[number], self.cache)
            with ours.lock:
                ours.shards[number] = shard
                while len(ours.shards) > self.most_open:  # closed when nobody uses it any more
                    ours.shards.popitem(last=False)
            return shard

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Has shards fetched that will be read next after those it knows of; who reads one gets the error, if any."""
        ours = self.ours
        with ours.lock:
            ours.wanted |= {number: None for number in numbers if number not in ours.ahead}
            while ours.wanted and len(ours.ahead) < self.most_ahead:
                number = next(iter(ours.wanted))
                del ours.wanted[number]
                if number in ours.shards:
                    continue
                ours.ahead.add(number)
                if not self.cache.holds(self.index.shards[number]):
                    # A daemon: nobody waits for it at the end of a process, and a download can be cut off at any time.
                    name = f"prefetch {number}"
                    threading.Thread(target=self.fetch, args=(ours, number), name=name, daemon=True).start()

    def fetch(self, ours: OpenShards, number: int) -> None:
        """Fetches a shard ahead of its use."""
        with ours.fetching, suppress(UserError), self.cache.open(self.index.shards[number]) as file:
            unlock(file.fileno())

    def close(self) -> None:
        """Closes all shards; those in use when that is over."""
        with self.ours.lock:
            self.ours.shards.clear()


def open_shard(shard: Shard, cache: ShardCache) -> OpenShard:
    """Opens a shard, and reads its table of samples or makes one.

    Raises:
        DamagedShardError: it is damaged.
        UserError: it cannot be had, or has another number of samples than the index says.
    """
    with opened_when_there_is_room(shard, cache) as file:
        try:
            table = stored_table(shard) or tabulate((member for member, _ in members(file, shard.url)), shard.url)
        except OSError as error:
            raise failed(shard, error) from None
        if len(table) != shard.samples:
            raise UserError(
                f"shard {shard.url}: has {len(table):,} samples and not the {shard.samples:,} that the index says; "
                "renew the index: python -m flyte_ddp.shards create"
            )
        return OpenShard(shard, file, table)


def opened_when_there_is_room(shard: Shard, cache: ShardCache) -> BinaryIO:
    """The shard's file; what fills the cache is in use for no longer than a sample is read, unless it cannot be had."""
    deadline, pause = time.monotonic() + WAIT_FOR_ROOM, 0.01
    while True:
        try:
            return cache.open(shard)
        except CacheFullError:
            if time.monotonic() > deadline:
                raise
            time.sleep(pause)
            pause = min(2 * pause, 1.0)


def stored_table(shard: Shard) -> SampleTable | None:
    """The table beside the index; None if there is none that can be read: the shard itself has all that is in it."""
    try:
        return None if shard.table is None else read_table(shard, shard.table[0])
    except (storage.UnavailableError, ValueError):
        return None


def read_table(shard: Shard, address: str) -> SampleTable:
    """The table of a shard that has one, from the file with the tables.

    Raises:
        UnavailableError: the file cannot be read.
        ValueError: there is another table, or none.
    """
    assert shard.table is not None
    _, start, length, digest = shard.table
    return SampleTable.from_bytes(storage.read(address, (start, start + length)), digest)


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
        sample = self.stored(number % len(self))
        if not self.decode:
            return sample
        try:
            return decode_sample(sample)
        except UserError:
            if not self.reader.heal(sample["__index__"]):
                raise
            return decode_sample(self.stored(sample["__index__"]))

    def stored(self, number: int) -> Sample:
        """A sample whose members are bytes."""
        return described(self.index, number, *self.reader.read(number))

    def close(self) -> None:
        """Closes the open shards."""
        self.reader.close()


def described(index: ShardIndex, number: int, key: str, contents: dict[str, bytes]) -> Sample:
    """A sample's members, and the other keys that wids has."""
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
