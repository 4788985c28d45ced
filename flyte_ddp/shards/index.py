"""The index of a data set of shards, in wids' format ``wids-shard-index-v1``.

It is JSON: ``shardlist`` has the shards' ``url``, ``nsamples``, ``filesize`` and ``md5sum``; ``base`` is what relative
addresses refer to (the index's own directory, if there is none); ``datasets`` names parts, each with a ``shardlist`` or
the address of another index in ``source_url``, and a ``weight``. Indexes made here have more, which wids does not look
at: each shard's ``sha256``, and under ``flyte_ddp`` the names of the classes and a file with the tables of samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.errors import UserError

KIND = "wids-shard-index-v1"
EXTENSION = "flyte_ddp"
WANTED = f"it must be an index in wids' format ({KIND}); make one with python -m flyte_ddp.shards create"


class Shard(NamedTuple):
    """A tar file of samples.

    ``url`` is absolute; ``size`` (bytes) is -1 and the digests (hex) are empty where the index does not say. ``table``
    is the file with the shard's table of samples and the place in it, if there is one.
    """

    url: str
    samples: int
    size: int = -1
    md5: str = ""
    sha256: str = ""
    part: int = 0  # which of the index's parts it belongs to
    table: tuple[str, int, int] | None = None


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
            "digests": f"{sum(1 for shard in self.shards if shard.sha256 or shard.md5):,} shards have one",
            "tables": f"{sum(1 for shard in self.shards if shard.table):,} shards have one",
            "first shard": self.shards[0].url,
            "last shard": self.shards[-1].url,
        }
        parts = {f"part {part.name!r}": f"weight {part.weight:g}" for part in self.parts if len(self.parts) > 1}
        return facts | parts

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of what identifies the content: each shard's samples and digest, or its address without one."""
        lines = [json.dumps([self.classes, [[part.name, part.weight] for part in self.parts]])]
        lines += [f"{s.samples} {s.size} {s.sha256 or s.md5 or s.url} {s.part}" for s in self.shards]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_index(address: str) -> ShardIndex:
    """Reads an index and those that it refers to.

    Raises:
        UserError: it is not there, is no index, or refers to one that refers to others again.
    """
    content = load(address)
    entries: list[Shard] = []
    parts: list[Part] = []
    own = content.get("shardlist", [])
    if own:
        parts.append(Part(str(content.get("name", "")), weight_of(address, content)))
        entries += shards_of(address, content, part=0)
    for reference in content.get("datasets", []):
        where, component = referred(address, content, reference)
        name = reference.get("name") or component.get("name") or ""
        parts.append(Part(str(name), weight_of(address, reference)))
        entries += shards_of(where, component, part=len(parts) - 1)
    if not entries:
        raise UserError(f"index {address}: has no shards; {WANTED}")
    classes = content.get(EXTENSION, {}).get("classes", [])
    return ShardIndex(str(content.get("name", "")), entries, tuple(parts), tuple(str(label) for label in classes))


def referred(address: str, content: dict[str, Any], reference: Any) -> tuple[str, dict[str, Any]]:
    """The index that an entry of ``datasets`` is, or refers to, and its address."""
    if not isinstance(reference, dict):
        raise UserError(f"index {address}: {reference!r} in datasets is no data set; {WANTED}")
    if not reference.get("source_url"):
        return address, {"base": content.get("base"), **reference}
    where = storage.resolve(base_of(address, content), str(reference["source_url"]))
    component = load(where)
    if component.get("datasets"):
        raise UserError(f"index {address}: refers to {where}, which refers to others again; list those here")
    return where, component


def load(address: str) -> dict[str, Any]:
    """The JSON of an index."""
    try:
        content = json.loads(storage.with_retries(address, [address], storage.read))
    except storage.AllFailedError as error:
        failure = next(iter(error.failures.values()))
        raise UserError(f"index {address}: cannot be read ({failure}); check the address, and that it is up") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"index {address}: is not JSON ({error}); {WANTED}") from None
    if not isinstance(content, dict) or not isinstance(content.get("shardlist", content.get("datasets")), list):
        raise UserError(f"index {address}: has neither shardlist nor datasets; {WANTED}")
    if content.get("wids_version", 1) != 1 or content.get("__kind__", KIND) != KIND:
        kind, version = content.get("__kind__"), content.get("wids_version")
        raise UserError(f"index {address}: is of kind {kind!r}, version {version!r}; {WANTED}")
    return content


def base_of(address: str, content: Mapping[str, Any]) -> str:
    """What relative addresses in an index refer to."""
    base = content.get("base")
    return storage.resolve(storage.parent(address), str(base)) if base else storage.parent(address)


def weight_of(address: str, content: Mapping[str, Any]) -> float:
    """The weight of a data set."""
    weight = content.get("weight")
    if weight is None:
        return 1.0
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 < weight <= 1e6:
        raise UserError(f"index {address}: weight={weight!r}; must be a number above 0: passes over the data an epoch")
    return float(weight)


def shards_of(address: str, content: Mapping[str, Any], part: int) -> Iterator[Shard]:
    """The shards that one index lists itself."""
    base = base_of(address, content)
    folder = str(storage.local_path(base) or base.rstrip("/"))
    tables = content.get(EXTENSION, {}).get("tables")
    tables = storage.resolve(storage.parent(address), tables) if tables else None
    for number, entry in enumerate(content.get("shardlist", [])):
        try:
            place = entry.get("table")
            url = entry["url"]
            relative = "://" not in url and not url.startswith(("/", "../", "./"))
            shard = Shard(
                url=f"{folder}/{url}" if relative else storage.resolve(base, url),
                samples=checked_number(entry["nsamples"]),
                size=checked_number(entry.get("filesize", -1), least=-1),
                md5=str(entry.get("md5sum") or ""),
                sha256=str(entry.get("sha256") or ""),
                part=part,
                table=(tables, checked_number(place[0]), checked_number(place[1])) if tables and place else None,
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"index {address}: shard {number} in its shardlist has {what}; each needs a url and nsamples"
            ) from None
        yield shard


def checked_number(value: Any, least: int = 0) -> int:
    """A whole number that counts something."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r} for a number")
    return value


def index_json(index: ShardIndex, folder: str, tables: str | None) -> bytes:
    """An index as a file, a shard a line.

    Args:
        folder: where it will be; addresses of shards below it are written relative to it.
        tables: the file with the tables of samples, in the same folder.
    """
    prefix = f"{folder.rstrip('/')}/"
    lines = []
    for shard in index.shards:
        entry: dict[str, Any] = {"url": shard.url.removeprefix(prefix), "nsamples": shard.samples}
        entry |= {"filesize": shard.size} if shard.size >= 0 else {}
        entry |= {"md5sum": shard.md5} if shard.md5 else {}
        entry |= {"sha256": shard.sha256} if shard.sha256 else {}
        entry |= {"table": shard.table[1:]} if shard.table and tables else {}
        lines.append(json.dumps(entry))
    ours = {"classes": index.classes, **({"tables": tables} if tables else {})}
    head = {"__kind__": KIND, "wids_version": 1, "name": index.name, EXTENSION: ours}
    text = json.dumps(head)[:-1] + ', "shardlist": [\n' + ",\n".join(lines) + "\n]}\n"
    return text.encode()
