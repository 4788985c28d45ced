"""A data set of shards, of which any sample can be had by its number."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.decoding import decode_sample
from flyte_ddp.shards.index import Shard, ShardIndex, read_index
from flyte_ddp.shards.samples import SampleTable, tabulate
from flyte_ddp.shards.tar import BLOCK, DamagedShardError, Member, content_of, members

MOST_OPEN = 32  # shards that one process keeps open, each with its table of samples

Sample = dict[str, Any]


@dataclass(frozen=True, eq=False)
class OpenShard:
    """A shard with its table of samples."""

    shard: Shard
    file: BinaryIO
    table: SampleTable

    def __del__(self) -> None:
        self.file.close()  # no thread reads from it any more

    def read(self, member: Member) -> bytes:
        """A member's content; several threads may read at the same time.

        Raises:
            DamagedShardError: it is not where the table says.
        """
        block = os.pread(self.file.fileno(), BLOCK + member.size, member.offset - BLOCK)
        content = content_of(block, member.size)
        if content is None:
            raise DamagedShardError(
                f"shard {self.shard.url}: damaged at byte {member.offset:,}, where {member.key}{member.extension} "
                "should be; copy it again, or renew the index"
            )
        return content


class ShardReader:
    """Reads members of samples from shards, of which it keeps those used last open. Threads may share it."""

    def __init__(self, index: ShardIndex, cache: ShardCache, most_open: int = MOST_OPEN) -> None:
        self.index, self.cache, self.most_open = index, cache, most_open
        self.forget()

    def forget(self) -> None:
        """Begins without open shards: those of a parent process are not ours."""
        self.process = os.getpid()
        self.lock = threading.Lock()
        self.opening: dict[int, threading.Lock] = {}
        self.shards: OrderedDict[int, OpenShard] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index, "cache": self.cache, "most_open": self.most_open}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def members(self, sample: int) -> tuple[OpenShard, list[Member]]:
        """Where the members of a sample are, and the shard to read them from."""
        number, inside = self.index.locate(sample)
        shard = self.open(number)
        return shard, shard.table.members(inside)

    def read(self, sample: int) -> tuple[str, dict[str, bytes]]:
        """A sample's key, and the contents of its members by their extensions.

        Raises:
            DamagedShardError: the shard is damaged, also when fetched again.
            UserError: the shard cannot be had.
        """
        try:
            shard, found = self.members(sample)
            return found[0].key, {member.extension: shard.read(member) for member in found}
        except DamagedShardError:
            if not self.heal(sample):
                raise
            shard, found = self.members(sample)
            return found[0].key, {member.extension: shard.read(member) for member in found}

    def heal(self, sample: int) -> bool:
        """Has the sample's shard fetched again if it is not what it was; False if it is."""
        number, _ = self.index.locate(sample)
        self.close(number)
        return self.cache.heal(self.index.shards[number])

    def open(self, number: int) -> OpenShard:
        """A shard, fetched if it is not here."""
        if self.process != os.getpid():
            self.forget()
        with self.lock:
            found = self.shards.get(number)
            if found is not None:
                self.shards.move_to_end(number)
                return found
            opening = self.opening.setdefault(number, threading.Lock())
        with opening:  # one thread opens it, and others may go on with other shards
            with self.lock:
                found = self.shards.get(number)
            if found is None:
                found = open_shard(self.index.shards[number], self.cache)
                with self.lock:
                    self.shards[number] = found
                    self.opening.pop(number, None)
                    while len(self.shards) > self.most_open:
                        self.shards.popitem(last=False)  # closed when the last thread has read from it
        return found

    def close(self, number: int | None = None) -> None:
        """Closes a shard, or all."""
        with self.lock:
            if number is None:
                self.shards.clear()
            else:
                self.shards.pop(number, None)


def open_shard(shard: Shard, cache: ShardCache) -> OpenShard:
    """Opens a shard, and reads its table of samples or makes one.

    Raises:
        UserError: it cannot be had, or has another number of samples than the index says.
    """
    file = cache.open(shard)
    try:
        table = stored_table(shard)
        if table is None:
            table = tabulate((member for member, _ in members(file, shard.url)), shard.url)
    except DamagedShardError:
        file.close()
        if not cache.heal(shard):
            raise
        return open_shard(shard, cache)
    except BaseException:
        file.close()
        raise
    if len(table) != shard.samples:
        file.close()
        raise UserError(
            f"shard {shard.url}: has {len(table):,} samples and not the {shard.samples:,} that the index says; "
            "renew the index: python -m flyte_ddp.shards create"
        )
    return OpenShard(shard, file, table)


def stored_table(shard: Shard) -> SampleTable | None:
    """The table beside the index; None if there is none that can be read: the shard itself has all that is in it."""
    if shard.table is None:
        return None
    address, start, length = shard.table
    try:
        return SampleTable.from_bytes(storage.read(address, (start, start + length)))
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

    def __init__(self, index: ShardIndex | str, cache: ShardCache | Path | str, *, decode: bool = True) -> None:
        self.index = read_index(index) if isinstance(index, str) else index
        self.reader = ShardReader(self.index, cache if isinstance(cache, ShardCache) else ShardCache(Path(cache)))
        self.transforms: list[Callable[[Any], Any]] = [decode_sample] if decode else []

    def add_transform(self, transform: Callable[[Any], Any]) -> ShardDataset:
        """Has each sample go through one more function, after those added before."""
        self.transforms.append(transform)
        return self

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        number %= len(self)
        key, contents = self.reader.read(number)
        shard, inside = self.index.locate(number)
        described = self.index.shards[shard]
        sample: Any = {
            **contents,
            "__key__": key,
            "__dataset__": self.index.parts[described.part].name,
            "__index__": number,
            "__shard__": described.url,
            "__shardindex__": inside,
        }
        for transform in self.transforms:
            sample = transform(sample)
        return sample

    def close(self) -> None:
        """Closes the open shards."""
        self.reader.close()
