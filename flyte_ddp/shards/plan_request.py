"""The options of the planner: for its command (``python -m flyte_ddp.shards plan --help``) and its Flyte task."""

# No "from __future__ import annotations" here: flytekit reads the fields' types.
from dataclasses import dataclass

from flyte_ddp.checks.fields import CheckedFields, setting


@dataclass(frozen=True)
class PlanRequest(CheckedFields, called="plan option"):
    """The options of a plan. An empty ``index``, and 0 for a number whose default is 0, mean that it is not given."""

    index: str = setting("", "Address of an index.")
    shards: int = setting(0, "Number of shards, instead of an index.", at_least=0)
    samples: int = setting(0, "Samples in each shard, with --shards.", at_least=0)
    size: int = setting(0, "Bytes of each shard, if known, with --shards.", at_least=0)
    nodes: int = setting(1, "Number of machines.", at_least=1)
    ranks: int = setting(1, "Ranks on each node.", at_least=1)
    batch_size: int = setting(128, "Samples in a batch of all ranks together; with --stream, of each rank.", at_least=1)
    shuffle_shards: int = setting(16, "Number of shards that a batch is drawn from (hyperparameter).")
    accumulation_steps: int = setting(1, "Micro-batches of each step (hyperparameter).")
    validation_fraction: float = setting(0.1, "Part held out for validation (hyperparameter).")
    test_fraction: float = setting(0.1, "Part held out for testing; 0 if there is a test_dataset.", at_least=0, below=1)
    seed: int = setting(0, "Seed of the order of the samples (hyperparameter).")
    stream: bool = setting(False, "Plan a stream by webdataset's rules, as simdist.py does.")
    workers: int = setting(0, "Stream: loader processes of each rank.", at_least=0)
    nbatches: int = setting(0, "Stream: batches after which each rank stops; 0 for no limit.", at_least=0)
    partial: bool = setting(False, "Stream: keep batches that are not full.")
    repeat: int = setting(1, "Stream: passes of each loader.", at_least=1)
    dsrepeat: int = setting(1, "Stream: passes of each worker over its shards.", at_least=1)
    showsplits: bool = setting(False, "Stream: list the shards of each worker in the order in which it opens them.")

    @property
    def total_ranks(self) -> int:
        return self.nodes * self.ranks

    @property
    def readers_per_rank(self) -> int:
        """Number of processes that read a rank's stream; without workers this is the rank's own process."""
        return max(self.workers, 1)
