"""Make indexes of shards or of other indexes, verify shards, and reject samples that training cannot read."""

import json
import math
import re
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import replace_file
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.samples.class_names import normalize_class_names
from flyte_ddp.core.text.formatting import format_count
from flyte_ddp.shards.cache import make_unusable_shard_error
from flyte_ddp.shards.index import (
    EXTENSION,
    KIND,
    ExtensionJson,
    IndexJson,
    Part,
    Shard,
    ShardIndex,
    build_index_with_parts,
    load_index_json,
    make_shard_entry,
    read_index,
)
from flyte_ddp.shards.members import choose_image_and_label, parse_class_number
from flyte_ddp.shards.tabulating import (
    MOST_CLASSES,
    HashedStream,
    describe_unfit_samples,
    hash_and_tabulate_shard,
    is_label_member,
    map_in_stoppable_threads,
)
from flyte_ddp.shards.tar import hash_table, iterate_tar_members

MOST_IN_RANGES = 10_000_000  # maximum of addresses with ranges: more names would fill the memory
RANGE = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # one slash, because pathlib replaces two slashes by one


def expand_address_ranges(url: str) -> list[str]:
    """Return the addresses for which ranges such as ``{000..127}`` in ``url`` stand.

    A range that counts down gives no address.

    Raises:
        UserError: The ranges stand for more than MOST_IN_RANGES addresses.
    """
    count = math.prod(max(0, int(last) - int(first) + 1) for first, last in RANGE.findall(url))
    if count > MOST_IN_RANGES:
        fix = f"give ranges of at most {MOST_IN_RANGES:,} shards in total"
        raise UserError(f"{url}: expands to {count:,} shards; {fix}")
    match = RANGE.search(url)
    if match is None:
        return [url]
    start, end = match.span()
    numbers = (f"{number:0{len(match[1])}d}" for number in range(int(match[1]), int(match[2]) + 1))
    return [whole for number in numbers for whole in expand_address_ranges(f"{url[:start]}{number}{url[end:]}")]


def create_index(
    urls: Sequence[str],
    output: Path,
    *,
    name: str = "",
    classes: Sequence[str] = (),
    ranges: bool = True,
    progress: str = "auto",
) -> ShardIndex:
    """Write an index of shards, and a file with the tables of their samples, and return the index.

    All shards are read completely in 8 threads, in up to 4 tries each. The tables are written beside the index, to a
    file with the suffix ``.tables``. Existing files are replaced.

    Args:
        urls: Addresses of the shards, in the order of the index.
        output: The path of the index.
        name: The name of the data set. By default, the name of ``output`` without its extension.
        classes: The names of the classes. By default 0, 1, 2 and so on, up to the largest label.
        ranges: Whether ``{000..127}`` in an address stands for a range of numbers.
        progress: auto, bar, lines or off. Progress is printed to stderr.

    Raises:
        UserError: A shard is unreadable, malformed or given twice, or no shard has samples. Also if a label is out of
            range, or class names are equal. Also if ``output`` is remote, would replace a shard, is an existing file
            that is no index, or cannot be written.
    """
    classes = normalize_class_names("classes", classes)
    expanded = [whole for url in urls for whole in (expand_address_ranges(url) if ranges else [url])]
    shards = [str(storage.find_local_path(whole) or whole) for whole in expanded]
    output = check_and_resolve_index_output(output, shards)
    if not shards:
        raise UserError("no shards: give at least one tar file")
    if len(set(shards)) < len(shards):
        twice = next(url for url in shards if shards.count(url) > 1)
        raise UserError(f"shard {twice} is given twice; give each shard once")
    tables = tables_path(output)
    start, listed, labels = 0, list[Shard](), 0
    with (
        map_in_stoppable_threads(hash_and_tabulate_shard, shards) as scanned,
        Progress(progress).track("reading", len(shards), "shards") as advance,
        replace_file(tables) as file,
    ):
        for found in scanned:
            content = found.table.to_npz_bytes()
            file.write(content)
            listed.append(found.shard._replace(table=(str(tables), start, len(content), hash_table(content))))
            start += len(content)
            labels = max(labels, found.labels)
            advance(1)
            most = len(classes) or MOST_CLASSES
            if labels > most:
                problem = f"has label {labels - 1}, but with {most} classes labels must be 0..{most - 1}"
                raise UserError(f"shard {found.shard.url}: {problem}; fix the sample, or the list of classes")
        if not any(shard.samples for shard in listed):
            raise UserError(f"shard {shards[0]}: has no samples, and no other shard has any; check the addresses")
    names = tuple(classes) or tuple(str(label) for label in range(labels))
    index = ShardIndex(name or output.stem, listed, (Part(name or output.stem),), names)
    entries = [make_shard_entry(shard, str(output.parent)) for shard in listed]
    own: ExtensionJson = {"classes": names, "tables": tables.name}
    write_index_file(output, {"name": index.name, EXTENSION: own, "shardlist": entries})
    return index


def write_index_file(output: Path, content: IndexJson) -> None:
    with replace_file(output) as file:
        file.write(f"{json.dumps({'__kind__': KIND, 'wids_version': 1, **content})}\n".encode())


