"""Samples that could not be decoded, of all ranks together."""

from collections.abc import Iterable

from flyte_ddp.errors import UserError
from flyte_ddp.parallel.distributed import gather_objects
from flyte_ddp.text.formatting import join_first

FEW = 5  # names that a text lists at most


def gather_bad_samples(names: frozenset[str]) -> frozenset[str]:
    """Return the names that all ranks give. Collective: all ranks must call it."""
    return frozenset().union(*gather_objects(names))


def refuse_too_many_bad_samples(names: frozenset[str], allowed: int) -> None:
    """Raise UserError if all ranks together have more than ``allowed`` undecodable samples. Collective."""
    if not allowed:  # then a rank fails at its first bad sample
        return
    bad = gather_bad_samples(names)
    if len(bad) > allowed:
        raise UserError(
            f"{join_few(bad)} cannot be decoded; there are {len(bad):,} such samples, more than bad_samples={allowed}; "
            "fix or remove them, or raise bad_samples"
        )


def describe_bad_samples(bad: frozenset[str]) -> list[str]:
    what = f"{len(bad):,} samples could not be decoded and were replaced by others"
    return [f"{what}: {join_few(bad)}."] if bad else []


def join_few(names: Iterable[str]) -> str:
    return join_first(sorted(names), FEW)
