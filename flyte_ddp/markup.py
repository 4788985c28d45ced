"""Small pieces of HTML: every text that comes from a run is escaped here."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp import figures
from flyte_ddp.config import Hyperparameters

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def text(value: object) -> str:
    """A value as text that is safe inside an element or an attribute."""
    return html.escape(str(value))


def shown(value: Any) -> str:
    """A hyperparameter as one writes it in JSON."""
    return json.dumps(value, ensure_ascii=False, default=str)


def page(title: str, *sections: str) -> str:
    """A page that needs nothing else; its styles touch nothing outside it, so it can stand inside another one.

    Args:
        sections: HTML; empty ones are left out.
    """
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    body = "\n".join(filter(None, sections))
    whole = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f'<body style="margin:0">\n<div class="ddp-report">\n{body}\n</div>\n</body>\n</html>\n'
    )
    # Plain ASCII comes through unharmed, whatever encoding a reader of the file takes for granted.
    return whole.encode("ascii", "xmlcharrefreplace").decode("ascii")


def card(image: NDArray[np.uint8], name: str, *, guess: str = "", truth: str = "", score: float | None = None) -> str:
    """A picture, uint8 [H, W, C], with what is known of it."""
    lines = [f'<span class="guess">guess <b>{text(guess)}</b></span>'] if guess else []
    lines += [f"<span>truth <b>{text(truth)}</b></span>"] if truth else []
    lines += [f"<span>score {percent(score)}</span>"] if score is not None else []
    picture = f'<img src="{figures.thumbnail(image)}" alt="{text(name)}">'
    return f'<div class="mistake">{picture}{"".join(lines)}<span>{text(name)}</span></div>'


def cards(found: Iterable[str]) -> str:
    """Cards side by side."""
    return '<div class="mistakes">\n' + "\n".join(found) + "\n</div>"


def settings(given: Mapping[str, Any]) -> str:
    """Hyperparameters: those that are not the default, and the others folded away."""
    rows: dict[bool, list[tuple[str, ...]]] = {True: [], False: []}
    for field in dataclasses.fields(Hyperparameters):
        if field.name in given:
            value, default = given[field.name], field.default
            rows[value != default].append((field.name, shown(value), shown(default), field.metadata["doc"]))
    header = ("Name", "Value", "Default", "Meaning")
    changed = table(header, rows[True], kind="settings changed") if rows[True] else "<p>All have their defaults.</p>"
    others = table(header, rows[False], kind="settings")
    summary = f"{counted(len(rows[False]), 'other')} with default values"
    return section("Hyperparameters", f"{changed}\n<details><summary>{summary}</summary>{others}</details>")


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
