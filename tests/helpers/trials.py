"""One run of a test, and a fault in one of its ranks."""

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
from flyte_ddp.run import Result
from flyte_ddp.text.json_lines import read_records


@dataclass
class Trial:
    """A run in ``folder``; the file ``marker`` appears with the fault. Processes have their files in ``temporary``."""

    digits: Path
    folder: Path
    marker: Path
    temporary: Path
    patch: pytest.MonkeyPatch

    def inject(self, kind: str, rank: int = 1, at: str = "training", after: int = 3) -> None:
        """Make a rank fail after so many passes of a point."""
        faults.inject(self.patch, self.marker, rank=rank, at=at, kind=kind, **{"pass": after})

    def train(
        self, hp: Hyperparameters = HP, *, launch: Any = None, folder: Path | None = None, **changes: Any
    ) -> Result:
        """Train on the digits, by default in the trial's folder, with these changes of quiet settings."""
        changes = {"cache_folder": self.marker.with_name("cache"), **changes}
        return train_in(folder or self.folder, hp, self.digits, launch=launch, **changes)

    def when_failing(self, action: Callable[[], object]) -> threading.Thread:
        """Call the action in a thread once the fault has happened; return the thread."""
        return when(self.marker, action)

    def signal_when_failing(self, number: signal.Signals = signal.SIGTERM) -> threading.Thread:
        """Send this process a signal once the fault has happened; return the thread that does so."""
        return self.when_failing(lambda: os.kill(os.getpid(), number))

    def seconds_since_fault(self) -> float:
        return time.time() - float(self.marker.read_text())


def starts(run: Path) -> list[dict[str, Any]]:
    """Return the records of how often and with what a run has started."""
    return [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "start"]


def close(here: Path, there: Path) -> bool:
    """Return whether the weights of two runs are equal but for rounding."""
    mine, other = weights(here), weights(there)
    return all(torch.allclose(mine[name], other[name], rtol=1e-3, atol=1e-5) for name in other)
