"""Ranks that die, hang or are told to stop, at any point, where they are spawned: beyond what all launchers promise."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import faults
import pytest
from faulty_runs import HP, in_spawned_processes, nothing_is_left, saved, when

from flyte_ddp.errors import RankError, StoppedError
from flyte_ddp.launch.supervise import supervisor
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

pytestmark = pytest.mark.usefixtures("temporary")

QUIET = Settings(progress="off", wandb_mode="disabled")
RAISED = "ArithmeticError: the rank's own words"
again = pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "at", "rank", "words", "recoverable"),
    [
        ("SIGKILL", "checkpoint", 0, "rank 0 was killed by SIGKILL", True),
        pytest.param("SIGSEGV", "evaluation", 1, "rank 1 was killed by SIGSEGV", True, marks=again),
        pytest.param("SIGSEGV", "data", 0, "rank 0 was killed by SIGSEGV", True, marks=again),
        ("sys.exit", "training", 0, "rank 0: SystemExit: 0", False),
        ("os._exit", "evaluation", 0, "rank 0 ended with exit code 0 before it had finished", False),
        ("KeyboardInterrupt", "training", 1, "rank 1: KeyboardInterrupt", False),
        pytest.param("ArithmeticError", "import", 1, f"rank 1: {RAISED}", False, marks=again),
        pytest.param("ArithmeticError", "evaluation", 1, f"rank 1: {RAISED}", False, marks=again),
    ],
)
def test_a_rank_that_fails_is_named_and_takes_the_others_along(
    digits: Path,
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    at: str,
    rank: int,
    words: str,
    recoverable: bool,
) -> None:
    marker = tmp_path / "marker"
    faults.inject(monkeypatch, marker, rank=rank, at=at, kind=kind)
    with pytest.raises(RankError, match=f"(?s){words}") as caught:
        run_training(HP, digits, tmp_path / "run", QUIET)
    assert time.time() - float(marker.read_text()) < 15
    assert caught.value.recoverable == recoverable
    nothing_is_left(tmp_path / "run", temporary)


@pytest.mark.cold
def test_a_failed_import_is_told(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a process group, or torch."""
    broken = tmp_path / "site"
    (broken / "torch").mkdir(parents=True)
    (broken / "torch/__init__.py").write_text("raise OSError('libcudart.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(broken)
    with pytest.raises(RankError, match=r"rank \d: OSError: libcudart.so: cannot open"):
        run_training(HP, digits, tmp_path / "run", QUIET)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"), [("shared_memory", "hang"), pytest.param("ddp", "hang in C", marks=again)]
)
def test_a_rank_that_hangs_is_named_with_its_stack(
    digits: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, kind: str
) -> None:
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind=kind, **{"pass": 3})
    with pytest.raises(RankError) as caught:
        run_training(replace(HP, strategy=strategy, num_ranks=3), digits, tmp_path / "run", replace(QUIET, timeout=3.0))
    assert caught.value.recoverable
    said = str(caught.value)
    assert re.match(r"rank 1 did not come where (ranks 0 and 2|rank [02]) waited for 3 s \(FLYTE_DDP_TIMEOUT\)", said)
    assert 'faults.py", line' in said
    assert f"in {'hang_in_c' if kind == 'hang in C' else 'hang'}" in said
    found = saved(tmp_path / "run")
    assert found is not None
    assert found.step == 3, "what was done before is saved"
    nothing_is_left(tmp_path / "run", temporary)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own collective", "own asynchronous collective"])
