"""Rendering HTML templates, and writing pages; every value is escaped."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.files import replace_file
from flyte_ddp.formatting import format_count, format_duration, format_moment, format_number, format_percent

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")


@functools.cache
def template_environment() -> Environment:
    """Return jinja2's environment with the folder of templates and their filters; the same object at each call."""
    import jinja2  # not before there is a page to make, as every command would wait for it

    from flyte_ddp.report.figures import thumbnail

    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    filters = (format_count, format_duration, format_moment, format_number, format_percent, thumbnail)
    environment.filters |= {function.__name__: function for function in filters}
    return environment


def render_template(template: str, **values: Any) -> str:
    """Return a template filled with values, in ASCII: other characters are HTML references, right in any encoding."""
    text = template_environment().get_template(template).render(values)
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def write_html(path: Path, page: str) -> Path:
    """Write a page of :func:`render_template` to a file, which is replaced whole, and return the path.

    Raises UserError if the file cannot be written.
    """
    with replace_file(path) as file:
        file.write(page.encode("ascii"))
    return path
