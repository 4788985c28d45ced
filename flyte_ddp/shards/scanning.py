"""Reading shards from end to end: to make an index of them, and to check them against theirs."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flyte_ddp import storage
from flyte_ddp.class_names import class_names
from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing
from flyte_ddp.formatting import counted
from flyte_ddp.lookahead import map_in_threads
from flyte_ddp.pictures import opaque_picture
from flyte_ddp.progress import Progress
from flyte_ddp.shards.decoding import LABEL, decode_member, image_and_label, is_image
from flyte_ddp.shards.index import Part, Shard, ShardIndex, index_json, load_index, read_index
from flyte_ddp.shards.samples import SampleTable, read_table, table_digest, tabulate
from flyte_ddp.shards.tar import Member, members

THREADS = 8  # shards that are read at the same time
MOST_CLASSES = 1_000_000  # that are named by their numbers; what is beyond is likely no label
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # pathlib has made one slash of two


class ScannedShard(NamedTuple):
    """A shard as it was read."""

    shard: Shard
    table: SampleTable
    labels: int  # one more than the highest class's number in a ``.cls`` member, or 0
    damaged: list[str]  # what is wrong with images
    unfit: int  # how many samples training cannot read
    reason: str  # why it cannot read the first of these


class HashedStream:
    """A file that can be read once, from chunks of bytes, with the digests and the number of the bytes read so far."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks = chunks
        self.rest = memoryview(b"")
        self.md5, self.sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
        self.count = 0

    def seekable(self) -> bool:
        """Return False, for tarfile."""
        return False

    def read(self, length: int) -> bytes:
        """Return at most so many bytes; none at the end."""
        while not self.rest and (chunk := next(self.chunks, None)) is not None:
            self.md5.update(chunk)
            self.sha256.update(chunk)
            self.count += len(chunk)
            self.rest = memoryview(chunk)
        piece, self.rest = bytes(self.rest[:length]), self.rest[length:]
        return piece


def scan_shard(url: str, *, decode: bool = False) -> ScannedShard:
    """Read a shard once, from its start to its end, and return what is in it; with ``decode`` decode images, too.

    Raises UserError if it cannot be read, is no tar file, or has a label that is no class's number.
    """

    def scan_once(address: str) -> ScannedShard:
        found, damaged, labels = list[Member](), list[str](), 0
        with storage.open_file(address) as file:
            stream = HashedStream(file.chunks)
            for member, content in members(
                stream,  # type: ignore[arg-type]
                url,
                lambda extension: extension.lower() == LABEL or (decode and is_image(extension)),
            ):
                found.append(member)
                if content is None:
                    continue
                where = {"__key__": member.key, "__shard__": url}
                if member.extension.lower() == LABEL:
                    label = decode_member(where, LABEL, content)
                    if label < 0:
                        raise UserError(f"sample {member.key!r} in {url}: label {label}; labels are 0, 1, 2 and so on")
                    labels = max(labels, label + 1)
                elif problem := describe_damage(where, member.extension, content):
                    damaged.append(problem)
        storage.check_length(stream.count, file.size, remote=storage.local_path(address) is None)
        table = tabulate(found, url)
        shard = Shard(url, len(table), stream.count, stream.md5.hexdigest(), stream.sha256.hexdigest())
        return ScannedShard(shard, table, labels, damaged, *count_unfit_samples(table, url))

    try:
        return storage.retried(url, scan_once)
    except storage.UnavailableError as failure:
        raise failure.explained(f"shard {url}: cannot be read ({failure}); check the address") from None


def count_unfit_samples(table: SampleTable, url: str) -> tuple[int, str]:
    """Return how many samples of a shard training cannot read, and what is wrong with the first of them."""
    count, reason = 0, ""
    for number, key in enumerate(table.keys):
        try:
            image_and_label(f"sample {key!r} in shard {url}", table.extensions_of(number))
        except UserError as error:
            count, reason = count + 1, reason or error.message
    return count, reason


