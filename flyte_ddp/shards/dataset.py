"""Read any sample of a data set of shards by number."""

from __future__ import annotations

import fcntl
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import unlock_file
from flyte_ddp.shards.cache import CacheFullError, ShardCache, make_unusable_shard_error, set_access_time_to_now
from flyte_ddp.shards.index import Shard, ShardIndex, read_index
from flyte_ddp.shards.members import Sample, decode_sample
from flyte_ddp.shards.tar import group_members_into_samples, iterate_tar_members, read_stored_table_or_none

MOST_OPEN = 32  # shards that one process keeps open, each with its table of samples
FETCHED_AHEAD = 4  # number of shards that threads fetch ahead of reading, and at the same time
WAIT_FOR_ROOM = 60.0  # seconds that a reader waits for other readers to release shards in a full cache
MARKED_EVERY = 1.0  # seconds between two updates of the time of last use of a shard that is being read


class OpenShard:
    """A shard and the table of its samples, shared by the threads of a process and opened at first use.

    While no thread uses the shard, the file stays open without a lock, so the shard may be evicted from the cache.
    """

    def __init__(self, shard: Shard, cache: ShardCache) -> None:
        self.shard, self.cache = shard, cache
        self.cached = storage.find_local_path(shard.url) is None
        self.users, self.marked = 0, time.monotonic()
        self.lock = threading.Lock()
        self.close: Callable[[], object] | None = None

    @contextmanager
    def hold_open(self) -> Iterator[OpenShard]:
        """Open the shard, and protect the shard from eviction during the block. Yields this object.

        Downloads the shard if needed, in up to 4 tries. Waits up to 60 s for room in the cache, and without limit for
        another process that downloads or checks the shard. Other threads that use the shard wait, too. After the block,
        the file stays open. If no other thread uses the shard, the shard may then be evicted.

        Raises:
            UserError: The shard is unreadable or differs from the index, or the cache folder cannot be written.
            CacheFullError: The cache was full for 60 s.
        """
        with self.lock:
            if self.close is None or (self.cached and self.users == 0 and not self.lock_if_not_evicted()):
                self.open_file_and_table()
            if self.cached and time.monotonic() > self.marked + MARKED_EVERY:
                self.marked = time.monotonic()
                set_access_time_to_now(self.file)
            self.users += 1
        try:
            yield self
        finally:
            with self.lock:
                self.users -= 1
                if self.cached and self.users == 0:
                    unlock_file(self.file)

    def lock_if_not_evicted(self) -> bool:
        """Lock the open file against eviction, without waiting.

        Returns:
            True, or False if another process is evicting or has evicted the file.
        """
        try:
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return os.fstat(self.file).st_nlink > 0

    def open_file_and_table(self) -> None:
        """Open the shard's file and read the table of its samples. Sets ``file``, ``table`` and ``close``.

        Closes the file that was open before. Downloads the shard if needed, and waits up to 60 s for room in the cache.
        If the stored table is unusable, makes a table from the whole shard. If the shard is cached, the new file holds
        a shared lock.

        Raises:
            UserError: The shard is unreadable, or differs from the index in size, digest or number of samples.
            CacheFullError: The cache was full for 60 s.
        """
        shard = self.shard
        if self.close is not None:
            self.close()
            self.close = None
        with self.open_when_cache_has_room() as file:
            try:
                table = read_stored_table_or_none(shard, os.fstat(file.fileno()).st_size)
                if table is None:
                    table = group_members_into_samples(
                        (member for member, _ in iterate_tar_members(file, shard.url)), shard.url
                    )
            except OSError as error:
                raise make_unusable_shard_error(shard, error) from None
            if len(table) != shard.samples:
                problem = f"has {len(table):,} samples, but the index lists {shard.samples:,}"
                raise UserError(f"shard {shard.url}: {problem}; rebuild the index: python -m flyte_ddp.shards create")
            self.table = table
            self.file = os.dup(file.fileno())  # a separate descriptor, because the block closes the file
            self.close = weakref.finalize(self, os.close, self.file)  # runs when no reader refers to this object

    def open_when_cache_has_room(self) -> BinaryIO:
        """Open the shard. If the cache lacks the shard, download the shard, in up to 4 tries with pauses.

        If the cache is full, waits up to 60 s for room. Waits without limit for another process that downloads or
        checks the shard.

        Raises:
            UserError: The shard is unreadable or differs from the index, or the cache folder cannot be written.
            CacheFullError: The cache was full for 60 s.
        """
        deadline = time.monotonic() + WAIT_FOR_ROOM
        while True:
            try:
                return self.cache.open_or_download_shard(self.shard)
            except CacheFullError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def read_byte_range(file: int, start: int, length: int) -> bytes:
    """Return ``length`` bytes of an open file (a descriptor) from byte ``start``, or fewer at the end of the file."""
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
        self.shards: dict[int, OpenShard] = {}  # by number, the last used shard last
        self.wanted: dict[int, None] = {}  # numbers of shards to fetch, in reading order
        self.ahead: set[int] = set()  # numbers of shards that are being fetched, or were fetched and not read yet
        self.fetching = threading.Semaphore(FETCHED_AHEAD)


