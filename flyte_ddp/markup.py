"""Small pieces of HTML: every text that comes from a run is escaped here."""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any


def text(value: object) -> str:
    """A value as text that is safe inside an element or an attribute."""
    return html.escape(str(value))


def shown(value: Any) -> str:
    """A hyperparameter as one writes it in JSON."""
    return json.dumps(value, ensure_ascii=False, default=str)


def section(title: str, body: str) -> str:
    """A part of the page with its heading; ``body`` is HTML."""
    return f"<section>\n<h2>{text(title)}</h2>\n{body}\n</section>"


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: Sequence[int] = (), kind: str = ""
) -> str:
    """A table of texts; ``numeric`` columns are set flush right, and ``kind`` names its style."""

    def line(tag: str, values: Sequence[object]) -> str:
        marks = (' class="number"' if column in numeric else "" for column in range(len(values)))
        cells = (f"<{tag}{mark}>{text(value)}</{tag}>" for mark, value in zip(marks, values, strict=True))
        return "<tr>" + "".join(cells) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f'<table class="{kind}"><thead>{line("th", header)}</thead>\n<tbody>\n{body}\n</tbody></table>'


def data(name: str, value: Any) -> str:
    """A value for programs that read the page, as JSON, of which nothing is shown; :func:`data_in` finds it."""
    return f'<data class="{name}" value="{text(json.dumps(value))}" hidden></data>'


def data_in(page: str, name: str) -> Any:
    """What :func:`data` has put into a page under this name; None without it."""
    found = re.search(f'<data class="{name}" value="([^"]*)"', page)
    return None if found is None else json.loads(html.unescape(found[1]))


def percent(share: float | None) -> str:
    """0.9142 as 91.42 %."""
    return "n/a" if share is None else f"{100 * share:.2f}\N{NO-BREAK SPACE}%"


def number(value: float | None, form: str = ".4f") -> str:
    """A figure, or n/a where there is none."""
    return "n/a" if value is None else format(value, form)


def counted(count: int | None, noun: str, rest: str = "") -> str:
    """A count with its noun, such as ``2 threads``; nothing where there is no count."""
    return "" if count is None else f"{count:,} {noun}{'' if count == 1 else 's'}{rest}"


def duration(seconds: float | None) -> str:
    """A time to about three digits, from milliseconds to hours."""
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
    """A point in time, in UTC."""
    return "at an unknown time" if unix is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix))
