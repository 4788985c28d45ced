"""Format numbers and lists for people."""

import math
import re
import time
from collections.abc import Iterable, Sequence

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escape_controls(text: str) -> str:
    r"""Return a text with terminal control characters shown as ``\x1b``. Line ends and tabs are kept."""
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def format_percent(share: float | None) -> str:
    """Return a share, for example 0.9142, as "91.42 %", and None as "n/a"."""
    return "n/a" if share is None else f"{100 * share:.2f}\N{NO-BREAK SPACE}%"


def format_number(value: float | None, form: str = ".4f") -> str:
    return "n/a" if value is None else format(value, form)


def format_value(value: float | None) -> str:
    """Return a number of any size with about four digits, and None as "n/a".

    Examples are "0.4123", "12,345" and "1.2e-05".
    """
    return "n/a" if value is None else f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def format_setting(value: object) -> str:
    return format_value(value) if isinstance(value, float) else str(value)


def format_measure(name: str, value: float | None) -> str:
    """Return a measure's value: accuracy as a percentage, loss with four decimals, others with about four digits.

    An undefined value (None or NaN) becomes a dash.
    """
    if value is None or math.isnan(value):
        return "\N{EN DASH}"
    if name == "loss" and abs(value) < 1000:
        return format_number(value)
    return format_percent(value) if name == "accuracy" else format_value(value)


def format_p_value(p: float, least: float = 1e-300) -> str:
    """Return a p-value as text: "= 2.04e-09" or, below ``least``, "< 1e-300"."""
    return f"< {least:g}" if p < least else f"= {p:.3g}"


def format_sentence(text: str) -> str:
    """Return a text with a capital first letter and a final full stop. An empty text stays empty."""
    return text[:1].upper() + text[1:] + "." * (text != "" and text[-1] not in ".!?")


def format_column(values: Sequence[str | float | None]) -> list[str]:
    """Return the values of a table's column as texts. None and NaN become a dash.

    If the column's largest float is from 0.001 to 1000, all floats get four decimals. Otherwise, and for whole numbers,
    each number gets about four digits.
    """
    floats = [abs(value) for value in values if isinstance(value, float) and not math.isnan(value)]
    aligned = floats and 0.001 <= max(floats) < 1000
    return [
        value
        if isinstance(value, str)
        else format_number(value)
        if aligned and isinstance(value, float) and not math.isnan(value)
        else format_measure("", value)
        for value in values
    ]


def name_measure(name: str) -> str:
    """Return a measure's name in words: "AUROC" for auroc, "average precision" for average_precision."""
    short = {"auroc": "AUROC", "f1": "F1", "rmse": "RMSE", "mae": "MAE", "r2": "R2", "miou": "mean IoU"}
    return short.get(name, name.replace("_", " "))


def format_count(count: int | None, noun: str, rest: str = "") -> str:
    """Return a count with a noun, in the plural unless the count is 1, and ``rest``. For None, return ""."""
    return "" if count is None else f"{count:,} {noun}{'' if count == 1 else 's'}{rest}"


def format_duration(seconds: float | None) -> str:
    """Return seconds as "12 ms", "3.45 s", "1 min 12 s" or "27 h 46 min". None, NaN and infinity become "n/a"."""
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


def format_moment(moment: float | str | None) -> str:
    """Return a time, given as Unix seconds or ISO 8601 in UTC, as "2026-11-28 20:44:17 UTC"."""
    if isinstance(moment, str):
        return moment.replace("T", " ").replace("Z", " UTC")
    return "at an unknown time" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))


def join_first(texts: Iterable[str], most: int = 5) -> str:
    """Join up to ``most`` texts by commas, with "..." at the end if more texts follow."""
    listed = [*texts]
    return ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")
