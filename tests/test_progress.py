"""What a run shows on stderr: a bar on a terminal, lines elsewhere."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TextIO

import pytest

from flyte_ddp.core.progress import Progress, StepProgress


class Clock:
    """Time as the test sets it; it starts anywhere."""

    def __init__(self) -> None:
        self.now = 12345.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def clock_of_progress(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("flyte_ddp.core.progress.time", SimpleNamespace(monotonic=clock))
    return clock


def start_progress(stream: TextIO, mode: str, *steps: int) -> StepProgress:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        return StepProgress(mode, *steps)


TEST = {"test": {"loss": 0.5, "accuracy": 0.875}}


def test_the_first_lines_come_soon_and_then_ever_more_slowly(clock: Clock) -> None:
    stream = io.StringIO()
    progress = start_progress(stream, "lines", 481, 481)
    times = []
    for step in range(1, 482):
        clock.now = 12345.0 + (step - 1) / 8
        told, due = stream.tell(), progress.is_due()
        progress.show_step(step, {"loss": 1.0})
        assert (stream.tell() > told) == due
        times += [clock.now - 12345.0] if due else []
    # Each the first eighth of a second at or after max(last + 2, last * 1.3), worked out by hand.
    assert times == [0, 2, 4, 6, 8, 10.5, 13.75, 17.875, 23.25, 30.25, 39.375, 51.25]


def test_a_line_tells_where_the_run_is_and_when_it_ends(clock: Clock) -> None:
    stream = io.StringIO()
    progress = start_progress(stream, "lines", 1266, 422)
    clock.now += 10  # start-up, which must not count for the time that is left
    progress.show_step(20, {"loss": "loss 0.9012", "samples": "17,000 samples/s"})
    clock.now += 4
    progress.show_step(440, {})
    progress.print_evaluation(844, {"validation": {"loss": 0.25, "accuracy": 0.901}, **TEST})
    progress.print_evaluation(1266, TEST)
    assert stream.getvalue().splitlines() == [
        "epoch 1/3, step 20/1,266, loss 0.9012, 17,000 samples/s, 00:10 elapsed",
        # 420 steps in 4 s, 826 to go: 7.87 s
        "epoch 2/3, step 440/1,266, loss 0.9012, 17,000 samples/s, 00:14 elapsed, 00:08 left",
        "epoch 2/3, step 844/1,266: validation accuracy 90.10 % (loss 0.2500), test accuracy 87.50 % (loss 0.5000)",
        "epoch 3/3, step 1,266/1,266: test accuracy 87.50 % (loss 0.5000)",
    ]


@pytest.mark.usefixtures("clock")
def test_without_a_terminal_there_are_lines_or_nothing() -> None:
    for mode, lines in (("auto", 2), ("off", 0)):
        stream = io.StringIO()
        progress = start_progress(stream, mode, 10, 5)
        assert progress.is_due() == (mode == "auto")
        progress.show_step(1, {"loss": 1.0})
        progress.print_evaluation(5, TEST)
        progress.close()
        assert stream.getvalue().count("\n") == lines


def on_terminal(show: Callable[[TextIO], object]) -> str:
    """Return what ``show`` prints to a terminal."""
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        show(terminal)
    output = b""
    with contextlib.suppress(OSError):  # how the end of what was written to a terminal shows
        while part := os.read(reader, 65536):
            output += part
    os.close(reader)
    return output.decode()


def show_training(clock: Clock, stream: TextIO) -> None:
    progress = start_progress(stream, "auto", 40, 20)
    for step in range(1, 41):
        clock.now += 0.02
        progress.show_step(step, {"loss": f"loss {1 / step:.4f}", "samples": "17,000 samples/s"})
        if step % 20 == 0:
            progress.print_evaluation(step, TEST)
    progress.close()


def test_a_terminal_gets_a_bar_and_the_evaluations_above_it(clock: Clock) -> None:
    output = on_terminal(partial(show_training, clock))
    states = [part for part in output.split("\r") if "steps [" in part]
    assert "0/40 steps" in states[0]
    for words in ("40/40 steps", "epoch 2/2: 100%", "17,000 samples/s"):
        assert words in states[-1]
    assert 0.8 / 0.1 <= len(states) <= 20  # not one for each step: a terminal is slow
    for epoch in (1, 2):
        assert f"epoch {epoch}/2, step {epoch * 20}/40: test accuracy 87.50 % (loss 0.5000)" in output
    assert output.endswith("\n")


def test_a_function_shows_the_newest_of_its_values_when_it_is_due_and_at_its_end(clock: Clock) -> None:
    stream = io.StringIO()
    progress = start_progress(stream, "lines")
    clock.now += 10
    progress.show_step(1000, {"loss": 2.30258})
    clock.now += 1  # not due
    progress.show_step(1100, {"loss": 1.5})
    progress.show_step(1100, {"accuracy": 0.91})
    assert not progress.is_due()
    clock.now += 3
    progress.print_note("a note")
    progress.show_step(1140, {"loss": 0.41234})
    clock.now += 5
    progress.show_step(1141, {"accuracy": float("nan")})
    progress.show_step(1142, {})  # not shown until the end
    clock.now += 1
    progress.close()
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 1,000, loss 2.303, 00:10 elapsed",
        "a note",
        "step 1,140, loss 0.4123, accuracy 0.91, 35 steps/s, 00:14 elapsed",  # 140 steps in 4 s
        "step 1,141, loss 0.4123, accuracy nan, 16 steps/s, 00:19 elapsed",
        "step 1,142, loss 0.4123, accuracy nan, 14 steps/s, 00:20 elapsed",
    ]


class Closed(io.StringIO):
    """A pipe whose reader has gone, as after ``| head``."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a half-made bar, until tqdm 4.70
@pytest.mark.parametrize("mode", ["bar", "lines"])
def test_work_goes_on_when_nobody_reads_any_more(mode: str) -> None:
    progress = start_progress(Closed(), mode, 10, 5)
    for step in range(1, 11):
        progress.show_step(step, {"loss": 1.0})
    progress.print_evaluation(5, TEST)
    progress.close()


@pytest.mark.parametrize("mode", ["lines", "bar"])
def test_names_of_others_do_not_steer_the_terminal(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(mode)
    progress.print_note("classes (a\x1b[31mred 12, b\r\x9bc 3)\nüber\tnext")
    with progress.track("read\x1b[2J", 3, "files"):
        pass
    said = capsys.readouterr().err
    assert "classes (a\\x1b[31mred 12, b\\r\\x9bc 3)\nüber\tnext\n" in said
    assert "read\\x1b[2J" in said
    assert not {"\x1b", "\x9b"} & {*said.replace("\x1b[A", "")}
