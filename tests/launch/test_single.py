"""One rank in this process: without another process, and otherwise the same."""

import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path

import faults
import numpy as np
import pytest
import torch
from cli import HELPERS
from faulty_runs import HP as TWO_RANKS
from faulty_runs import equal, saved
from kept_checkpoints import IDENTITY
from training_runs import train_in
from trials import Trial

from flyte_ddp.core.errors import RankError, StoppedError
from flyte_ddp.core.launch import single, spawn
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs.run_folder import OUTPUTS
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.settings import Settings

HP = replace(TWO_RANKS, num_ranks=1)


def draws() -> tuple[object, ...]:
    """What the process would draw next, which is put back."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    drawn = torch.rand(()).item(), random.random(), np.random.random()  # noqa: NPY002
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
    return drawn


def inject_here(trial: Trial, kind: str) -> None:
    """Let a fault happen in this process after three steps."""
    fault = {"rank": 0, "at": "training", "kind": kind, "pass": 3, "marker": trial.marker}
    trial.patch.setattr(faults, "FAULT", fault)
    trial.patch.setattr(faults, "passed", {})


@pytest.fixture(scope="module")
def expected(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one spawned rank, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)
        patch.setenv("TMPDIR", str(folder))
        return train_in(folder / "run", HP, digits, launch=spawn.launch).run_folder


def test_a_stop_that_comes_as_the_work_ends_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has not saved yet when the block ends."""
    asked, ended, join = threading.Event(), threading.Event(), threading.Thread.join

    def save(_: float) -> int:
        asked.set()
        ended.wait()
        return 7

    def end_and_join(thread: threading.Thread) -> None:
        ended.set()
        join(thread)

    monkeypatch.setattr(threading.Thread, "join", end_and_join)
    work = Work("", None, Request(1), tmp_path, IDENTITY, Settings())

    def be_stopped_at_the_end() -> None:
        with single.stop_with_checkpoint(work) as offer_saving:
            offer_saving(save)
            os.kill(os.getpid(), signal.SIGTERM)
            asked.wait()

    with pytest.raises(StoppedError) as caught:
        be_stopped_at_the_end()
    assert caught.value.step == 7


@pytest.mark.slow
def test_the_same_weights_as_from_a_spawned_rank(expected: Path, trial: Trial) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    before = draws()
    trial.train(replace(HP, deterministic=True))
    assert draws() == before
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    torch.set_num_threads(threads)
    assert equal(expected, trial.folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(expected: Path, trial: Trial, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    inject_here(trial, "signal")
    trial.patch.setitem(faults.KINDS, "signal", lambda: os.kill(os.getpid(), number))
    with pytest.raises(StoppedError if number == signal.SIGTERM else KeyboardInterrupt):
        trial.train(HP)
    assert signal.getsignal(number) is before
    assert saved(trial.folder).step >= 3
    assert not [name for name in OUTPUTS if (trial.folder / name).exists()]
    trial.train(HP)
    assert equal(expected, trial.folder)


@pytest.mark.parametrize(
    ("kind", "words", "cause"),
    [
        ("ArithmeticError", "rank 0: ArithmeticError: the rank's own words", ArithmeticError),
        ("sys.exit", "rank 0 ended with exit code 0 before it had finished", SystemExit),
    ],
)
def test_a_failure_is_told_with_its_cause(trial: Trial, kind: str, words: str, cause: type[BaseException]) -> None:
    inject_here(trial, kind)
    with pytest.raises(RankError, match=words) as caught:
        trial.train(HP)
    assert isinstance(caught.value.__cause__, cause)


def test_more_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_ranks=2: at most one rank"):
        single.launch(Work("", None, Request(2), tmp_path, IDENTITY, Settings()))
