"""The index of a data set of shards, in wids' format ``wids-shard-index-v1``.

It is JSON: ``shardlist`` has the shards' ``url``, ``nsamples``, ``filesize`` and ``md5sum``; ``base`` is what relative
addresses refer to (the index's own directory, if there is none); ``datasets`` names parts, each with a ``shardlist`` or
the address of another index in ``source_url``, and a ``weight``. Indexes made here have more, which wids does not look
at: each shard's ``sha256``, and under ``flyte_ddp`` the names of the classes and a file with the tables of samples.
"""

import gc
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.class_names import class_names
from flyte_ddp.errors import UserError
from flyte_ddp.settings import ALLOWED

KIND = "wids-shard-index-v1"
EXTENSION = "flyte_ddp"
MOST_BYTES = 1 << 44  # of a shard: the sums of 100,000 are within 64 bits
MOST_SAMPLES = 10_000_000  # of a shard, which has 5 GB then at the least
# An address that is a file's name below the base, without need for a closer look.
PLAIN_NAME = re.compile(r"(?!.*(?:://|\0))(?!(?:.*/)?\.{1,2}(?:/|$))[^/].*", re.DOTALL)
# What a field of another type than the format's raises where it is used.
WRONG_TYPES = (LookupError, TypeError, ValueError, AttributeError)


class Shard(NamedTuple):
    """A tar file of samples.

    ``url`` is absolute; ``size`` (bytes) is -1 and the digests (hex) are empty where the index does not say; ``part``
    is the number of one of the index's parts. ``table`` names the file with the shard's table of samples, the table's
    first byte and length in that file, and the beginning of the table's SHA-256.
    """

    url: str
    samples: int
    size: int = -1
    md5: str = ""
    sha256: str = ""
    part: int = 0
    table: tuple[str, int, int, str] | None = None

    @property
    def digest(self) -> tuple[str, str]:
        """Which of the digests counts, and its value (hex), empty where the index has none."""
        return ("md5", self.md5) if self.md5 and not self.sha256 else ("sha256", self.sha256)


