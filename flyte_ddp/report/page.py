"""Rendering of templates, in which every value is escaped."""

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
    """Return the environment of the templates, with the filters that they use."""
    import jinja2  # not before there is a page to make, as every command would wait for it

    from flyte_ddp.report.figures import thumbnail

    loader = jinja2.FileSystemLoader(TEMPLATES)
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {use.__name__: use for use in (counted, duration, moment, number, percent, thumbnail)}
    return made


def rendered(template: str, **values: Any) -> str:
    """Render a template as ASCII, with references for other characters: so that it is read right in any encoding."""
    text = environment().get_template(template).render(values)
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")
