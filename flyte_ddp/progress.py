"""Show the progress of long work on stderr: a bar on a terminal, lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from flyte_ddp.formatting import format_measure, format_value, name_measure

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"
SHOWN_VALUES = 6  # of those that a function records; more do not fit on a line
MODES = ("auto", "bar", "lines", "off")  # auto: a bar if the stream is a terminal, else lines


class Progress:
    """Shows the progress of counted steps, in one of MODES (auto, bar, lines, off), on ``stream`` (default stderr).

    Turns itself off if the stream cannot be written to. For a bar replaces tqdm's lock in the whole process.
    """

    def __init__(self, mode: str = "auto", stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._mode = mode if mode != "auto" else "bar" if self._stream.isatty() else "lines"
        if self._mode == "bar":
            # tqdm's own lock is a semaphore shared between processes, which would stay behind when a rank is killed.
            tqdm.set_lock(threading.RLock())

    @contextmanager
    def track(self, label: str, total: int | None, unit: str) -> Iterator[Callable[[int], object]]:
        """Show a bar for the block, or a line at its start; yield a function that takes progress.

        The function takes the units done since its last call. ``total`` None: not known; the unit "B" stands for bytes.
        """
        if self._mode == "bar":
            with tqdm(total=total, desc=label, unit=unit, unit_scale=unit == "B", file=self._stream) as bar:
                yield bar.update
        else:
            amount = "size unknown" if total is None else format_size(total) if unit == "B" else f"{total:,} {unit}"
            self.print_note(f"{label} ({amount})")
            yield lambda _: None

    def print_note(self, text: str) -> None:
        """Print a text on a line of its own, above a bar, unless progress is off."""
        with self._turn_off_on_failure():
            if self._mode == "bar":
                tqdm.write(text, file=self._stream)
            elif self._mode == "lines":
                print(text, file=self._stream, flush=True)

    @contextmanager
    def _turn_off_on_failure(self) -> Iterator[None]:
        """Turn progress off if the block cannot write, as after ``| head``: that must not end the work."""
        try:
            yield
        except (OSError, ValueError):
            self._mode = "off"


def format_size(number: int) -> str:
    return f"{tqdm.format_sizeof(number)}B"


class StepProgress(Progress):
    """Decides when a run's steps are shown; its subclasses show them. ``clock`` returns seconds from any start.

    A bar is renewed every 0.1 s. Lines come at once, every two seconds, and then whenever the elapsed time has grown by
    30 %: 12 in the first minute, 28 in the first hour.
    """

    def __init__(self, mode: str, stream: TextIO | None, clock: Callable[[], float]) -> None:
        super().__init__(mode, stream)
        self._clock, self._start = clock, clock()
        self._next = 0.0  # when the next step is shown, in seconds from the start
        self._last_step = 0

    def is_due(self) -> bool:
        """Return whether ``show_step`` would show something; if not, a loss need not be copied from the device."""
        return self._mode != "off" and self._elapsed() >= self._next

    def _elapsed(self) -> float:
        return self._clock() - self._start

    def _schedule_next(self, now: float) -> None:
        self._next = now + 0.1 if self._mode == "bar" else max(1.3 * now, now + 2.0)


class TrainingProgress(StepProgress):
    """Shows a run's optimiser steps when they are due, and a line for each evaluation."""

    def __init__(
        self,
        mode: str,
        total_steps: int,
        steps_per_epoch: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(mode, stream, clock)
        self._total_steps, self._epochs = total_steps, -(-total_steps // steps_per_epoch)
        self._first: tuple[float, int] | None = None  # time of the first line, in seconds from the start, and its step
        self._values: dict[str, str] = {}  # the newest loss and rates, as texts
        if self._mode == "bar":
            with self._turn_off_on_failure():
                label = self._name_epoch(0)
                self._bar = tqdm(total=total_steps, desc=label, bar_format=BAR, file=self._stream, mininterval=0)

    def show_step(
        self, epoch: int, step: int, loss: float | None, samples_per_second: float | None, tokens: float | None = None
    ) -> None:
        """Store the values of a step, from 1; show them if :meth:`is_due`; for None shows the last known value.

        ``epoch`` counts from 0; the rates, samples and ``tokens`` a second, are those of all ranks.
        """
        self._last_step = step
        if loss is not None:
            self._values["loss"] = f"loss {loss:.4f}"
        for unit, rate in (("samples", samples_per_second), ("tokens", tokens)):
            if rate is not None:
                self._values[unit] = f"{rate:,.0f} {unit}/s"
        if not self.is_due():
            return
        now = self._elapsed()
        self._schedule_next(now)
        if self._mode == "bar":
            with self._turn_off_on_failure():
                self._bar.set_description_str(self._name_epoch(epoch), refresh=False)
                self._update_bar()
            return
        # The time left is estimated from the first line on, so that start-up and steps before a resume don't count.
        began, first_step = self._first = self._first or (now, step)
        parts = [f"{self._name_epoch(epoch)}, step {step:,}/{self._total_steps:,}", *self._values.values()]
        parts.append(f"{tqdm.format_interval(round(now))} elapsed")
        if step > first_step:
            left = (now - began) / (step - first_step) * (self._total_steps - step)
            parts.append(f"{tqdm.format_interval(round(left))} left")
        self.print_note(", ".join(parts))

    def print_evaluation(self, record: Mapping[str, Any], measure: str = "accuracy") -> None:
        """Print a line with a measure and the loss of an evaluation record of metrics.jsonl."""
        self._last_step = record["step"]
        results = []
        for split in ("validation", "test"):
            if f"{split}_loss" in record:
                shown = [format_measure(name, record[f"{split}_{name}"]) for name in (measure, "loss")]
                rest = "" if measure == "loss" else f" (loss {shown[1]})"
                results.append(f"{split} {name_measure(measure)} {shown[0]}{rest}".replace("\N{NO-BREAK SPACE}", " "))
        epoch = self._name_epoch(record["epoch"] - 1)  # records count the epochs that are done
        self.print_note(f"{epoch}, step {record['step']:,}/{self._total_steps:,}: {', '.join(results)}")

    def close(self) -> None:
        """Show the last step in the bar and end its line; may be called twice."""
        if self._mode == "bar":
            with self._turn_off_on_failure():
                self._update_bar()
                self._bar.close()

    def _name_epoch(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self._epochs}"

    def _update_bar(self) -> None:
        self._bar.set_postfix_str(", ".join(self._values.values()), refresh=False)
        self._bar.update(self._last_step - self._bar.n)


class FunctionProgress(StepProgress):
    """Shows the values that an own function records by step, when they are due, and the last step at :meth:`close`."""

    def __init__(self, mode: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(mode, stream, clock)
        self._first: tuple[float, int] | None = None  # time of the first step, in seconds from the start, and itself
        self._values: dict[str, float] = {}  # the newest of each name
        self._is_shown = True  # whether the last step and its values are
        self._bar: Any = None

    def show_step(self, step: int, values: Mapping[str, float]) -> None:
        """Store values of a step; show all names' newest ones, up to SHOWN_VALUES (6), if :meth:`is_due`."""
        if self._mode == "off":
            return
        self._last_step, self._is_shown = step, False
        self._values.update(values)
        if self._first is None:
            self._first = self._elapsed(), step
        if self.is_due():
            self._show_last_step()

    def close(self) -> None:
        """Show the last step, unless that was done, and end a bar's line; may be called twice."""
        if not self._is_shown:
            self._show_last_step()
        if self._mode == "bar" and self._bar is not None:
            with self._turn_off_on_failure():
                self._bar.close()

    def _show_last_step(self) -> None:
        now = self._elapsed()
        self._schedule_next(now)
        self._is_shown = True
        shown = [f"{name} {format_value(value)}" for name, value in [*self._values.items()][:SHOWN_VALUES]]
        parts = [f"step {self._last_step:,}", *shown]
        if len(self._values) > SHOWN_VALUES:
            parts.append(f"{len(self._values) - SHOWN_VALUES} more")
        began, first_step = self._first or (now, self._last_step)
        if self._last_step > first_step and now > began:  # without start-up, and steps before a resume
            rate = (self._last_step - first_step) / (now - began)
            parts.append(f"{rate:,.0f} steps/s" if rate >= 10 else f"{rate:.2g} steps/s")
        text = ", ".join([*parts, f"{tqdm.format_interval(round(now))} elapsed"])
        if self._mode != "bar":
            self.print_note(text)
            return
        with self._turn_off_on_failure():
            if self._bar is None:
                # With {bar}, which stays empty, tqdm cuts the text to the width of the terminal.
                self._bar = tqdm(desc=text, bar_format="{desc}{bar}", file=self._stream, mininterval=0)
            else:
                self._bar.set_description_str(text)