@dataclass(frozen=True)
class Part:
    """A data set within the index. ``weight``: how many times an epoch goes through it; 0.5 takes half of it."""

    name: str
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """All shards of a data set, in the order of the index."""

    name: str
    shards: Sequence[Shard]
    parts: tuple[Part, ...] = (Part(""),)
    classes: tuple[str, ...] = ()  # empty where the index does not say

    def __len__(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """[shards] numbers of samples."""
        return np.array([shard.samples for shard in self.shards], dtype=np.int64)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """[shards] bytes, -1 where unknown."""
        return np.array([shard.size for shard in self.shards], dtype=np.int64)

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """[shards] cumulative numbers of samples."""
        return np.cumsum(self.counts)

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """[shards] the weight of each shard's part."""
        return np.array([self.parts[shard.part].weight for shard in self.shards])

    @cached_property
    def remote(self) -> NDArray[np.bool_]:
        """[shards] whether each is on another machine, by its address alone, as no file of 100,000 is looked at."""
        return np.array(["://" in shard.url and not shard.url.startswith("file:") for shard in self.shards])

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the number of the shard that a sample is in, and the sample's number in that shard."""
        shard = int(np.searchsorted(self.ends, sample, side="right"))
        return shard, int(sample - (self.ends[shard] - self.counts[shard]))

    def summary(self) -> dict[str, str]:
        """Return names and values that describe the index to people."""
        known = self.sizes[self.sizes >= 0]
        of_some = "" if len(known) == len(self.shards) else f" in {len(known):,} of the shards"
        least, most = self.counts.min(), self.counts.max()
        facts = {
            "name": self.name,
            "shards": f"{len(self.shards):,}",
            "samples": f"{len(self):,} ({least:,}" + ("" if least == most else f" to {most:,}") + " a shard)",
            "bytes": f"{known.sum():,}{of_some}",
            "classes": f"{len(self.classes):,}" if self.classes else "not known",
            "digests": f"{sum(1 for shard in self.shards if shard.digest[1]):,} shards have one",
            "tables": f"{sum(1 for shard in self.shards if shard.table):,} shards have one",
            "first shard": self.shards[0].url,
            "last shard": self.shards[-1].url,
        }
        if len(self.parts) > 1:  # several may have one name
            facts |= {f"part {i}": f"weight {part.weight:g}, {part.name}" for i, part in enumerate(self.parts)}
        return facts

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of what identifies the content: each shard's samples and digest, or its address without one."""
        lines = [json.dumps([self.classes, [[part.name, part.weight] for part in self.parts]])]
        lines += [f"{s.samples} {s.size} {s.digest[1] or s.url} {s.part}" for s in self.shards]
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


@contextmanager
def many_objects() -> Iterator[None]:
    """Turn Python's garbage collection off: it would scan a hundred thousand new objects time and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_index(address: str) -> ShardIndex:
    """Return an index, after reading it and the indexes that it refers to.

    Raises UserError if it is not there, is no index, or refers to one that refers to others or has other classes.
    """
    try:
        return build_index(address, load_index(address))
    except UserError:
        raise
    except WRONG_TYPES as error:
        raise malformed(address, f"a field of it has another type than in that format ({error})") from None


@many_objects()
def build_index(address: str, content: dict[str, Any]) -> ShardIndex:
    """Return the index with the given content that is, or will be, at an address; see :func:`read_index`."""
    sources = [(address, content, content)] if content.get("shardlist") else []
    sources += [load_part(address, content, reference) for reference in content.get("datasets") or []]
    shards, parts = list[Shard](), list[Part]()
    classes = {list_classes(address, content): address}  # and whose they are
    for where, listed, described in sources:
        name, weight = described.get("name") or listed.get("name") or "", described.get("weight", 1.0)
        if not isinstance(weight, (int, float)) or not 0 < weight <= 1e6:
            raise UserError(f"index {address}: weight={weight!r}; must be a number above 0: passes over its data")
        parts.append(Part(str(name), float(weight)))
        shards.extend(list_shards(where, listed, len(parts) - 1))
        classes.setdefault(list_classes(where, listed), where)
    if not shards:
        raise malformed(address, "has no shards")
    classes.pop((), None)
    if len(classes) > 1:
        (first, one), (second, other), *_ = classes.items()
        raise UserError(
            f"index {address}: {other} has the classes {shorten(list(second))}, and {one} {shorten(list(first))}; "
            "put data sets together whose labels mean the same"
        )
    return ShardIndex(str(content.get("name") or ""), shards, tuple(parts), next(iter(classes), ()))


def malformed(address: str, what: str) -> UserError:
    """Return the error for a file that is no index."""
    fix = f"it must be an index in wids' format ({KIND}); make one with python -m flyte_ddp.shards create"
    return UserError(f"index {address}: {what}; {fix}")


def shorten(value: Any) -> str:
    """Return the ``repr`` of a value from a file, cut off after 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def load_index(address: str) -> dict[str, Any]:
    """Return the JSON of an index; raise UserError if it cannot be read, or is no index."""
    try:
        content = json.loads(storage.retried(address, storage.read))
    except storage.UnavailableError as failure:
        where = "the address, and that it is up" if storage.local_path(address) is None else "the path"
        raise failure.explained(f"index {address}: cannot be read ({failure}); check {where}") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise malformed(address, f"is not JSON ({error})") from None
    if not isinstance(content, dict) or not (content.get("shardlist") or content.get("datasets")):
        raise malformed(address, "has neither shardlist nor datasets")
    kind, version = content.get("__kind__", KIND), content.get("wids_version", 1)
    if (version, kind) != (1, KIND):
        raise malformed(address, f"is of kind {kind!r}, version {version!r}")
    return content


def load_part(address: str, content: dict[str, Any], reference: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the address and content of the index that an entry of ``datasets`` is or refers to, and the entry."""
    if reference.get("source_url"):
        where = resolve_address(address, base_of(address, content), reference["source_url"])
        listed = load_index(where)
    else:
        where, listed = address, {"base": content.get("base"), **reference}
    if listed.get("datasets"):
        raise UserError(f"index {address}: refers to {where}, which refers to others again; list those here")
    return where, listed, reference


def list_classes(address: str, content: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes in an index; none where it does not say."""
    classes = (content.get(EXTENSION) or {}).get("classes", [])
    if not isinstance(classes, list):
        raise malformed(address, f"classes is {shorten(classes)}")
    return class_names(f"index {address}", classes)


def base_of(address: str, content: Mapping[str, Any]) -> str:
    """Return the folder or prefix that relative addresses in an index refer to."""
    folder = storage.parent(address)
    return resolve_address(address, folder, content["base"]) if content.get("base") else folder


def resolve_address(address: str, base: str, found: Any) -> str:
    """Return the absolute form of an address that stands in the index at ``address``.

    Raises UserError for what is no address; for a file of this machine, in an index from elsewhere; and, in an index
    from a web server, for an address of another origin that the setting does not allow.
    """
    if not isinstance(found, str) or not found or "\0" in found:
        raise malformed(address, f"{shorten(found)} is no address")
    whole = check_encodable(address, storage.resolve(base, found))
    try:
        here = storage.local_path(whole) is not None
    except UserError as error:
        raise UserError(f"index {address}: {error.message}") from None
    if here and storage.local_path(address) is None:
        raise UserError(
            f"index {address}: names {shorten(found)}, a file of this machine, which an index from elsewhere may not; "
            "copy the index here, if that is meant"
        )
    if not here and storage.scheme(address) in ("http", "https") and not storage.may_be_named(whole, address):
        raise UserError(
            f"index {address}: names {shorten(found)}, which is not on {storage.origin_of(address)}; set "
            f"{ALLOWED}={storage.origin_of(whole)} if it may be read, or copy the index here"
        )
    return whole


def check_encodable(address: str, found: str) -> str:
    """Return an address; raise UserError if it can neither be sent nor be a file's name."""
    # Undecodable file names contain lone surrogates; they are allowed for local files but cannot be sent in a URL.
    try:
        found.encode("utf-8", "strict" if "://" in found and not found.startswith("file:") else "surrogateescape")
    except UnicodeEncodeError:
        raise malformed(address, f"{shorten(found)} is no address") from None
    return found


def list_shards(address: str, content: Mapping[str, Any], part: int) -> Iterator[Shard]:
    """Yield the shards that one index lists itself, as those of a part; raise UserError for an entry that is none."""
    base = base_of(address, content)
    folder = str(storage.local_path(base) or base.rstrip("/"))
    tables = (content.get(EXTENSION) or {}).get("tables")
    tables = resolve_address(address, storage.parent(address), tables) if tables else None
    for number, entry in enumerate(content.get("shardlist") or []):
        try:
            url, place = entry["url"], entry.get("table")
            yield Shard(
                # Of 100,000 shards most have a plain name.
                url=check_encodable(address, f"{folder}/{storage.as_in(base, url)}")
                if PLAIN_NAME.fullmatch(url)
                else resolve_address(address, base, url),
                samples=check_count(entry["nsamples"], 0, MOST_SAMPLES),
                size=check_count(entry.get("filesize", -1), -1),
                md5=str(entry.get("md5sum") or "").lower(),
                sha256=str(entry.get("sha256") or "").lower(),
                part=part,
                table=(tables, check_count(place[0]), check_count(place[1]), place[2]) if tables and place else None,
            )
        except UserError:
            raise
        except WRONG_TYPES as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"is {shorten(entry)}: {error}"
            what = f"shard {number} in its shardlist {what}; each needs a url and nsamples"
            raise UserError(f"index {address}: {what}") from None


def check_count(value: Any, least: int = 0, most: int = MOST_BYTES) -> int:
    """Return a whole number from ``least`` to ``most``; raise ValueError for anything else."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{shorten(value)} for a number of {least:,} to {most:,}")
    return value


def index_json(index: ShardIndex, folder: str, tables: str, *, packed: bool = False) -> bytes:
    """Return the JSON of an index of one part, a shard a line.

    Args:
        folder: where the index will be; addresses of shards below it are written relative to it.
        tables: the name of the file with the tables of samples, in the same folder.
        packed: whether the shards were made together with the index.
    """
    [part] = index.parts
    prefix = f"{folder.rstrip('/')}/"
    lines = []
    for shard in index.shards:
        url = shard.url.removeprefix(prefix)
        entry: dict[str, Any] = {"url": url if PLAIN_NAME.fullmatch(url) else shard.url, "nsamples": shard.samples}
        entry |= {"filesize": shard.size} if shard.size >= 0 else {}
        entry |= {"md5sum": shard.md5} if shard.md5 else {}
        entry |= {"sha256": shard.sha256} if shard.sha256 else {}
        entry |= {"table": shard.table[1:]} if shard.table else {}
        lines.append(json.dumps(entry))
    head = {"__kind__": KIND, "wids_version": 1, "name": index.name}
    head |= {"weight": part.weight} if part.weight != 1 else {}
    head |= {EXTENSION: {"classes": index.classes, "tables": tables} | ({"packed": True} if packed else {})}
    text = json.dumps(head)[:-1] + ', "shardlist": [\n' + ",\n".join(lines) + "\n]}\n"
    return text.encode()
