"""Which of a run's ranks a process is; in a file of its own, so that a rank is started before much is imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """Which of the ranks one is."""

    rank: int
    world_size: int
    local_rank: int  # the number of its GPU, of those that its process sees
    store: str = ""  # a file by which ranks that are all on one host find each other
