"""Which plan is wanted: what the planner's command and its Flyte task take."""

from dataclasses import dataclass

from dataclasses_json import DataClassJsonMixin


@dataclass(frozen=True)
class PlanRequest(DataClassJsonMixin):
    """The command's options, by their names there (``python -m flyte_ddp.shards plan --help``)."""

    index: str | None = None
    shards: int | None = None
    samples: int | None = None
    size: int | None = None
    nodes: int = 1
    ranks: int = 1
    batch_size: int = 128
    shuffle_shards: int = 16
    accumulation_steps: int = 1
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0
    stream: bool = False
    workers: int = 0
    nbatches: int | None = None
    partial: bool = False
    repeat: int = 1
    dsrepeat: int = 1
    showsplits: bool = False
    showopen: bool = False
