"""The index of a data set of shards, in wids' format ``wids-shard-index-v1``.

An index is JSON. ``shardlist`` has each shard's ``url``, ``nsamples``, ``filesize`` and ``md5sum``. ``base`` is the
folder of relative addresses, by default the index's folder. ``datasets`` lists parts. Each part has a ``weight``, and a
``shardlist`` or the address of another index (``source_url``). Indexes of this package have fields that wids ignores. A
shard has ``sha256``. ``flyte_ddp`` has the class names and the name of the file with the tables of samples.
"""

import gc
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.core.checks.parsing import MisreadError, parse_json
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.samples.class_names import normalize_class_names
from flyte_ddp.core.settings import ALLOWED

KIND = "wids-shard-index-v1"
EXTENSION: Final = "flyte_ddp"
MOST_BYTES = 1 << 44  # maximum of a shard, so that the sum of 100,000 shards fits into 64 bits
MOST_SAMPLES = 10_000_000  # maximum of a shard: more samples would have over 5 GB of tar headers
# A file name below the base that needs no further checks: no scheme, no NUL, and no "." or ".." as a folder.
PLAIN_NAME = re.compile(r"(?!.*(?:://|\0))(?!(?:.*/)?\.{1,2}(?:/|$))[^/].*", re.DOTALL)
# Exceptions that using a field of a wrong type can raise.
WRONG_TYPES = (LookupError, TypeError, ValueError, AttributeError)


class ShardJson(TypedDict):
    """An entry of ``shardlist``."""

    url: str  # absolute, or below the base
    nsamples: int
    filesize: NotRequired[int]
    md5sum: NotRequired[str | None]
    sha256: NotRequired[str | None]
    table: NotRequired[Sequence[Any] | None]  # of this package: first byte, length and digest of the table of samples


class ExtensionJson(TypedDict, total=False):
    """The fields of an index that only this package has."""

    classes: Sequence[str]
    tables: str  # address of the file with the tables of samples


class IndexJson(TypedDict, total=False):
    """An index, or an entry of ``datasets``, as JSON.

    A user's file may have values of other types. Where such a value is used, an exception of WRONG_TYPES is raised.
    """

    name: str | None
    base: str | None
    shardlist: list[ShardJson]
    datasets: list["IndexJson"]
    weight: float  # of an entry
    source_url: str  # of an entry
    flyte_ddp: ExtensionJson
    __kind__: str
    wids_version: int


class Shard(NamedTuple):
    """A tar file of samples, as an index describes it."""

    url: str  # absolute address
    samples: int  # number of samples
    size: int = -1  # in bytes, or -1 if unknown
    md5: str = ""  # hex, or "" if unknown
    sha256: str = ""  # hex, or "" if unknown
    part: int = 0  # position in ShardIndex.parts
    # Address of the file with the tables of samples, the table's first byte and length, and its hash_table.
    table: tuple[str, int, int, str] | None = None

    @property
    def digest(self) -> tuple[str, str]:
        """Return the digest that is compared: the SHA-256 if known, else the MD5.

        Returns:
            "sha256" or "md5", and the digest in hex ("" if neither is known).
        """
        return ("md5", self.md5) if self.md5 and not self.sha256 else ("sha256", self.sha256)


class Part(NamedTuple):
    """A data set within an index."""

    name: str
    weight: float = 1.0  # passes through the data set in an epoch, 0.5 for half of the data set


