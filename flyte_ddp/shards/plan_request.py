"""The options of the planner: of its command (``python -m flyte_ddp.shards plan --help``) and of its Flyte task."""

# No "from __future__ import annotations" here: flytekit reads the fields' types.
from dataclasses import dataclass

from flyte_ddp.checked_fields import CheckedFields, setting


@dataclass(frozen=True)
class PlanRequest(CheckedFields, called="plan option"):
    """What is planned. An ``index`` that is empty, and a number that is 0 by default, count as not given."""

    index: str = setting("", "Address of an index.")
    shards: int = setting(0, "Number of shards, in place of an index.", at_least=0)
    samples: int = setting(0, "Samples of each of these shards.", at_least=0)
    size: int = setting(0, "Bytes of each of these shards, if known.", at_least=0)
    nodes: int = setting(1, "Machines.", at_least=1)
    ranks: int = setting(1, "Ranks of each node.", at_least=1)
    batch_size: int = setting(128, "Samples of a batch of all ranks together; with --stream of each rank.", at_least=1)
    shuffle_shards: int = setting(16, "As the hyperparameter.")
    accumulation_steps: int = setting(1, "As the hyperparameter.")
    validation_fraction: float = setting(0.1, "As the hyperparameter.")
    test_fraction: float = setting(0.1, "Held out for testing; 0 where there is a test_dataset.", at_least=0, below=1)
    seed: int = setting(0, "As the hyperparameter.")
    stream: bool = setting(False, "Plan a stream in webdataset's way, as simdist.py does.")
    workers: int = setting(0, "Of a stream: loader processes of each rank.", at_least=0)
    nbatches: int = setting(0, "Of a stream: batches after which each rank is cut off; 0 for no limit.", at_least=0)
    partial: bool = setting(False, "Of a stream: keep batches that are not full.")
    repeat: int = setting(1, "Of a stream: passes of each loader.", at_least=1)
    dsrepeat: int = setting(1, "Of a stream: passes of each worker over its shards.", at_least=1)
    showsplits: bool = setting(False, "Of a stream: list each worker's shards in the order of opening.")

    @property
    def all_ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.ranks

    @property
    def readers(self) -> int:
        """The number of processes that read a rank's stream: its loader's workers, or the rank's own process."""
        return max(self.workers, 1)
