"""Reading shards from end to end: to make an index of them, and to check them against theirs."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyte_ddp import storage
from flyte_ddp.datasets.progress import Progress
from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing
from flyte_ddp.shards.decoding import decode_member
from flyte_ddp.shards.index import Part, Shard, ShardIndex, index_json, read_index
from flyte_ddp.shards.samples import SampleTable, tabulate
from flyte_ddp.shards.tar import Member, members

THREADS = 8  # shards that are read at the same time
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass(frozen=True, eq=False)
class Scanned:
    """A shard as it was read; ``labels`` is one more than the highest class's number in a ``.cls`` member, or 0."""

    shard: Shard
    table: SampleTable
    labels: int


class HashedStream(io.RawIOBase):
    """Chunks of bytes as a file that can be read once, and the digests and the number of those read so far."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks = chunks
        self.rest = memoryview(b"")
        self.md5, self.sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads as much as there is at once."""
        while not self.rest:
            chunk = next(self.chunks, None)
            if chunk is None:
                return 0
            self.md5.update(chunk)
            self.sha256.update(chunk)
            self.count += len(chunk)
            self.rest = memoryview(chunk)
        length = min(len(buffer), len(self.rest))
        buffer[:length] = self.rest[:length]
        self.rest = self.rest[length:]
        return length


def scan(url: str, check: Callable[[Member, bytes], None] | None = None, read: Sequence[str] = (".cls",)) -> Scanned:
    """Reads a shard once, from its start to its end.

    Args:
        check: is given each member whose extension is in ``read``, with its content.

    Raises:
        UserError: it cannot be had, or is no shard.
    """

    def once(address: str) -> Scanned:
        with storage.open_file(address) as (announced, chunks):
            stream = HashedStream(chunks)
            labels = 0

            def found() -> Iterator[Member]:
                nonlocal labels
                for member, content in members(stream, url, stream=True, read=read):  # type: ignore[arg-type]
                    if content is not None:
                        if member.extension == ".cls":
                            labels = max(labels, label_of(member, content, url) + 1)
                        if check is not None:
                            check(member, content)
                    yield member

            table = tabulate(found(), url)
            while stream.read(1 << 20):  # what comes after the end mark belongs to the digest
                pass
        if announced is not None and stream.count != announced:
            raise storage.UnavailableError(f"truncated after {stream.count:,} of {announced:,} bytes", transient=True)
        shard = Shard(url, len(table), stream.count, stream.md5.hexdigest(), stream.sha256.hexdigest())
        return Scanned(shard, table, labels)

    try:
        return storage.with_retries(url, [url], once)
    except storage.AllFailedError as error:
        failure = next(iter(error.failures.values()))
        raise UserError(f"shard {url}: cannot be read ({failure}); check the address") from None


def label_of(member: Member, content: bytes, url: str) -> int:
    """A class's number."""
    value: int = decode_member({"__key__": member.key, "__shard__": url}, ".cls", content)
    if value < 0:
        raise UserError(f"sample {member.key!r} in {url}: label {value}; labels are 0, 1, 2 and so on")
    return value


def expanded(urls: Sequence[str]) -> list[str]:
    """Addresses with ``{000..127}`` written out."""
    found: list[str] = []
    for url in urls:
        match = RANGE.search(url)
        if match is None:
            found.append(url)
            continue
        numbers = range(int(match[1]), int(match[2]) + 1)
        found += expanded([f"{url[: match.start()]}{n:0{len(match[1])}d}{url[match.end() :]}" for n in numbers])
    return found


