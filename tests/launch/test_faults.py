"""Ranks that die, hang or are told to stop, at any point, where they are spawned: beyond what all launchers promise."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_runs import HP, nothing_is_left, saved
from trials import Trial

from flyte_ddp.core.errors import RankError, StoppedError
from flyte_ddp.core.launch.supervise import supervisor


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
    words = r"^(ranks 0 and 1|rank [01]) waited for 2 s \(FLYTE_DDP_TIMEOUT\), in different collective"
    with pytest.raises(RankError, match=words) as caught:
        trial.train(replace(HP, strategy="shared_memory"), timeout=2.0)
    assert caught.value.recoverable
    assert "in own_asynchronous_collective" in caught.value.details


@pytest.mark.slow
def test_ctrl_c_saves_the_last_step(trial: Trial) -> None:
    """A rank hangs, so that the others sit in a collective, when the signal comes."""
    trial.inject("hang", rank=0)
    told = trial.signal_when_failing(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trial.train()
    told.join()
    assert trial.seconds_since_fault() < 15
    assert saved(trial.folder).step == 3
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
