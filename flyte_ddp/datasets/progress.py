"""How far a fetch has come, on stderr: a bar on a terminal, a plain line for each file elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

MODES = ("auto", "bar", "lines", "off")


@dataclass(frozen=True)
class Progress:
    """``mode``: bar, lines, off, or auto (a bar if stderr is a terminal, else lines)."""

    mode: str = "auto"

    @property
    def shown(self) -> str:
        """The mode with ``auto`` decided."""
        if self.mode != "auto":
            return self.mode
        return "bar" if sys.stderr.isatty() else "lines"

    @contextmanager
    def track(self, label: str, total: int | None, unit: str) -> Iterator[Callable[[int], object]]:
        """Gives the function to call with each further number of ``unit`` done; ``total`` is None where unknown."""
        if self.shown == "bar":
            with tqdm(total=total, desc=label, unit=unit, unit_scale=unit == "B", file=sys.stderr) as bar:
                yield bar.update
        else:
            self.note(f"{label} ({amount(total, unit)})")
            yield lambda _: None

    def note(self, text: str) -> None:
        """Says something on a line of its own."""
        if self.shown == "bar":
            tqdm.write(text, file=sys.stderr)
        elif self.shown == "lines":
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def amount(total: int | None, unit: str) -> str:
    """A number of ``unit`` as people read it."""
    if total is None:
        return "size unknown"
    return size(total) if unit == "B" else f"{total:,} {unit}"


def size(number: int) -> str:
    """Bytes as people read them: 26.4MB."""
    return f"{tqdm.format_sizeof(number)}B"
