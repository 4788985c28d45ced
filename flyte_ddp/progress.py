"""Show the progress of long work on stderr: a bar on a terminal, lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"
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
        """Show a bar for the block, print a line at its start, or neither, by the mode; yield a function for progress.

        ``total`` is the number of units, None if it is not known; the unit "B" stands for bytes. The yielded function
        takes the number of units that were done since its last call.
        """
        if self._mode == "bar":
            with tqdm(total=total, desc=label, unit=unit, unit_scale=unit == "B", file=self._stream) as bar:
                yield bar.update
        else:
            amount = "size unknown" if total is None else format_size(total) if unit == "B" else f"{total:,} {unit}"
            self.print_note(f"{label} ({amount})")
            yield lambda _: None

    def print_note(self, text: str) -> None:
        """Print a text on a line of its own, above a bar, unless progress is off; a stream that fails turns it off."""
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
    """Return a number of bytes as a text such as "26.4MB"."""
    return f"{tqdm.format_sizeof(number)}B"


class TrainingProgress(Progress):
    """Shows a run's optimiser steps and evaluations, in one of MODES, on ``stream`` (default stderr).

    A bar is renewed every 0.1 s. Lines come at once, every two seconds, and then whenever the elapsed time has grown by
    30 %: 12 in the first minute, 28 in the first hour. Each evaluation has a line.
    """

    def __init__(
        self,
        mode: str,
        total_steps: int,
        steps_per_epoch: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(mode, stream)
        self._total_steps, self._epochs = total_steps, -(-total_steps // steps_per_epoch)
        self._clock, self._start = clock, clock()
        self._next = 0.0  # when the next step is shown, in seconds from the start
        self._first: tuple[float, int] | None = None  # time of the first line, in seconds from the start, and its step
        self._last_step = 0
        self._values: dict[str, str] = {}  # the newest loss and rate, as texts
        if self._mode == "bar":
            with self._turn_off_on_failure():
                label = self._name_epoch(0)
                self._bar = tqdm(total=total_steps, desc=label, bar_format=BAR, file=self._stream, mininterval=0)

    def is_due(self) -> bool:
        """Return whether :meth:`show_step` would show something; if not, a loss need not be copied from the device."""
        return self._mode != "off" and self._clock() - self._start >= self._next

    def show_step(self, epoch: int, step: int, loss: float | None, samples_per_second: float | None) -> None:
        """Store the values of step number ``step`` of the run; show them if :meth:`is_due`, and schedule the next time.

        ``epoch`` counts from 0, ``step`` from 1; the rate is that of all ranks. For None shows the last known value.
        """
        self._last_step = step
        if loss is not None:
            self._values["loss"] = f"loss {loss:.4f}"
        if samples_per_second is not None:
            self._values["rate"] = f"{samples_per_second:,.0f} samples/s"
        if not self.is_due():
            return
        now = self._clock() - self._start
        if self._mode == "bar":
            self._next = now + 0.1
            with self._turn_off_on_failure():
                self._bar.set_description_str(self._name_epoch(epoch), refresh=False)
                self._update_bar()
            return
        self._next = max(1.3 * now, now + 2.0)
        # The time left is estimated from the first line on, so that start-up and steps before a resume don't count.
        began, first_step = self._first = self._first or (now, step)
        parts = [f"{self._name_epoch(epoch)}, step {step:,}/{self._total_steps:,}", *self._values.values()]
        parts.append(f"{tqdm.format_interval(round(now))} elapsed")
        if step > first_step:
            left = (now - began) / (step - first_step) * (self._total_steps - step)
            parts.append(f"{tqdm.format_interval(round(left))} left")
        self.print_note(", ".join(parts))

    def print_evaluation(self, record: Mapping[str, Any]) -> None:
        """Print a line with the results of an evaluation record of metrics.jsonl, unless progress is off."""
        self._last_step = record["step"]
        results = [
            f"{split} accuracy {100 * record[f'{split}_accuracy']:.2f} % (loss {record[f'{split}_loss']:.4f})"
            for split in ("validation", "test")
            if f"{split}_accuracy" in record
        ]
        epoch = self._name_epoch(record["epoch"] - 1)  # records count the epochs that are done
        self.print_note(f"{epoch}, step {record['step']:,}/{self._total_steps:,}: {', '.join(results)}")

    def close(self) -> None:
        """Show the last step in the bar and end its line; may be called twice."""
        if self._mode == "bar":
            with self._turn_off_on_failure():
                self._update_bar()
                self._bar.close()

    def _name_epoch(self, epoch: int) -> str:
        """Return "epoch 1/3" for the epoch 0 of 3."""
        return f"epoch {epoch + 1}/{self._epochs}"

    def _update_bar(self) -> None:
        """Show the newest values and the last step in the bar."""
        self._bar.set_postfix_str(", ".join(self._values.values()), refresh=False)
        self._bar.update(self._last_step - self._bar.n)
