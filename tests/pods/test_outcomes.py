"""Outcomes of tasks: printed at once, but for the last one of a command."""

from pathlib import Path

import pytest

from flyte_ddp.core.errors import RankError, StoppedError
from flyte_ddp.pods import outcomes
from flyte_ddp.pods.outcomes import hold_last_outcome, print_held_outcome, print_outcome


def test_the_last_outcome_comes_after_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    print_outcome("alone")
    with hold_last_outcome():
        print_outcome("trained")
        print("waits")
        print_held_outcome()  # as the next task starts
        print_held_outcome()
        print_outcome("judged")
        print_outcome("promoted")
        print("outputs")
    print_outcome("afterwards")
    expected = ["alone", "waits", "trained", "judged", "outputs", "promoted", "afterwards"]
    assert capsys.readouterr().out.split() == expected


def test_an_error_comes_after_the_last_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with hold_last_outcome():
            print_outcome("judged")
            raise ValueError("alarm")

    with pytest.raises(ValueError, match="alarm"):
        fail()
    assert capsys.readouterr().out == "judged\n"


def test_a_command_that_trains_anew_promises_no_resumption(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing else of the text is lost."""
    lost, mistake = RankError("rank 1 was killed", recoverable=True), RankError("rank 1: ValueError", recoverable=False)
    lost.file = tmp_path / "details.txt"
    lost.step = 85
    ended = [StoppedError("Ctrl-C", 85), KeyboardInterrupt(StoppedError("Ctrl-C", 85)), lost, KeyboardInterrupt()]
    monkeypatch.setattr(outcomes, "_is_resumable", True)
    before = [outcomes.describe_ended_run(error) for error in ended]
    assert [text.count("the same command will go on after step 85") for text in before] == [1, 1, 1, 0]
    assert before[3] == "stopped by Ctrl-C; the same command will resume a training from its last checkpoint, if any"
    outcomes.note_resumability(False)
    after = [outcomes.describe_ended_run(error) for error in ended]
    assert after == [f"{text.partition('the same command')[0]}the same command will train anew" for text in before]
    assert "details.txt" in after[2]
    assert outcomes.describe_ended_run(mistake) == "rank 1: ValueError"
