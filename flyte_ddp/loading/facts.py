"""Facts about image loading for a run's report."""

from collections.abc import Iterable
from dataclasses import dataclass

from flyte_ddp.errors import UserError
from flyte_ddp.parallel.distributed import gather_objects
from flyte_ddp.text.formatting import join_first

FEW = 5  # names that a text lists at most


@dataclass(frozen=True)
class Facts:
    """What one rank, or all ranks together, found while loading images."""

    decoder: str = ""  # name of the decoding library
    bad: frozenset[str] = frozenset()  # names of samples that cannot be decoded

    def describe_loading(self) -> list[str]:
        sentences = []
        if self.decoder:
            instead = "; torchcodec is not installed or cannot be loaded" if self.decoder == "Pillow" else ""
            sentences.append(f"Images were decoded by {self.decoder}{instead}.")
        if self.bad:
            bad = f"{len(self.bad):,} samples could not be decoded and were replaced by others"
            sentences.append(f"{bad}: {join_few(self.bad)}.")
        return sentences


def sum_facts(parts: Iterable[Facts]) -> Facts:
    parts = list(parts)
    decoder = next((part.decoder for part in parts if part.decoder), "")
    return Facts(decoder, frozenset().union(*(part.bad for part in parts)))


def combine_facts_of_ranks(facts: Facts) -> Facts:
    """Combine the facts of all ranks. Collective: all ranks must call it."""
    return sum_facts(gather_objects(facts))


def refuse_too_many_bad_samples(facts: Facts, allowed: int) -> None:
    """Raise UserError if all ranks together have more than ``allowed`` undecodable samples. Collective."""
    if not allowed:  # then a rank fails at its first bad sample
        return
    bad = combine_facts_of_ranks(facts).bad
    if len(bad) > allowed:
        raise UserError(
            f"{join_few(bad)} cannot be decoded; there are {len(bad):,} such samples, more than bad_samples={allowed}; "
            "fix or remove them, or raise bad_samples"
        )


def join_few(names: Iterable[str]) -> str:
    return join_first(sorted(names), FEW)
