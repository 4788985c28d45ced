"""Outcomes of tasks: printed at once, but for the last one of a command."""

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


def test_a_command_that_trains_anew_promises_no_resumption(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, mistake = RankError("rank 1 was killed", recoverable=True), RankError("rank 1: ValueError", recoverable=False)
    ended = [StoppedError("Ctrl-C", 85), KeyboardInterrupt(StoppedError("Ctrl-C", 85)), lost]
    assert ["the same command will" in outcomes.describe_ended_run(error) for error in ended] == [True] * 3
    monkeypatch.setattr(outcomes, "_trains_anew", True)
    texts = [outcomes.describe_ended_run(error) for error in (*ended, KeyboardInterrupt())]
    assert [text.partition("; ")[2] for text in texts] == ["the same command will train anew"] * 4
    assert outcomes.describe_ended_run(mistake) == "rank 1: ValueError"
