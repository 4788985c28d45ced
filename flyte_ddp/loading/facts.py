"""What a run's report says about how its images were had."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flyte_ddp.errors import UserError
from flyte_ddp.parallel.distributed import objects_of_all_ranks

FEW = 5  # names that are given


@dataclass(frozen=True)
class Facts:
    """About the images that one rank, or all of them, have loaded."""

    decoder: str = ""  # the library that has decoded them
    bad: frozenset[str] = frozenset()  # names of samples that cannot be decoded
    fetched: Mapping[str, int] = field(default_factory=dict)  # how often each shard was fetched, by its address

    def describe(self) -> list[str]:
        """Return sentences for the report."""
        said = []
        if self.decoder:
            instead = "; torchcodec is not there, or cannot be loaded" if self.decoder == "Pillow" else ""
            said.append(f"Images were decoded by {self.decoder}{instead}.")
        if self.bad:
            said.append(f"{len(self.bad):,} samples could not be decoded and were replaced by others: {few(self.bad)}.")
        again = sum(1 for times in self.fetched.values() if times > 1)
        if self.fetched:
            cause = "; the cache has no room for all of them (FLYTE_DDP_CACHE_BYTES)" if again else ""
            said.append(f"{len(self.fetched):,} shards were fetched, {again or 'none'} of them more than once{cause}.")
        return said


def sum_facts(parts: Iterable[Facts]) -> Facts:
    """Return the facts of several sources, or ranks, as one."""
    parts = list(parts)
    decoder = next((part.decoder for part in parts if part.decoder), "")
    fetched = sum((Counter(part.fetched) for part in parts), Counter[str]())
    return Facts(decoder, frozenset().union(*(part.bad for part in parts)), fetched)


def of_all_ranks(facts: Facts) -> Facts:
    """Return, on every rank, the facts of all ranks, which must all call this."""
    return sum_facts(objects_of_all_ranks(facts))


def check_bad_samples(facts: Facts, allowed: int) -> None:
    """Raise a UserError if the ranks together saw more undecodable samples than ``allowed``; all ranks must call it."""
    if not allowed:
        return  # a rank has said so at once
    bad = of_all_ranks(facts).bad
    if len(bad) > allowed:
        raise UserError(
            f"{few(bad)} cannot be decoded; {len(bad):,} such samples, and bad_samples={allowed} are allowed; "
            "fix or remove them, or allow more"
        )


def few(names: Iterable[str]) -> str:
    """Return the first of many names, sorted, as text."""
    listed = sorted(names)
    return ", ".join(listed[:FEW]) + (", ..." if len(listed) > FEW else "")
