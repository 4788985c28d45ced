"""Progress of long work on stderr, as a bar on a terminal and as lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from flyte_ddp.core.text.formatting import escape_controls, format_measure, format_value, name_measure

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"
SHOWN_VALUES = 6  # recorded by a function; more do not fit on a line
MODES = ("auto", "bar", "lines", "off")  # auto: a bar if the stream is a terminal, else lines


class Progress:
    """Shows the progress of counted steps on stderr, in one of MODES (auto, bar, lines, off).

    Turns itself off if the stream cannot be written to. In mode bar, replaces tqdm's lock in the whole process.
    """

    def __init__(self, mode: str = "auto") -> None:
        self._stream = sys.stderr
        self._mode = mode if mode != "auto" else "bar" if self._stream.isatty() else "lines"
        if self._mode == "bar":
            # tqdm's lock is a semaphore shared between processes, which would remain when a rank is killed.
            tqdm.set_lock(threading.RLock())

    @contextmanager
    def track(self, label: str, total: int | None, unit: str) -> Iterator[Callable[[int], object]]:
        """Show a progress bar during the block, or a line at the start of the block.

        Yields a function. Call the function with the number of units that are done since the last call.

        Args:
            label: The text before the bar, or in the line.
            total: The number of units (None: unknown).
            unit: The name of the unit. "B" stands for bytes.
        """
        if self._mode == "bar":
            label, scaled = escape_controls(label), unit == "B"
            with tqdm(total=total, desc=label, unit=unit, unit_scale=scaled, file=self._stream) as bar:
                yield bar.update
        else:
            amount = None if total is None else f"{tqdm.format_sizeof(total)}B" if unit == "B" else f"{total:,} {unit}"
            self.print_note(f"{label} ({amount or 'size unknown'})")
            yield lambda _: None

    def print_note(self, text: str) -> None:
        """Print a text to stderr on a separate line, above the bar, unless progress is off.

        If the text cannot be written, turns progress off.
        """
        text = escape_controls(text)
        with self._turn_off_on_failure():
            if self._mode == "bar":
                tqdm.write(text, file=self._stream)
            elif self._mode == "lines":
                print(text, file=self._stream, flush=True)

    @contextmanager
    def _turn_off_on_failure(self) -> Iterator[None]:
        """Turn progress off if the block cannot write to stderr, as after ``| head``. Then raises no error."""
        try:
            yield
        except (OSError, ValueError):
            self._mode = "off"


class StepProgress(Progress):
    """Shows the step and the newest values of a run when due.

    A bar is renewed every 0.1 s. Lines come at once, then every two seconds, and later whenever the elapsed time has
    grown by 30 %. These are 12 lines in the first minute, and 28 in the first hour. For a user-defined function
    ``total_steps`` is 0.
    """

    def __init__(self, mode: str, total_steps: int = 0, steps_per_epoch: int = 1) -> None:
        super().__init__(mode)
        self._total_steps, self._steps_per_epoch = total_steps, steps_per_epoch
        self._start = time.monotonic()
        self._next = 0.0  # when the next step is shown, in seconds from the start
        self._first: tuple[float, int] | None = None  # seconds from the start to the first step, and its number
        self._last_step, self._is_shown = 0, True  # the last step, and whether it and its values were shown
        self._values: dict[str, float | str] = {}  # the newest of each name
        self._bar: Any = None

    def is_due(self) -> bool:
        """Return whether ``show_step`` would show a step now. If not, a loss need not be copied from the device."""
        return self._mode != "off" and self._elapsed() >= self._next

    def show_step(self, step: int, values: Mapping[str, float | str]) -> None:
        """Store a step (from 1) and values by name, and show step and values if due.

        Numbers are shown as "name 0.41", and texts without the name. Names that are not in ``values`` keep the
        values of earlier steps. Shows at most 6 names (SHOWN_VALUES).
        """
        if self._mode == "off":
            return
        self._last_step, self._is_shown = step, False
        self._values.update(values)
        if self._first is None:
            self._first = self._elapsed(), step
        if self.is_due():
            self._show_last_step()

    def print_evaluation(self, step: int, measures: Mapping[str, Mapping[str, float]], main: str = "accuracy") -> None:
        """Print the main measure and the loss of each split that has a loss, to stderr.

        Prints nothing if progress is off. ``measures`` are by split, and then by name.
        """
        results = []
        for split, found in measures.items():
            if "loss" in found:
                shown = [format_measure(name, found[name]) for name in (main, "loss")]
                rest = "" if main == "loss" else f" (loss {shown[1]})"
                results.append(f"{split} {name_measure(main)} {shown[0]}{rest}".replace("\N{NO-BREAK SPACE}", " "))
        self._is_shown = self._is_shown or self._mode == "lines"  # the printed line names the step
        self.print_note(f"{self._describe_place(step)}: {', '.join(results)}")

    def close(self) -> None:
        """Show the last step if it was not shown, and end the bar's line. May be called twice."""
        if not self._is_shown:
            self._show_last_step()
        if self._mode == "bar" and self._bar is not None:
            with self._turn_off_on_failure():
                self._bar.close()

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _show_last_step(self) -> None:
        """Show the last step, and set when the next step is due."""
        now = self._elapsed()
        self._next = now + 0.1 if self._mode == "bar" else max(1.3 * now, now + 2.0)
        self._is_shown = True
        if self._mode != "bar":
            self.print_note(self._describe_step(now))
            return
        with self._turn_off_on_failure():
            if self._bar is None:
                # With {bar}, which stays empty, tqdm cuts the text to the width of the terminal.
                form = BAR if self._total_steps else "{desc}{bar}"
                self._bar = tqdm(total=self._total_steps or None, bar_format=form, file=self._stream, mininterval=0)
            text = self._name_epoch(self._last_step) if self._total_steps else self._describe_step(now)
            self._bar.set_description_str(text, refresh=not self._total_steps)
            if self._total_steps:
                self._bar.set_postfix_str(", ".join(self._list_values()), refresh=False)
                self._bar.update(self._last_step - self._bar.n)

    def _describe_step(self, now: float) -> str:
        """Return the last step, its values, the speed and the remaining time as text.

        ``now`` is the time since the start in seconds.
        """
        began, first_step = self._first or (now, self._last_step)
        done, seconds = self._last_step - first_step, now - began  # without start-up and the steps before a resume
        rate, left = [], []
        if done > 0 and self._total_steps:
            remaining = seconds / done * (self._total_steps - self._last_step)
            left.append(f"{tqdm.format_interval(round(remaining))} left")
        elif done > 0 and seconds > 0:
            rate.append(f"{done / seconds:,.0f} steps/s" if done >= 10 * seconds else f"{done / seconds:.2g} steps/s")
        elapsed = f"{tqdm.format_interval(round(now))} elapsed"
        return ", ".join([self._describe_place(self._last_step), *self._list_values(), *rate, elapsed, *left])

    def _describe_place(self, step: int) -> str:
        text = f"step {step:,}"
        return f"{self._name_epoch(step)}, {text}/{self._total_steps:,}" if self._total_steps else text

    def _name_epoch(self, step: int) -> str:
        epoch, epochs = (-(-steps // self._steps_per_epoch) for steps in (step, self._total_steps))
        return f"epoch {epoch}/{epochs}"

    def _list_values(self) -> list[str]:
        shown = [*self._values.items()][:SHOWN_VALUES]
        texts = [value if isinstance(value, str) else f"{name} {format_value(value)}" for name, value in shown]
        more = len(self._values) - len(shown)
        return [*texts, f"{more} more"] if more else texts