class ShardReader:
    """Reads samples from shards, and keeps recently used shards open.

    Threads may share a reader. A reader can be pickled.
    """

    def __init__(
        self, index: ShardIndex, cache: ShardCache, most_open: int = MOST_OPEN, most_ahead: int = FETCHED_AHEAD
    ) -> None:
        self.index, self.cache, self.most_open, self.most_ahead = index, cache, most_open, most_ahead
        self.open_shards = OpenShards()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardReader, (self.index, self.cache, self.most_open, self.most_ahead)

    @property
    def process_shards(self) -> OpenShards:
        """Return the shards that this process has open.

        A forked child gets a new, empty object with free locks.
        """
        if self.open_shards.process != os.getpid():
            self.open_shards = OpenShards()
        return self.open_shards

    def read_sample(self, sample: int, wanted: Container[str] | None = None) -> tuple[str, dict[str, bytes]]:
        """Read a sample by number.

        Downloads the shard if needed, and waits as :meth:`OpenShard.hold_open` does.

        Args:
            sample: The number of the sample.
            wanted: The extensions to read, in lower case. None reads all extensions.

        Returns:
            The sample's key, and a dict from extension (as in the shard) to content.

        Raises:
            UserError: The shard is unreadable, damaged, or differs from the index, or the cache folder cannot be
                written.
            CacheFullError: The cache was full for 60 s.
        """
        number, inside = self.index.locate_sample(sample)
        contents = {}
        with self.hold_shard_open(number) as opened:
            for member in opened.table.list_sample_members(inside):
                if wanted is None or member.extension.lower() in wanted:  # wanted: in lower case; None: all
                    try:
                        content = read_byte_range(opened.file, member.offset, member.size)
                    except OSError as error:
                        raise make_unusable_shard_error(opened.shard, error) from None
                    if len(content) != member.size:
                        problem = f"ends before the end of {member.key}{member.extension} (from byte {member.offset:,})"
                        raise UserError(f"shard {opened.shard.url}: {problem}; copy it again, or rebuild the index")
                    contents[member.extension] = content
            return opened.table.keys[inside], contents

    @contextmanager
    def hold_shard_open(self, number: int) -> Iterator[OpenShard]:
        """Yield the shard with this number, which stays open and is not evicted during the block.

        Downloads the shard if needed, and waits as :meth:`OpenShard.hold_open` does. If more than ``most_open`` shards
        are open, closes the least recently used shard. If the shard was prefetched, starts threads that prefetch the
        next shards.

        Raises:
            UserError: The shard is unreadable or differs from the index, or the cache folder cannot be written.
            CacheFullError: The cache was full for 60 s.
        """
        state = self.process_shards
        with state.lock:
            shard = state.shards.pop(number, None) or OpenShard(self.index.shards[number], self.cache)
            state.shards[number] = shard  # as the last one
            while len(state.shards) > self.most_open:
                # weakref.finalize closes the file when its last reader drops the object.
                del state.shards[next(iter(state.shards))]
        with shard.hold_open():
            if number in state.ahead or number in state.wanted:
                self.mark_read_and_prefetch_next([number])
            yield shard

    def prefetch_in_threads(self, numbers: Iterable[int]) -> None:
        """Add shards to the queue of prefetched shards, and start daemon threads that download them in order.

        At most ``most_ahead`` shards are downloaded before their use. Local and cached shards need no thread. Errors
        are ignored, because reading the shard raises the error again.
        """
        state = self.process_shards
        with state.lock:
            state.wanted |= {number: None for number in numbers if number not in state.ahead}
            while state.wanted and len(state.ahead) < self.most_ahead:
                number = next(iter(state.wanted))
                del state.wanted[number]
                if number in state.shards:
                    continue
                state.ahead.add(number)
                if not self.cache.holds_shard(self.index.shards[number]):
                    # A daemon thread, because a download can be killed at any time without harm.
                    name = f"prefetch {number}"
                    threading.Thread(
                        target=self.prefetch_in_this_thread, args=(state, number), name=name, daemon=True
                    ).start()

    def mark_read_and_prefetch_next(self, numbers: Iterable[int]) -> None:
        """Remove shards that were read from the queue of prefetched shards, and start threads for the next shards."""
        with self.process_shards.lock:
            for number in numbers:
                self.process_shards.ahead.discard(number)
                self.process_shards.wanted.pop(number, None)
        self.prefetch_in_threads([])

    def prefetch_in_this_thread(self, state: OpenShards, number: int) -> None:
        with state.fetching, suppress(UserError), self.cache.open_or_download_shard(self.index.shards[number]) as file:
            unlock_file(file.fileno())

    def close(self) -> None:
        """Close the files of all open shards.

        If a thread is reading a shard, the shard is closed after the read. A later read opens the shard again.
        """
        with self.process_shards.lock:
            self.process_shards.shards.clear()


