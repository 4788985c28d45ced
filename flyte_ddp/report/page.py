"""Templates to pages; whatever comes from a run is escaped, and so stays text."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.formatting import counted, duration, moment, number, percent

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")


@functools.cache
def environment() -> Environment:
    """Where templates come from, and the filters that they use."""
    import jinja2  # not before there is a page to make, as every command would wait for it

    from flyte_ddp.report.figures import thumbnail

    loader = jinja2.FileSystemLoader(TEMPLATES)
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {use.__name__: use for use in (counted, duration, moment, number, percent, thumbnail)}
    return made


def rendered(template: str, **values: Any) -> str:
    """A template with its values, in plain ASCII: that comes through whatever encoding a reader takes for granted."""
    text = environment().get_template(template).render(values)
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")
