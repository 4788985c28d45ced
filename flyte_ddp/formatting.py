"""Figures as people read them; None, for no figure, is ``n/a``."""

import math
import time


def percent(share: float | None) -> str:
    """Return 0.9142 as 91.42 %."""
    return "n/a" if share is None else f"{100 * share:.2f}\N{NO-BREAK SPACE}%"


def number(value: float | None, form: str = ".4f") -> str:
    """Return a figure in a format of Python's."""
    return "n/a" if value is None else format(value, form)


def counted(count: int | None, noun: str, rest: str = "") -> str:
    """Return a count with its noun, such as ``2 threads``; empty if there is no count."""
    return "" if count is None else f"{count:,} {noun}{'' if count == 1 else 's'}{rest}"


def duration(seconds: float | None) -> str:
    """Return a time to about three digits, from milliseconds to hours."""
    if seconds is None or not math.isfinite(seconds):
        return "n/a"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"


def moment(unix: float | None) -> str:
    """Return a point in time, in UTC."""
    return "at an unknown time" if unix is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix))