@dataclass(eq=False)
class ShardIndex:
    """All shards of a data set in the order of the index, and sums over the shards."""

    name: str
    shards: Sequence[Shard]
    parts: tuple[Part, ...] = (Part(""),)
    classes: tuple[str, ...] = ()  # names in the order of the labels, or empty if unknown

    def __post_init__(self) -> None:
        # Arrays [shards], of each shard:
        self.counts = np.array([shard.samples for shard in self.shards], dtype=np.int64)  # samples
        self.ends = np.cumsum(self.counts)  # samples up to and including the shard
        self.weights = np.array([self.parts[shard.part].weight for shard in self.shards])  # weight of the shard's part

    def __len__(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def remote(self) -> NDArray[np.bool_]:
        """Return whether each shard is on another machine, [shards]. Only addresses are examined, not files."""
        return np.array(["://" in shard.url and not shard.url.startswith("file:") for shard in self.shards])

    def locate_sample(self, sample: int) -> tuple[int, int]:
        """Return the number of the shard that contains a sample, and the sample's position in the shard.

        ``sample`` must be at least 0 and below the number of samples, which is not checked.
        """
        shard = int(np.searchsorted(self.ends, sample, side="right"))
        return shard, int(sample - (self.ends[shard] - self.counts[shard]))

    @cached_property
    def digest(self) -> str:
        """Return a SHA-256 (hex) of the index: classes, parts, and each shard's samples, size and digest.

        If a shard's digest is unknown, the shard's address is hashed instead.
        """
        lines = [json.dumps([self.classes, self.parts])]
        lines += [f"{s.samples} {s.size} {s.digest[1] or s.url} {s.part}" for s in self.shards]
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


@contextmanager
def pause_garbage_collector() -> Iterator[None]:
    """Turn Python's garbage collector off during the block, for all threads. Restores the former state."""
    enabled = gc.isenabled()
    gc.disable()  # the collector would scan a large index's 100,000 objects many times
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_index(address: str) -> ShardIndex:
    """Read an index with all indexes that it refers to, and return all shards as one index.

    Each index is tried up to 4 times, with pauses. Shards are not read.

    Raises:
        UserError: An index cannot be read, is malformed, or names an address that is not allowed. Also if indexes have
            different classes.
    """
    return build_index_with_parts(address, load_index_json(address))


@pause_garbage_collector()
def build_index_with_parts(address: str, index_json: IndexJson) -> ShardIndex:
    """Build a ShardIndex from JSON that was read from ``address``.

    Also reads each index that the JSON names, in up to 4 tries with pauses. Python's garbage collector is off
    meanwhile.

    Raises:
        UserError: An index cannot be read, is malformed, or names an address that is not allowed. Also if indexes have
            different classes.
    """
    try:
        return build_index_from_fields(address, index_json)
    except UserError:
        raise
    except WRONG_TYPES as error:
        raise make_malformed_index_error(address, f"a field is missing or has a wrong type ({error!r})") from None


def build_index_from_fields(address: str, index_json: IndexJson) -> ShardIndex:
    """Build a ShardIndex from JSON that was read from ``address``.

    Also reads each index that the JSON names, in up to 4 tries with pauses.

    Raises:
        WRONG_TYPES: A field is missing or has a wrong type.
        UserError: An index cannot be read, has no shards, or has an unfit weight or address. Also if indexes have
            different classes.
    """
    sources = list[tuple[str, IndexJson, IndexJson]]()  # address, JSON, the part's entry
    if index_json.get("shardlist"):
        sources.append((address, index_json, index_json))
    sources += [
        (*load_part_index_json(address, index_json, entry), entry) for entry in index_json.get("datasets") or []
    ]
    shards, parts = list[Shard](), list[Part]()
    classes = {parse_class_names(address, index_json): address}  # the address of the index with these classes
    for where, listed, described in sources:
        name, weight = described.get("name") or listed.get("name") or "", described.get("weight", 1.0)
        if not isinstance(weight, (int, float)) or not 0 < weight <= 1e6:
            raise UserError(f"index {address}: weight={weight!r}: must be a number above 0 (passes in an epoch)")
        parts.append(Part(str(name), float(weight)))
        shards.extend(parse_shards(where, listed, len(parts) - 1))
        classes.setdefault(parse_class_names(where, listed), where)
    if not shards:
        raise make_malformed_index_error(address, "has no shards")
    classes.pop((), None)
    if len(classes) > 1:
        (first, one), (second, other), *_ = classes.items()
        problem = f"{other} has the classes {shorten_repr(list(second))}, but {one} has {shorten_repr(list(first))}"
        raise UserError(f"index {address}: {problem}; join only data sets with the same classes in the same order")
    return ShardIndex(str(index_json.get("name") or ""), shards, tuple(parts), next(iter(classes), ()))


def make_malformed_index_error(address: str, problem: str) -> UserError:
    fix = f"it must be an index in wids' format ({KIND}); make one with python -m flyte_ddp.shards create"
    return UserError(f"index {address}: {problem}; {fix}")


def shorten_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def load_index_json(address: str) -> IndexJson:
    """Read an index, in up to 4 tries with pauses, and return the JSON.

    Raises:
        UserError: The index cannot be read, is not JSON, or is not in wids' format, version 1.
    """
    try:
        index_json: IndexJson = parse_json(storage.call_with_retries(address, storage.read_file))
    except storage.UnavailableError as failure:
        where = "the address, and that the server is up" if storage.find_local_path(address) is None else "the path"
        raise failure.to_user_error(f"index {address}: cannot be read ({failure}); check {where}") from None
    except MisreadError as error:
        raise make_malformed_index_error(address, error.message) from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise make_malformed_index_error(address, f"is not JSON ({error})") from None
    if not isinstance(index_json, dict) or not (index_json.get("shardlist") or index_json.get("datasets")):
        raise make_malformed_index_error(address, "has neither shardlist nor datasets")
    kind, version = index_json.get("__kind__", KIND), index_json.get("wids_version", 1)
    if (version, kind) != (1, KIND):
        raise make_malformed_index_error(address, f"is of kind {kind!r}, version {version!r}")
    return index_json


def load_part_index_json(address: str, index_json: IndexJson, entry: IndexJson) -> tuple[str, IndexJson]:
    """Return address and JSON of the index that lists a part's shards.

    If the index is another file, reads the file, in up to 4 tries with pauses.

    Args:
        address: The address of the index with the part.
        index_json: The JSON of this index.
        entry: The entry of the part in ``datasets``.

    Raises:
        UserError: The other index cannot be read, is malformed or not allowed, or refers to further indexes.
    """
    if entry.get("source_url"):
        where = check_and_resolve_address(address, resolve_base_address(address, index_json), entry["source_url"])
        listed = load_index_json(where)
    else:
        where, listed = address, {"base": index_json.get("base"), **entry}
    if listed.get("datasets"):
        raise UserError(f"index {address}: refers to {where}, which refers to other indexes; list those indexes here")
    return where, listed


def parse_class_names(address: str, index_json: IndexJson) -> tuple[str, ...]:
    """Return the class names in an index's JSON, or () if it has none.

    Raises:
        TypeError: The names are no list.
        UserError: A name is not allowed, or two names are equal.
    """
    classes = (index_json.get(EXTENSION) or {}).get("classes", [])
    if not isinstance(classes, list):
        raise TypeError(f"classes is {shorten_repr(classes)}")
    return normalize_class_names(f"index {address}", classes)


def resolve_base_address(address: str, index_json: IndexJson) -> str:
    folder = storage.parent_address(address)
    return check_and_resolve_address(address, folder, index_json["base"]) if index_json.get("base") else folder


def check_and_resolve_address(index: str, base: str, entry_address: Any) -> str:
    """Return the absolute form of an address in the index at ``index``.

    A relative address starts at ``base``.

    Raises:
        UserError: ``entry_address`` is no address, or a remote index names a local file. Also if an index on a web
            server names another server's address that FLYTE_DDP_ALLOWED_ADDRESSES does not allow.
    """
    shown = shorten_repr(entry_address)
    if not isinstance(entry_address, str) or not entry_address or "\0" in entry_address:
        raise make_malformed_index_error(index, f"{shown} is not an address")
    whole = storage.resolve_address(base, entry_address)
    try:
        is_local = storage.find_local_path(whole) is not None
    except UserError as error:
        raise UserError(f"index {index}: {error.message}") from None
    if is_local and storage.find_local_path(index) is None:
        fix = "a remote index must not name local files; to allow it, copy the index to this machine"
        raise UserError(f"index {index}: names {shown}, a local file; {fix}")
    if (
        not is_local
        and storage.parse_scheme(index) in ("http", "https")
        and not storage.may_index_list_address(whole, index)
    ):
        fix = f"to allow it, set {ALLOWED}={storage.parse_origin(whole)}, or copy the index to this machine"
        raise UserError(f"index {index}: names {shown}, which is not on {storage.parse_origin(index)}; {fix}")
    return whole


def parse_shards(address: str, index_json: IndexJson, part: int) -> Iterator[Shard]:
    """Yield the shards that ``shardlist`` of an index lists.

    Args:
        address: The address of the index.
        index_json: The JSON of the index.
        part: The position of the shards' data set in ``ShardIndex.parts``.

    Raises:
        UserError: A field of a shard is missing or has a wrong type, or an address is not allowed. Raised during the
            iteration.
    """
    base = resolve_base_address(address, index_json)
    folder = str(storage.find_local_path(base) or base.rstrip("/"))
    tables = (index_json.get(EXTENSION) or {}).get("tables")
    tables = check_and_resolve_address(address, storage.parent_address(address), tables) if tables else ""
    for number, entry in enumerate(index_json.get("shardlist") or []):
        try:
            url, table = entry["url"], entry.get("table") if tables else None
            yield Shard(
                # A fast path: an index may have 100,000 shards, and most have plain names.
                url=f"{folder}/{storage.encode_name(base, url)}"
                if PLAIN_NAME.fullmatch(url)
                else check_and_resolve_address(address, base, url),
                samples=require_integer_within(entry["nsamples"], MOST_SAMPLES),
                size=require_integer_within(entry.get("filesize", -1), least=-1),
                md5=str(entry.get("md5sum") or "").lower(),
                sha256=str(entry.get("sha256") or "").lower(),
                part=part,
                table=(tables, require_integer_within(table[0]), require_integer_within(table[1]), table[2])
                if table
                else None,
            )
        except UserError:
            raise
        except WRONG_TYPES as error:
            problem = f"a field of shard {number} in its shardlist is missing or has a wrong type ({error!r})"
            raise make_malformed_index_error(address, problem) from None


def require_integer_within(value: Any, most: int = MOST_BYTES, least: int = 0) -> int:
    """Return ``value``. Raise ValueError unless ``value`` is an int from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{shorten_repr(value)}: must be {least:,} to {most:,}")
    return value


def make_shard_entry(shard: Shard, folder: str) -> ShardJson:
    """Return a shard's JSON entry, with digests and table, for an index in ``folder``.

    The entry has a relative address if the shard is below ``folder``.
    """
    url = shard.url.removeprefix(f"{folder.rstrip('/')}/")
    return {
        "url": url if PLAIN_NAME.fullmatch(url) else shard.url,
        "nsamples": shard.samples,
        "filesize": shard.size,
        "md5sum": shard.md5,
        "sha256": shard.sha256,
        "table": shard.table and shard.table[1:],
    }
