"""Which plan is wanted: what the planner's command and its Flyte task take."""

from dataclasses import dataclass, field
from typing import Any

from dataclasses_json import DataClassJsonMixin


def option(default: Any, meaning: str) -> Any:
    """A field with what it means."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class PlanRequest(DataClassJsonMixin):
    """The command's options, by their names there (``python -m flyte_ddp.shards plan --help``)."""

    index: str | None = None
    shards: int | None = option(None, "Number of shards, in place of an index.")
    samples: int | None = option(None, "Samples of each of these.")
    size: int | None = option(None, "Bytes of each of these.")
    nodes: int = option(1, "Machines.")
    ranks: int = option(1, "Ranks of each node.")
    batch_size: int = option(128, "Of all ranks together; with --stream of each one.")
    shuffle_shards: int = option(16, "As the hyperparameter.")
    accumulation_steps: int = option(1, "As the hyperparameter.")
    validation_fraction: float = option(0.1, "As the hyperparameter.")
    test_fraction: float = option(0.1, "Held out for testing; 0 where there is a test_dataset.")
    seed: int = option(0, "As the hyperparameter.")
    stream: bool = option(False, "Plan a stream in webdataset's way, as simdist.py does.")
    workers: int = option(0, "Of a stream: loader processes of each rank.")
    nbatches: int | None = option(None, "Of a stream: cut each rank off after so many batches.")
    partial: bool = option(False, "Of a stream: keep batches that are not full.")
    repeat: int = option(1, "Of a stream: how many times the loader is gone through.")
    dsrepeat: int = option(1, "Of a stream: how many times each worker goes through its shards.")
    showsplits: bool = option(False, "Of a stream: list each worker's shards in the order of opening.")
