"""What a training's ranks are told: the arguments of their Work, and all of it together. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flyte_ddp.config import Hyperparameters
from flyte_ddp.hardware import Hardware, adapt_to_hosts
from flyte_ddp.runs.checkpoint import Checkpoint, Identity
from flyte_ddp.runs.work import Work
from flyte_ddp.settings import Settings

INITIAL_WEIGHTS = "initial weights"  # key in Work.files


@dataclass(frozen=True)
class Training:
    """The arguments of a training's Work: what to train, on which prepared data, and with which settings."""

    hp: Hyperparameters
    hardware: Hardware
    settings: Settings
    data: Path  # folder of the prepared data set


@dataclass(frozen=True)
class Job(Training):
    """All that a rank needs to know of a training."""

    run_folder: Path  # ``unfinished/`` of the run's folder
    identity: Identity
    initial_weights: Path | None = None  # a local file
    checkpoint: Checkpoint | None = None  # from which training resumes
    num_nodes: int = 1  # number of the ranks' hosts

    @classmethod
    def from_work(cls, work: Work) -> Self:
        """Return the job of a training's Work; UserError if its hyperparameters do not allow the ranks' hosts."""
        given: Training = work.arguments
        return cls(
            hp=given.hp,
            hardware=adapt_to_hosts(given.hardware, given.hp, work.world.hosts),
            settings=given.settings,
            data=given.data,
            run_folder=work.run_folder,
            identity=work.identity,
            initial_weights=work.files.get(INITIAL_WEIGHTS),
            checkpoint=work.checkpoint,
            num_nodes=work.world.num_nodes,
        )