def join_indexes(
    addresses: Sequence[str], output: Path, *, weights: Sequence[float] = (), name: str = ""
) -> ShardIndex:
    """Write an index that refers to two or more indexes (``datasets`` in wids' format), and return the joined index.

    Reads each index, in up to 4 tries with pauses.

    Args:
        addresses: Addresses of the indexes.
        output: The path of the index to write. An older index is replaced.
        weights: The number of passes through each index in an epoch. By default 1.
        name: The name of the data set. By default, the name of ``output`` without its extension.

    Raises:
        UserError: An index is unreadable or given twice, or fewer than two are given. Also if weights are unfit,
            classes differ, or ``output`` is unfit or cannot be written.
    """
    addresses = [str(storage.find_local_path(address) or address) for address in addresses]
    output = check_and_resolve_index_output(output, addresses)
    if len(set(addresses)) < max(2, len(addresses)):
        raise UserError(f"indexes {', '.join(addresses) or 'none'}: must be two or more, each given once")
    if len(weights) not in (0, len(addresses)):
        raise UserError(f"{len(weights)} weights: must be one for each of the {len(addresses)} indexes, or none")
    references: list[IndexJson] = [
        {"source_url": address.removeprefix(f"{output.parent}/"), "weight": weight}
        for address, weight in zip(addresses, weights or [1.0] * len(addresses), strict=True)
    ]
    content: IndexJson = {"name": name or output.stem, "datasets": references}
    index = build_index_with_parts(str(output), content)
    for reference, part in zip(references, index.parts, strict=True):
        reference["name"] = part.name
    write_index_file(output, {**content, EXTENSION: {"classes": index.classes}})
    return index


def tables_path(index: Path) -> Path:
    return index.with_name(f"{index.name}.tables")


def check_and_resolve_index_output(path: Path, inputs: Iterable[str] = ()) -> Path:
    """Return the absolute path of an index that will be written. If a file exists at ``path``, reads the file.

    Args:
        path: The path of the index.
        inputs: Addresses that will be read, and must not be overwritten.

    Raises:
        UserError: The path is remote, is an existing file that is no index, or is among the ``inputs``. Also if the
            tables beside the index would replace an input.
    """
    if ADDRESS.match(str(path)):
        raise UserError(f"{path}: cannot be written to; choose a local path, and copy the index there afterwards")
    output = path.absolute()
    outputs = {output.resolve(), tables_path(output).resolve()}
    for address in inputs:
        found = storage.find_local_path(address)
        if found is not None and found.resolve() in outputs:
            raise UserError(f"{output}: would overwrite {found}, an input; choose another name")
    if output.is_file() or output.is_dir():
        try:
            load_index_json(str(output))
        except UserError as error:
            raise UserError(f"{output}: exists and is not an index; remove it, or choose another name") from error
    return output


def verify_index(address: str, *, decode: bool = False, progress: str = "auto") -> list[str]:
    """Read all shards of an index in 8 threads, and return a sentence about each difference from the index.

    A shard that cannot be read is a difference, too. If ``decode`` is True, images are also decoded, and samples that
    training cannot use are counted. Progress is printed to stderr.

    Raises:
        UserError: The index cannot be read, or is malformed.
    """
    index = read_index(address)
    verify = partial(list_shard_differences, classes=len(index.classes), decode=decode)
    track = Progress(progress).track("checking", len(index.shards), "shards")
    problems = list[str]()
    with map_in_stoppable_threads(verify, index.shards) as verified, track as advance:
        for found in verified:
            problems += found
            advance(1)
    return problems


def list_shard_differences(shard: Shard, stopped: threading.Event, *, classes: int, decode: bool) -> list[str]:
    """Read a whole shard, and return a sentence about each difference from the index.

    If the shard cannot be read, the only sentence states the reason.

    Args:
        shard: The shard as the index describes it.
        stopped: If set, reading stops, and the result is an error's sentence.
        classes: The number of classes in the index, or 0 if unknown.
        decode: Whether images are decoded, and samples without image or label are counted.
    """
    try:
        found = hash_and_tabulate_shard(shard.url, stopped, decode=decode)
    except UserError as error:
        return [error.message]
    problems = found.damaged
    if decode and (unfit := describe_unfit_samples(found.table, shard.url)):
        problems.append(f"{unfit[0]}; {format_count(len(unfit), 'such sample')} in total")
    for what, here, said in (
        ("bytes", found.shard.size, shard.size if shard.size >= 0 else None),
        ("samples", found.shard.samples, shard.samples),
        ("SHA-256", found.shard.sha256, shard.sha256 or None),
        ("MD5", found.shard.md5, shard.md5 or None),
    ):
        if said not in (None, here):
            problems.append(f"shard {shard.url}: {what} {here}, but {said} in the index")
    if classes and found.labels > classes:
        problems.append(f"shard {shard.url}: has label {found.labels - 1}, but the index has {classes} classes")
    return problems


def check_first_samples_of_parts(index: ShardIndex) -> None:
    """Check that the first sample of each data set in an index has an image and a class number.

    Reads the start of a shard of each data set, in up to 4 tries with pauses. The image is not decoded.

    Raises:
        UserError: A first sample has no image or no class number, or a shard cannot be read.
    """
    first = {shard.part: shard for shard in reversed(index.shards) if shard.samples}  # the first of each data set
    for shard in reversed(first.values()):
        try:
            storage.call_with_retries(shard.url, check_first_sample)
        except storage.UnavailableError as failure:
            raise make_unusable_shard_error(shard, failure) from None


def check_first_sample(url: str) -> None:
    """Check that the first sample of a shard has an image and a class number. The image is not decoded.

    Raises:
        UserError: The sample has no image or no class number, or the start of the shard is malformed.
        UnavailableError: The shard cannot be read.
    """
    key, found = None, dict[str, bytes | None]()
    with storage.open_file(url) as file:
        for member, content in iterate_tar_members(
            HashedStream(file.chunks), url, lambda member: is_label_member(member, url)
        ):
            if key not in (None, member.key):
                break
            key = member.key
            found[member.extension] = content
    name = f"sample {key!r} in shard {url}"
    _, label = choose_image_and_label(name, found)
    parse_class_number(name, found[label] or b"")