def create_index(
    urls: Sequence[str], output: Path, *, name: str = "", classes: Sequence[str] = (), progress: str = "auto"
) -> ShardIndex:
    """Reads shards, several at a time, and writes their index and, beside it, their tables of samples.

    Args:
        urls: the shards, local or remote; ``{000..127}`` stands for a range of numbers.
        output: the index; the tables go into a file of the same name that ends in ``.tables``.
        name: of the data set; the index's own name if there is none.
        classes: the names of the classes; 0, 1, 2 and so on if there are none, up to the highest label.

    Raises:
        UserError: a shard that cannot be had or is none, two that are the same, a label that has no class.
    """
    shards = [str(storage.local_path(url) or url) for url in expanded(urls)]
    if not shards:
        raise UserError("no shards: give at least one tar file")
    if len(set(shards)) < len(shards):
        twice = next(url for url in shards if shards.count(url) > 1)
        raise UserError(f"shard {twice} is given twice; give each one once")
    with ThreadPoolExecutor(THREADS) as pool, Progress(progress).track("reading", len(shards), "shards") as advance:
        scanned = []
        for found in pool.map(scan, shards):
            scanned.append(found)
            advance(1)
    return write_index(scanned, output, name=name, classes=classes)


def write_index(scanned: Sequence[Scanned], output: Path, *, name: str, classes: Sequence[str]) -> ShardIndex:
    """Writes the index of shards that were read, and their tables of samples before it."""
    labels = max(found.labels for found in scanned)
    if classes and labels > len(classes):
        raise UserError(
            f"a label is {labels - 1} and there are {len(classes)} classes: labels are 0..{len(classes) - 1}"
        )
    output = output.absolute()
    tables = output.with_suffix(".tables")
    start, shards = 0, []
    with replacing(tables) as file:
        for found in scanned:
            content = found.table.to_bytes()
            file.write(content)
            shards.append(found.shard._replace(table=(str(tables), start, len(content))))
            start += len(content)
    named = tuple(classes) or tuple(str(label) for label in range(labels))
    index = ShardIndex(name or output.stem, shards, (Part(name or output.stem),), named)
    with replacing(output) as file:
        file.write(index_json(index, str(output.parent), tables.name))
    return index


def verify_index(address: str, *, decode: bool = False, progress: str = "auto") -> list[str]:
    """Reads all shards of an index and says what is not as the index says; nothing, if all is well.

    Args:
        decode: decodes all images, too.

    Raises:
        UserError: the index itself cannot be read.
    """
    index = read_index(address)
    with ThreadPoolExecutor(THREADS) as pool, Progress(progress).track("checking", len(index.shards), "shards") as done:
        problems = []
        for found in pool.map(lambda shard: verify_shard(shard, len(index.classes), decode=decode), index.shards):
            problems += found
            done(1)
    return problems


def verify_shard(shard: Shard, classes: int, *, decode: bool) -> list[str]:
    """What is wrong with one shard."""
    from flyte_ddp.shards.dataset import stored_table
    from flyte_ddp.shards.decoding import IMAGES

    problems: list[str] = []

    def check(member: Member, content: bytes) -> None:
        if member.extension != ".cls":
            try:
                decode_member({"__key__": member.key, "__shard__": shard.url}, member.extension, content).load()
            except (UserError, OSError, ValueError, SyntaxError) as error:
                problems.append(f"sample {member.key!r} in {shard.url}: {member.extension} is damaged: {error}")

    read = [".cls", *(f".{kind}" for kind in IMAGES)] if decode else [".cls"]
    try:
        found = scan(shard.url, check, read)
    except UserError as error:
        return [error.message]
    for what, here, said in (
        ("bytes", found.shard.size, shard.size if shard.size >= 0 else found.shard.size),
        ("samples", found.shard.samples, shard.samples),
        ("SHA-256", found.shard.sha256, shard.sha256 or found.shard.sha256),
        ("MD5", found.shard.md5, shard.md5 or found.shard.md5),
    ):
        if here != said:
            problems.append(f"shard {shard.url}: {what} {here}, and {said} in the index")
    if classes and found.labels > classes:
        problems.append(f"shard {shard.url}: has label {found.labels - 1}, and the index has {classes} classes")
    if shard.table is not None:
        stored = stored_table(shard)
        if stored is None or stored.to_bytes() != found.table.to_bytes():
            problems.append(f"shard {shard.url}: the table of samples beside the index is missing or of another shard")
    return problems