def describe_damage(where: dict[str, str], extension: str, content: bytes) -> str:
    """Return why training could not decode an image; nothing for an image that it could."""
    try:
        image = decode_member(where, extension, content)
        image.load()
        opaque_picture(image)
    except UserError as error:
        return error.message
    except Exception as error:  # Pillow raises many kinds of errors
        return f"sample {where['__key__']!r} in {where['__shard__']}: {extension} cannot be decoded ({error})"
    return ""


def expand_ranges(urls: Sequence[str]) -> list[str]:
    """Return the addresses with ranges such as ``{000..127}`` written out."""
    found: list[str] = []
    for url in urls:
        if match := RANGE.search(url):
            start, end = match.span()
            numbers = range(int(match[1]), int(match[2]) + 1)
            found += expand_ranges([f"{url[:start]}{n:0{len(match[1])}d}{url[end:]}" for n in numbers])
        else:
            found.append(url)
    return found


def create_index(
    urls: Sequence[str], output: Path, *, name: str = "", classes: Sequence[str] = (), progress: str = "auto"
) -> ShardIndex:
    """Read shards, several at a time; write their index and, beside it, their tables of samples; return the index.

    Samples may have members of any kind. A warning on stderr names the first one that training cannot read.

    Args:
        urls: the shards, local or remote; ``{000..127}`` stands for a range of numbers.
        output: the index; the tables go into a file beside it, with ``.tables`` after its name.
        name: of the data set; the index's own name if there is none.
        classes: the names of the classes; 0, 1, 2 and so on if there are none, up to the highest label.
        progress: auto, bar, lines or off; on stderr.

    Raises:
        UserError: a shard that cannot be had or is none, two that are the same, a label that has no class, a class
            without a name or with another's; an output that is a shard, or another file that is no index.
    """
    classes = class_names("classes", classes)
    for label, count in Counter(classes).items():
        if count > 1 or not label.strip():
            raise UserError(f"class {label!r} is named {counted(count, 'time')}: each must have a name of its own")
    return index_shards(expand_ranges(urls), output, name=name, classes=classes, progress=progress)


def index_shards(
    urls: Sequence[str], output: Path, *, name: str, classes: Sequence[str], progress: str, packed: bool = False
) -> ShardIndex:
    """Do what :func:`create_index` does, for addresses without ranges and classes with any names.

    ``packed`` has the index say that its shards were made with it, and go when another takes its place.
    """
    shards = [str(storage.local_path(url) or url) for url in urls]
    output = index_output(output, shards)
    if not shards:
        raise UserError("no shards: give at least one tar file")
    if len(set(shards)) < len(shards):
        twice = next(url for url in shards if shards.count(url) > 1)
        raise UserError(f"shard {twice} is given twice; give each one once")
    tables = tables_of(output)
    start, listed, labels, unfit, reason = 0, list[Shard](), 0, 0, ""
    with (
        map_in_threads(scan_shard, shards, THREADS) as scanned,
        Progress(progress).track("reading", len(shards), "shards") as advance,
        replacing(tables) as file,
    ):
        for found in scanned:
            content = found.table.to_bytes()
            file.write(content)
            listed.append(found.shard._replace(table=(str(tables), start, len(content), table_digest(content))))
            start += len(content)
            labels = max(labels, found.labels)
            unfit, reason = unfit + found.unfit, reason or found.reason
            advance(1)
            if classes and labels > len(classes):
                raise UserError(
                    f"shard {found.shard.url}: has label {labels - 1}, and with {len(classes)} classes labels are "
                    f"0..{len(classes) - 1}; fix the sample, or the list of classes"
                )
        if not any(shard.samples for shard in listed):
            raise UserError(f"shard {shards[0]}: has no samples, and there are none in the others; check the addresses")
        if not classes and labels > MOST_CLASSES:
            raise UserError(
                f"a label is {labels - 1:,}: with more than {MOST_CLASSES:,} classes give their names (--classes)"
            )
    names = tuple(classes) or tuple(str(label) for label in range(labels))
    index = ShardIndex(name or output.stem, listed, (Part(name or output.stem),), names)
    with replacing(output) as file:
        file.write(index_json(index, str(output.parent), tables.name, packed=packed))
    if unfit:
        Progress(progress).note(f"warning: {unfit:,} of {counted(len(index), 'sample')} cannot be trained on: {reason}")
    return index


