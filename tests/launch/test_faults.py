"""Ranks that die, hang or are told to stop, at any point, where they are spawned: beyond what all launchers promise."""

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from faulty_runs import HP, in_spawned_processes, nothing_is_left, saved
from trials import Trial

from flyte_ddp.errors import RankError, StoppedError
from flyte_ddp.launch.supervise import supervisor

again = pytest.mark.exhaustive


@pytest.mark.cold
def test_a_failed_import_is_told(trial: Trial, tmp_path: Path) -> None:
    """Before there is a process group, or torch."""
    broken = tmp_path / "site"
    (broken / "torch").mkdir(parents=True)
    (broken / "torch/__init__.py").write_text("raise OSError('libcudart.so: cannot open shared object file')\n")
    trial.patch.syspath_prepend(broken)
    with pytest.raises(RankError, match=r"rank \d: OSError: libcudart.so: cannot open"):
        trial.train()


@pytest.mark.slow
def test_a_users_own_collective_that_nobody_else_comes_to_is_a_hang(trial: Trial) -> None:
    """The other rank waits for this one, in another place."""
    trial.inject("own asynchronous collective", rank=0)
    words = (
        r"^(ranks 0 and 1|rank [01]) waited for 2 s \(FLYTE_DDP_TIMEOUT\), in different places or at"
    )
    with pytest.raises(RankError, match=words) as caught:
        trial.train(replace(HP, strategy="shared_memory"), timeout=2.0)
    assert caught.value.recoverable
    assert "in own_asynchronous_collective" in caught.value.details


HANGS_EARLY = """
from flyte_ddp.launch.supervise import rank_process
run_and_report = rank_process.run_and_report
def hang_at_the_start(info, link):
    while info.rank == 0:
        time.sleep(0.01)
    return run_and_report(info, link)
rank_process.run_and_report = hang_at_the_start
"""


@pytest.mark.slow
def test_a_rank_that_hangs_before_there_is_a_process_group(trial: Trial, tmp_path: Path) -> None:
    in_spawned_processes(trial.patch, tmp_path, HANGS_EARLY)
    words = r"(?s)rank 0 did not come where rank 1 waited for 1 s.*in hang_at_the_start"
    with pytest.raises(RankError, match=words) as caught:
        trial.train(timeout=1.0)
    assert caught.value.recoverable
    nothing_is_left(trial.folder, trial.temporary)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "rank", "after", "step", "number"),
    [
        ("training", 0, 3, 3, signal.SIGINT),
        pytest.param("training", 0, 0, 0, signal.SIGTERM, marks=again),  # before the first step
        pytest.param("checkpoint", 0, 0, None, signal.SIGTERM, marks=again),  # there nothing can be saved
    ],
)
def test_a_signal_saves_the_last_step_wherever_the_ranks_are(
    trial: Trial, at: str, rank: int, after: int, step: int | None, number: signal.Signals
) -> None:
    """A rank hangs, so that the others sit in a collective, when the signal comes."""
    trial.inject("hang", rank, at, after)
    told = trial.signal_when_failing(number)
    where = f"will go on after step {step}, which is saved" if step else "will restart from scratch, as there is no"
    error = pytest.raises(StoppedError, match=None if step is None else where)
    with error if number == signal.SIGTERM else pytest.raises(KeyboardInterrupt):
        trial.train(save_seconds=1.0 if step is None else 30.0)
    told.join()
    assert trial.seconds_since_fault() < 15
    assert step is None or (saved(trial.folder) or SimpleNamespace(step=0)).step == step
    nothing_is_left(trial.folder, trial.temporary)


@pytest.mark.slow
def test_the_last_checkpoint_has_the_time_that_there_is(trial: Trial) -> None:
    """Which is another than after a failure, where rank 0 may wait for one that is gone."""
    trial.patch.setattr(supervisor, "SAVE_AFTER_FAILURE_SECONDS", 0.01)
    trial.inject("slow", rank=0, at="checkpoint", after=0)
    told = trial.signal_when_failing()
    with pytest.raises(StoppedError, match=r"the same run will go on after step \d+, which is saved"):
        trial.train()
    told.join()
