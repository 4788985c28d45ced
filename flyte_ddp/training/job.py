"""What a training's ranks are told: the arguments of their Work, and all of it together. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flyte_ddp.config import Hyperparameters
from flyte_ddp.hardware import Hardware, choose_hardware
from flyte_ddp.machine.resources import Bf16
from flyte_ddp.runs.checkpoint import Checkpoint, Identity
from flyte_ddp.runs.work import Work
from flyte_ddp.settings import Settings

INITIAL_WEIGHTS = "initial weights"  # key in Work.files


@dataclass(frozen=True)
class Training:
    """The arguments of a training's Work: what to train, on which prepared data, and with which settings."""

    hp: Hyperparameters
    settings: Settings
    data: Path  # folder of the prepared data set


@dataclass(frozen=True)
class Job(Training):
    """All that a rank needs to know of a training."""

    hardware: Hardware
    run_folder: Path  # ``unfinished/`` of the run's folder
    identity: Identity
    initial_weights: Path | None  # a local file
    checkpoint: Checkpoint | None  # from which training resumes
    num_nodes: int  # number of the ranks' hosts

    @classmethod
    def from_work(cls, work: Work, bf16: Bf16) -> Self:
        """Return the job of a training's Work; UserError if its hyperparameters do not fit the ranks' World.

        ``bf16`` is the least support among the ranks' devices.
        """
        given: Training = work.arguments
        return cls(
            hp=given.hp,
            settings=given.settings,
            data=given.data,
            hardware=choose_hardware(given.hp, work.world, bf16),
            run_folder=work.run_folder,
            identity=work.identity,
            initial_weights=work.files.get(INITIAL_WEIGHTS),
            checkpoint=work.checkpoint,
            num_nodes=work.world.num_nodes,
        )
