"""The index of a data set of shards, in wids' format ``wids-shard-index-v1``.

It is JSON: ``shardlist`` has the shards' ``url``, ``nsamples``, ``filesize`` and ``md5sum``; ``base`` is what relative
addresses refer to (the index's own directory, if there is none); ``datasets`` names parts, each with a ``shardlist`` or
the address of another index in ``source_url``, and a ``weight``. Indexes made here have more, which wids does not look
at: each shard's ``sha256``, and under ``flyte_ddp`` the names of the classes and a file with the tables of samples.
"""

from __future__ import annotations

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
MOST = 1 << 44  # bytes of a shard: the sums of 100,000 are within 64 bits
MOST_SAMPLES = 10_000_000  # of a shard, which has 5 GB then at the least
HEX = re.compile(r"[0-9a-fA-F]*")
# An address that is a file's name below the base, without need for a closer look.
PLAIN_NAME = re.compile(r"(?!.*(?:://|\0))(?!(?:.*/)?\.{1,2}(?:/|$))[^/].*", re.DOTALL)
WANTED = f"it must be an index in wids' format ({KIND}); make one with python -m flyte_ddp.shards create"


class Shard(NamedTuple):
    """A tar file of samples.

    ``url`` is absolute; ``size`` (bytes) is -1 and the digests (hex) are empty where the index does not say. ``table``
    is the file with the shard's table of samples, the first byte and the length of that in it, and the beginning of its
    SHA-256, if there is one.
    """

    url: str
    samples: int
    size: int = -1
    md5: str = ""
    sha256: str = ""
    part: int = 0  # which of the index's parts it belongs to
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
        """[shards] the number of samples up to and with each shard."""
        return np.cumsum(self.counts)

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """[shards] those of the parts that they belong to."""
        return np.array([self.parts[shard.part].weight for shard in self.shards])

    @cached_property
    def remote(self) -> NDArray[np.bool_]:
        """[shards] whether each is on another machine, by the look of its address: asking of each would take long."""
        return np.array(["://" in shard.url and not shard.url.startswith("file:") for shard in self.shards])

    def locate(self, sample: int) -> tuple[int, int]:
        """The shard that the sample is in, and its number there."""
        shard = int(np.searchsorted(self.ends, sample, side="right"))
        return shard, int(sample - (self.ends[shard] - self.counts[shard]))

    def summary(self) -> dict[str, str]:
        """What there is to say about it, for people."""
        known = self.sizes[self.sizes >= 0]
        size = f"{known.sum():,}" + ("" if len(known) == len(self.shards) else f" in {len(known):,} of the shards")
        least, most = self.counts.min(), self.counts.max()
        facts = {
            "name": self.name,
            "shards": f"{len(self.shards):,}",
            "samples": f"{len(self):,} ({least:,}" + ("" if least == most else f" to {most:,}") + " a shard)",
            "bytes": size,
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
    """While a hundred thousand objects are made, Python would look through all of them for garbage time and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_index(address: str) -> ShardIndex:
    """Reads an index and those that it refers to.

    Raises:
        UserError: it is not there, is no index, or refers to one that refers to others again or has other classes.
    """
    return index_of(address, load(address))


@many_objects()
def index_of(address: str, content: dict[str, Any]) -> ShardIndex:
    """:func:`read_index` of one that is, or will be, at that address."""
    shards: list[Shard] = []
    parts: list[Part] = []
    classes: dict[tuple[str, ...], str] = {}  # and whose they are

    def add(where: str, listed: dict[str, Any], described: dict[str, Any]) -> None:
        name = described.get("name") or listed.get("name") or ""
        parts.append(Part(str(name), weight_of(address, described.get("weight"))))
        shards.extend(shards_of(where, listed, part=len(parts) - 1))
        classes.setdefault(class_names(f"index {where}", listed[EXTENSION].get("classes", [])), where)

    if content.get("shardlist"):
        add(address, content, content)
    for reference in content.get("datasets") or []:
        add(*referred(address, content, reference), reference)
    if not shards:
        raise malformed(address, "has no shards")
    own = class_names(
        f"index {address}", content[EXTENSION].get("classes", [])
    )  # also of an index that only refers to others
    classes = {own: address} | classes
    classes.pop((), None)
    if len(classes) > 1:
        (first, one), (second, other), *_ = classes.items()
        raise UserError(
            f"index {address}: {other} has the classes {short(list(second))}, and {one} {short(list(first))}; "
            "put data sets together whose labels mean the same"
        )
    return ShardIndex(str(content.get("name") or ""), shards, tuple(parts), next(iter(classes), ()))


def malformed(address: str, what: str) -> UserError:
    """The error for an index that is none."""
    return UserError(f"index {address}: {what}; {WANTED}")


def load(address: str) -> dict[str, Any]:
    """The JSON of an index."""
    try:
        content = json.loads(storage.retried(address, storage.read))
    except storage.UnavailableError as failure:
        where = "the address, and that it is up" if storage.local_path(address) is None else "the path"
        message = f"index {address}: cannot be read ({failure}); check {where}"
        raise failure.explained(message) from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise malformed(address, f"is not JSON ({error})") from None
    if isinstance(content, dict) and (content.get("wids_version", 1), content.get("__kind__", KIND)) != (1, KIND):
        kind, version = content.get("__kind__"), content.get("wids_version")
        raise malformed(address, f"is of kind {kind!r}, version {version!r}")
    return checked(address, content)


def checked(address: str, content: Any) -> dict[str, Any]:
    """An index, or a data set within one, whose fields are what they must be."""
    if not isinstance(content, dict) or not (content.get("shardlist") or content.get("datasets")):
        raise malformed(address, "has neither shardlist nor datasets")
    for kind, names in {list: ("shardlist", "datasets"), str: ("base",), dict: (EXTENSION,)}.items():
        for name in names:
            if not isinstance(content.get(name) or kind(), kind):
                raise malformed(address, f"{name} is {short(content[name])}")
    ours = content.get(EXTENSION) or {}
    if not isinstance(ours.get("classes", []), list) or not isinstance(ours.get("tables", ""), str):
        raise malformed(address, f"{EXTENSION} is {short(ours)}")
    return content | {EXTENSION: ours}


def referred(address: str, content: dict[str, Any], reference: Any) -> tuple[str, dict[str, Any]]:
    """The index that an entry of ``datasets`` is, or refers to, after its address."""
    if not isinstance(reference, dict):
        raise malformed(address, f"{short(reference)} in datasets is no data set")
    if not reference.get("source_url"):
        where, listed = address, checked(address, {"base": content.get("base"), **reference})
    else:
        where = resolved(address, base_of(address, content), reference["source_url"])
        listed = load(where)
    if listed.get("datasets"):
        raise UserError(f"index {address}: refers to {where}, which refers to others again; list those here")
    return where, listed


def base_of(address: str, content: Mapping[str, Any]) -> str:
    """What relative addresses in an index refer to."""
    folder = storage.parent(address)
    return resolved(address, folder, content["base"]) if content.get("base") else folder


def resolved(address: str, base: str, found: Any) -> str:
    """Return what an address in the index means.

    Raises:
        UserError: it is no address; a file of this machine, in an index from elsewhere; or, in an index from a web
            server, an address of another origin that the setting does not allow.
    """
    if not isinstance(found, str) or not found or "\0" in found:
        raise malformed(address, f"{short(found)} is no address")
    whole = encodable(address, storage.resolve(base, found))
    try:
        here = storage.local_path(whole) is not None
    except UserError as error:
        raise UserError(f"index {address}: {error.message}") from None
    if here and storage.local_path(address) is None:
        raise UserError(
            f"index {address}: names {short(found)}, a file of this machine, which an index from elsewhere may not; "
            "copy the index here, if that is meant"
        )
    if not here and storage.scheme(address) in ("http", "https") and not storage.may_be_named(whole, address):
        raise UserError(
            f"index {address}: names {short(found)}, which is not on {storage.origin_of(address)}; set "
            f"{ALLOWED}={storage.origin_of(whole)} if it may be read, or copy the index here"
        )
    return whole


def encodable(address: str, found: str) -> str:
    """An address in the index, if it has only characters that can be sent, or be in a file's name.

    Bytes of files' names that are no text are surrogates in Python, which no address of elsewhere can have.
    """
    remote = "://" in found and not found.startswith("file:")
    try:
        found.encode("utf-8", "strict" if remote else "surrogateescape")
    except UnicodeEncodeError:
        raise malformed(address, f"{short(found)} is no address") from None
    return found


def weight_of(address: str, weight: Any) -> float:
    """The weight of a data set."""
    if weight is None:
        return 1.0
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 < weight <= 1e6:
        raise UserError(f"index {address}: weight={weight!r}; must be a number above 0: passes over the data an epoch")
    return float(weight)


def shards_of(address: str, content: Mapping[str, Any], part: int) -> Iterator[Shard]:
    """The shards that one index lists itself."""
    base = base_of(address, content)
    folder = str(storage.local_path(base) or base.rstrip("/"))
    tables = content[EXTENSION].get("tables")
    tables = resolved(address, storage.parent(address), tables) if tables else None
    for number, entry in enumerate(content.get("shardlist") or []):
        try:
            url, place = entry["url"], entry.get("table")
            yield Shard(
                # Of 100,000 shards most have a plain name.
                url=encodable(address, f"{folder}/{storage.as_in(base, url)}")
                if PLAIN_NAME.fullmatch(url)
                else resolved(address, base, url),
                samples=count_of(entry["nsamples"], most=MOST_SAMPLES),
                size=count_of(entry.get("filesize", -1), least=-1),
                md5=digest_of(entry.get("md5sum"), 32),
                sha256=digest_of(entry.get("sha256"), 64),
                part=part,
                table=(tables, count_of(place[0]), count_of(place[1]), str(place[2])) if tables and place else None,
            )
        except UserError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"is {short(entry)}: {error}"
            raise UserError(
                f"index {address}: shard {number} in its shardlist {what}; each needs a url and nsamples"
            ) from None


def count_of(value: Any, least: int = 0, most: int = MOST) -> int:
    """A whole number that counts something."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{short(value)} for a number of {least:,} to {most:,}")
    return value


def digest_of(value: Any, digits: int) -> str:
    """A digest in small letters, or nothing."""
    if not value:
        return ""
    if len(value) != digits or not HEX.fullmatch(value):
        raise ValueError(f"{value!r} for {digits} hexadecimal digits")
    return str(value).lower()


def short(value: Any) -> str:
    """A value from a file, for an error."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def index_json(index: ShardIndex, folder: str, tables: str, *, packed: bool = False) -> bytes:
    """An index of one part as a file, a shard a line.

    Args:
        folder: where it will be; addresses of shards below it are written relative to it.
        tables: the file with the tables of samples, in the same folder.
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