class ShardDataset:
    """A map-style data set of shards, for example for ``torch.utils.data.DataLoader``.

    A sample is a dict of members by extension (``.jpg``, ``.cls``) and of wids' keys, for example ``__key__``. If
    ``decode`` is set, :func:`flyte_ddp.shards.members.decode_sample` decodes members, else members are bytes.
    ``index`` may be an address, and ``cache`` a folder without a limit.
    """

    def __init__(self, index: ShardIndex | Path | str, cache: ShardCache | Path | str, *, decode: bool = True) -> None:
        self.index = index if isinstance(index, ShardIndex) else read_index(str(index))
        self.reader = ShardReader(self.index, cache if isinstance(cache, ShardCache) else ShardCache(Path(cache)))
        self.decode = decode

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: Any) -> Sample:
        """Return a sample as a dict. Negative numbers count from the end.

        Downloads the shard if needed, in up to 4 tries. Waits up to 60 s for room in the cache, and without limit for
        another process that downloads or checks the same shard.

        Raises:
            IndexError: The number is out of range.
            UserError: The shard is unreadable or differs from the index, a member cannot be decoded, or the cache
                folder cannot be written.
            CacheFullError: The cache was full for 60 s.
        """
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        number %= len(self)
        key, contents = self.reader.read_sample(number)
        shard_number, inside = self.index.locate_sample(number)
        shard = self.index.shards[shard_number]
        sample: Sample = {
            **contents,
            "__key__": key,
            "__dataset__": self.index.parts[shard.part].name,
            "__index__": number,
            "__shard__": shard.url,
            "__shardindex__": inside,
        }
        try:
            return decode_sample(sample) if self.decode else sample
        except UserError as error:
            raise UserError(f"{error.message}{self.reader.cache.describe_copy(shard)}") from None

    def close(self) -> None:
        self.reader.close()