def tables_of(index: Path) -> Path:
    """Return the path of the file with the tables of samples that goes with an index."""
    return index.with_name(f"{index.name}.tables")


def index_output(path: Path, inputs: Iterable[str] = ()) -> Path:
    """Return the absolute path of an index to write, in whose place there may be another index.

    Raises UserError if the path is an address, or that of a file to keep: an input, by its address, or no index.
    """
    if ADDRESS.match(str(path)):
        raise UserError(f"{path}: cannot be written to; choose a path on this machine, and copy it there afterwards")
    output = path.absolute()
    outputs = {output.resolve(), tables_of(output).resolve()}
    for address in inputs:
        found = storage.local_path(address)
        if found is not None and found.resolve() in outputs:
            raise UserError(f"{output}: would be written in place of {found}, which it is made of; choose another name")
    if output.is_file():
        try:
            load_index(str(output))
        except UserError as error:
            raise UserError(f"{output}: is there, and is no index; remove it, or choose another name") from error
    return output


def verify_index(address: str, *, decode: bool = False, progress: str = "auto") -> list[str]:
    """Read all shards of an index, several at a time, and return what is not as the index says; nothing if all is well.

    Args:
        address: of the index.
        decode: decodes all images, too, and says which samples training cannot read.
        progress: auto, bar, lines or off; on stderr.

    Raises:
        UserError: the index itself cannot be read.
    """
    index = read_index(address)
    verify = partial(verify_shard, classes=len(index.classes), decode=decode)
    track = Progress(progress).track("checking", len(index.shards), "shards")
    problems: dict[str, None] = {}  # once each: all tables may be in one file, which cannot be read
    with map_in_threads(verify, index.shards, THREADS) as verified, track as advance:
        for found in verified:
            problems |= dict.fromkeys(found)
            advance(1)
    return list(problems)


def verify_shard(shard: Shard, classes: int, *, decode: bool) -> list[str]:
    """Read a shard, and return what is not as its index says, one sentence for each difference.

    ``classes`` is their number in the index, 0 if it does not say; with ``decode`` images are decoded, too.
    """
    try:
        found = scan_shard(shard.url, decode=decode)
    except UserError as error:
        return [error.message]
    problems = found.damaged
    if decode and found.unfit:
        problems.append(f"{found.reason}; in all {counted(found.unfit, 'such sample')}")
    for what, here, said in (
        ("bytes", found.shard.size, shard.size if shard.size >= 0 else None),
        ("samples", found.shard.samples, shard.samples),
        ("SHA-256", found.shard.sha256, shard.sha256 or None),
        ("MD5", found.shard.md5, shard.md5 or None),
    ):
        if said not in (None, here):
            problems.append(f"shard {shard.url}: {what} {here}, and {said} in the index")
    if classes and found.labels > classes:
        problems.append(f"shard {shard.url}: has label {found.labels - 1}, and the index has {classes} classes")
    if shard.table is not None:
        try:
            same = storage.retried(shard.table[0], lambda _: read_table(shard)).to_bytes() == found.table.to_bytes()
        except (ValueError, storage.MissingError):
            same = False
        except storage.UnavailableError as failure:
            return [*problems, f"tables of samples {shard.table[0]}: cannot be read, and were not compared ({failure})"]
        if not same:
            problems.append(f"shard {shard.url}: the table of samples beside the index is missing or of another shard")
    return problems
