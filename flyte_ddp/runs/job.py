"""The work order of the ranks. Needs no torch, so that a launcher can start ranks before it has imported torch."""

from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.hardware import Hardware
from flyte_ddp.runs.checkpoint import Checkpoint, Identity
from flyte_ddp.settings import Settings


@dataclass(frozen=True)
class Job:
    """All that a rank needs to know: what to train, on which prepared data, and where results go."""

    hp: Hyperparameters
    hardware: Hardware
    settings: Settings
    data: Path  # folder of the prepared data set
    run_folder: Path  # ``unfinished/`` of the run's folder
    identity: Identity
    initial_weights: Path | None = None  # a local file
    checkpoint: Checkpoint | None = None  # from which training resumes
    num_nodes: int = 1  # number of the ranks' hosts
