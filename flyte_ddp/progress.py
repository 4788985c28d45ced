"""What a person sees of long work, on standard error: a bar on a terminal, lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"
MODES = ("auto", "bar", "lines", "off")


class Progress:
    """Shows how far work has come.

    Args:
        mode: bar, lines, off, or auto (a bar if the stream is a terminal, else lines).
        stream: what to write to; standard error if None.
    """

    def __init__(self, mode: str = "auto", stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._mode = mode if mode != "auto" else "bar" if self._stream.isatty() else "lines"
        if self._mode == "bar":
            # tqdm's own lock is a semaphore shared between processes, which a killed rank would leave behind.
            tqdm.set_lock(threading.RLock())

    @contextmanager
    def track(self, label: str, total: int | None, unit: str) -> Iterator[Callable[[int], object]]:
        """Yield the function to call with each further number of ``unit`` done; ``total`` is None if it is unknown."""
        if self._mode == "bar":
            with tqdm(total=total, desc=label, unit=unit, unit_scale=unit == "B", file=self._stream) as bar:
                yield bar.update
        else:
            amount = "size unknown" if total is None else size(total) if unit == "B" else f"{total:,} {unit}"
            self.note(f"{label} ({amount})")
            yield lambda _: None

    def note(self, text: str) -> None:
        """Write a text on a line of its own."""
        with self._while_somebody_reads():
            if self._mode == "bar":
                tqdm.write(text, file=self._stream)
            elif self._mode == "lines":
                print(text, file=self._stream, flush=True)

    @contextmanager
    def _while_somebody_reads(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):  # as after `| head`; what cannot be shown must not end the work
            self._mode = "off"


def size(number: int) -> str:
    """Return bytes as people read them: 26.4MB."""
    return f"{tqdm.format_sizeof(number)}B"


class TrainingProgress(Progress):
    """Shows steps and evaluations of a run.

    Lines come at once, every two seconds, and then whenever the time has grown by 30 %: 12 in a minute, 28 in an hour.
    Each evaluation has a line.

    Args:
        mode: as of :class:`Progress`; ``stream`` likewise.
        total_steps: optimiser steps of the whole run.
        steps_per_epoch: optimiser steps of one epoch.
        clock: returns seconds, from any origin.
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
        self._first: tuple[float, int] | None = None  # when and at which step the first line came
        self._last_step = 0
        self._values: dict[str, str] = {}
        if self._mode == "bar":
            with self._while_somebody_reads():
                self._bar = tqdm(
                    total=total_steps, desc=self._epoch(0), bar_format=BAR, file=self._stream, mininterval=0
                )

    def due(self) -> bool:
        """Return whether :meth:`step` would show something now: only then is a loss worth fetching from a device."""
        return self._mode != "off" and self._elapsed() >= self._next

    def step(self, epoch: int, step: int, loss: float | None, samples_per_second: float | None) -> None:
        """Take in a finished step, and show it if that is due.

        Args:
            epoch: counted from 0.
            step: steps done so far, over all epochs.
            loss: None if it is not known: the last one is shown again; ``samples_per_second`` likewise.
            samples_per_second: of all ranks together.
        """
        self._last_step = step
        if loss is not None:
            self._values["loss"] = f"loss {loss:.4f}"
        if samples_per_second is not None:
            self._values["rate"] = f"{samples_per_second:,.0f} samples/s"
        if not self.due():
            return
        now = self._elapsed()
        if self._mode == "bar":
            self._next = now + 0.1
            with self._while_somebody_reads():
                self._bar.set_description_str(self._epoch(epoch), refresh=False)
                self._move_bar()
            return
        self._next = max(1.3 * now, now + 2.0)
        # The time left is told from the first line on, so that start-up and the steps before a resume don't count.
        began, first_step = self._first = self._first or (now, step)
        parts = [f"{self._epoch(epoch)}, step {step:,}/{self._total_steps:,}", *self._values.values()]
        parts.append(f"{tqdm.format_interval(round(now))} elapsed")
        if step > first_step:
            left = (now - began) / (step - first_step) * (self._total_steps - step)
            parts.append(f"{tqdm.format_interval(round(left))} left")
        self.note(", ".join(parts))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Show an evaluation record of metrics.jsonl (its ``epoch``: epochs done so far)."""
        self._last_step = record["step"]
        results = [
            f"{split} accuracy {100 * record[f'{split}_accuracy']:.2f} % (loss {record[f'{split}_loss']:.4f})"
            for split in ("validation", "test")
            if f"{split}_accuracy" in record
        ]
        epoch = self._epoch(record["epoch"] - 1)
        self.note(f"{epoch}, step {record['step']:,}/{self._total_steps:,}: {', '.join(results)}")

    def close(self) -> None:
        """Leave the terminal in order; may be called twice."""
        if self._mode == "bar":
            with self._while_somebody_reads():
                self._move_bar()
                self._bar.close()

    def _elapsed(self) -> float:
        return self._clock() - self._start

    def _epoch(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self._epochs}"

    def _move_bar(self) -> None:
        self._bar.set_postfix_str(", ".join(self._values.values()), refresh=False)
        self._bar.update(self._last_step - self._bar.n)