def test_a_users_own_collective_that_nobody_else_comes_to_is_a_hang(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The other rank waits for this one, in another place."""
    faults.inject(monkeypatch, tmp_path / "marker", rank=0, at="training", kind=kind, **{"pass": 3})
    settings = replace(QUIET, timeout=2.0)
    with pytest.raises(RankError) as caught:
        run_training(replace(HP, strategy="shared_memory"), digits, tmp_path / "run", settings)
    assert caught.value.recoverable
    all_waited = "all ranks waited for each other for 2 s, in different places"
    one_waited = r"rank [01] waited in vain for 2 s \(FLYTE_DDP_TIMEOUT\); rank [01] came too late, or waited elsewhere"
    assert re.match(f"{all_waited}|{one_waited}", caught.value.message)
    assert f"in {kind.replace(' ', '_')}" in caught.value.details


@pytest.mark.slow
def test_a_users_own_collective_that_cannot_be_is_no_hang(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="own wrong collective")
    with pytest.raises(RankError, match=r"^rank 1: RuntimeError: Invalid scalar type") as caught:
        run_training(HP, digits, tmp_path / "run", QUIET)
    assert "in own_wrong_collective" in caught.value.details
    assert not caught.value.recoverable


HANGS_EARLY = """
from flyte_ddp.launch.supervise import rank_process
run_and_report = rank_process.run_and_report
def hang_at_the_start(info, link):
    while info.rank == int(os.environ["HANGS_EARLY"]):
        time.sleep(0.01)
    return run_and_report(info, link)
rank_process.run_and_report = hang_at_the_start
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=again)])
def test_a_rank_that_hangs_before_there_is_a_process_group(
    digits: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    in_spawned_processes(monkeypatch, tmp_path, HANGS_EARLY)
    monkeypatch.setenv("HANGS_EARLY", str(rank))
    with pytest.raises(RankError) as caught:
        run_training(HP, digits, tmp_path / "run", replace(QUIET, timeout=1.0))
    assert f"rank {rank} did not come where rank {1 - rank} waited for 1 s" in str(caught.value)
    assert "in hang_at_the_start" in str(caught.value)
    assert caught.value.recoverable
    nothing_is_left(tmp_path / "run", temporary)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "rank"),
    [
        pytest.param("training", 0, marks=again),
        ("training", 1),
        pytest.param("evaluation", 1, marks=again),
        ("checkpoint", 0),
        ("results", 0),
    ],
)
def test_sigterm_saves_the_last_step_wherever_the_ranks_are(
    digits: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, at: str, rank: int
) -> None:
    """A rank hangs, so that the others sit in a collective, when SIGTERM comes."""
    marker = tmp_path / "marker"
    settings = replace(QUIET, save_seconds=1.0) if at == "checkpoint" else QUIET  # there nothing can be saved
    faults.inject(monkeypatch, marker, rank=rank, at=at, kind="hang", **{"pass": 3 if at == "training" else 0})
    told = when(marker, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError) as caught:
        run_training(HP, digits, tmp_path / "run", settings)
    told.join()
    assert time.time() - float(marker.read_text()) < 15
    found = saved(tmp_path / "run")
    if at != "checkpoint":
        assert found is not None
        assert found.step == {"training": 3, "evaluation": 14, "results": 20}[at]
        assert f"the same run will go on after step {found.step}, which is saved" in caught.value.message
    nothing_is_left(tmp_path / "run", temporary)


@pytest.mark.slow
def test_the_last_checkpoint_has_the_time_that_there_is(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is another than after a failure, where rank 0 may wait for one that is gone."""
    monkeypatch.setattr(supervisor, "SAVE_SECONDS", 0.01)
    faults.inject(monkeypatch, tmp_path / "marker", rank=0, at="checkpoint", kind="slow")
    told = when(tmp_path / "marker", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError, match=r"the same run will go on after step \d+, which is saved"):
        run_training(HP, digits, tmp_path / "run", QUIET)
    told.join()


@pytest.mark.slow
def test_a_rank_hands_sigterm_on(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is sent to all processes of a job, or to any one of them."""
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="SIGTERM", **{"pass": 3})
    with pytest.raises(StoppedError, match=r"stopped by SIGTERM; the same run will go on after step \d+"):
        run_training(HP, digits, tmp_path / "run", QUIET)


@pytest.mark.slow
def test_other_signals_are_the_users_own(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="SIGALRM")
    run_training(HP, digits, tmp_path / "run", QUIET)
    assert (tmp_path / "marker").exists()


@pytest.mark.slow
def test_sigterm_before_the_first_step(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.inject(monkeypatch, tmp_path / "marker", rank=0, at="training", kind="hang")
    told = when(tmp_path / "marker", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError, match="will restart from scratch, as there is no checkpoint yet"):
        run_training(HP, digits, tmp_path / "run", QUIET)
    told.join()


@pytest.mark.slow
def test_ctrl_c_saves_too(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.inject(monkeypatch, tmp_path / "marker", rank=0, at="training", kind="hang", **{"pass": 3})
    told = when(tmp_path / "marker", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run_training(HP, digits, tmp_path / "run", QUIET)
    told.join()
    found = saved(tmp_path / "run")
    assert found is not None
    assert found.step == 3
