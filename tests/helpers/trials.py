"""One run of a test, with a fault in one rank."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from faulty_runs import HP, weights, when
from training_runs import train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.run import Result


@dataclass
class Trial:
    """A run in ``folder``. The fault creates the file ``marker``. Processes keep temporary files in ``temporary``."""

    digits: Path
    folder: Path
    marker: Path
    temporary: Path
    patch: pytest.MonkeyPatch

    def inject(self, kind: str, rank: int = 1, at: str = "training", after: int = 3) -> None:
        """Make a rank fail after ``after`` passes of the point ``at``."""
        faults.inject(self.patch, self.marker, rank=rank, at=at, kind=kind, **{"pass": after})

    def train(
        self, hp: Hyperparameters = HP, *, launch: Any = None, folder: Path | None = None, **changes: Any
    ) -> Result:
        """Train on the digits, by default in the trial's folder, with changes of quiet settings."""
        changes = {"cache_folder": self.marker.with_name("cache"), **changes}
        return train_in(folder or self.folder, hp, self.digits, launch=launch, **changes)

    def when_failing(self, action: Callable[[], object]) -> threading.Thread:
        """Call the action in a thread once the fault has happened. Return the thread."""
        return when(self.marker, action)

    def signal_when_failing(self, number: signal.Signals = signal.SIGTERM) -> threading.Thread:
        """Send this process a signal from a thread once the fault has happened. Return the thread."""
        return self.when_failing(lambda: os.kill(os.getpid(), number))

    def seconds_since_fault(self) -> float:
        return time.time() - float(self.marker.read_text())


def starts(run: Path) -> list[dict[str, Any]]:
    """Return the start records of a run."""
    return [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "start"]


def close(here: Path, there: Path) -> bool:
    """Return whether the weights of two runs are equal up to rounding."""
    mine, other = weights(here), weights(there)
    return all(torch.allclose(mine[name], other[name], rtol=1e-3, atol=1e-5) for name in other)
