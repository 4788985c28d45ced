"""What is handed to the ranks. Needs no torch, so that a launcher can start ranks before it has imported anything."""

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
    data: Path
    run_folder: Path
    identity: Identity
    initial_weights: Path | None = None
    checkpoint: Checkpoint | None = None  # to go on from
    num_nodes: int = 1  # hosts of its ranks
