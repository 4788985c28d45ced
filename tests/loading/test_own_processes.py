"""Processes that users' data sets start: by default handlers of signals, in ranks and in loader processes."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli import HELPERS
from training_runs import train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine import process
from flyte_ddp.datasets import fetch

REPEATED = [
    pytest.param(use, num_ranks, marks=pytest.mark.exhaustive)
    for use, num_ranks in (
        ("pool", 2),
        ("open_pool", 2),
        ("executor", 1),
        ("executor", 2),
        ("spawn", 1),
        ("spawn", 2),
        ("dataloader", 2),
        ("joblib", 2),
        ("subprocess", 1),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("use", "num_ranks"), [("pool", 1), ("open_pool", 1), ("joblib", 1), ("subprocess", 2), *REPEATED]
)
def test_a_data_set_may_start_processes(use: str, num_ranks: int, tmp_path: Path) -> None:
    """In the callable and in items. A set that hangs would hang the tests, so the training is another process."""
    command = [sys.executable, str(HELPERS / "own_processes.py"), use, str(num_ranks), str(tmp_path)]
    ended = subprocess.run(command, check=False, cwd=HELPERS, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "model.pt").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("user_models")
def test_a_set_that_divides_by_the_ranks_is_refused_by_its_cause(tmp_path: Path) -> None:
    hp = Hyperparameters(dataset="own_processes:dividing", model="window_tasks:linear", epochs=1, batch_size=8)
    data = fetch(hp.dataset, "", tmp_path / "data", progress="off")
    change = "has 9 and 4 samples now, .*had 17 and 8 samples"
    with pytest.raises(UserError, match=rf"{change} .*; its len\(\) depends on the 2 ranks"):
        train_in(tmp_path / "run", replace(hp, num_ranks=2), data)


def test_a_signal_that_comes_while_a_process_is_forked_is_not_lost() -> None:
    """Pool.terminate() sends one, and then waits for the process without a limit."""

    def send() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with process.use_signal_handlers({signal.SIGTERM: lambda *_: None}), process.undone_in_forks(send):
        child = os.fork()
        if child == 0:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint(process.SIGNALS)
