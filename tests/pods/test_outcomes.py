"""Outcomes of tasks: printed at once, but for the last one of a command."""

import pytest

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
