"""Shared parts of pages: a run's records, templates with escaped values, and embedded images."""

from __future__ import annotations

import base64
import colorsys
import functools
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flyte_ddp.catalog import IGNORED
from flyte_ddp.checks.forms import COUNT, require_form
from flyte_ddp.errors import UserError
from flyte_ddp.files import replace_file
from flyte_ddp.runs.run_folder import METRICS
from flyte_ddp.text import formatting
from flyte_ddp.text.json_lines import read_records

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from numpy.typing import NDArray
    from PIL.Image import Image

Record = dict[str, Any]
STEPS = {"kind": str, "step": COUNT, "time?": float}
STEP = {"kind?": str, "step?": COUNT, "time?": float, "resumed_after_step?": (COUNT, None), "reason?": str}

TEMPLATES = Path(__file__).with_name("templates")
# Colours of classes, for masks in reports and for files of predicted masks.
FIRST_COLORS = "#4c566a #2e9e6b #e07b39 #3b6fd4 #c9428c #d9b310 #7a4fc4 #23a5b8 #b5453b #86a02c".split()  # noqa: SIM905
GREY = 220  # of ignored pixels


class RunRecords:
    """The records of ``metrics.jsonl`` of the last attempt, and of earlier attempts up to the last resumed checkpoint.

    Later records of earlier attempts are dropped. The constructor raises UserError if the file cannot be read, is
    damaged, or has no start record.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / METRICS
        self.starts: list[Record] = []  # of all attempts, oldest first
        self.end: Record = {}  # empty: the last attempt has not finished
        self.by_step: dict[str, dict[int, Record]] = {"train": {}, "evaluation": {}, "record": {}}  # by their kind
        for record in read_records(path):
            kind = record.get("kind")
            require_form(record, STEPS if kind in ("train", "evaluation", "record") else STEP, f"{path} is damaged")
            if kind == "start":
                self.starts.append(record)
                self.end = {}
                if (checkpoint := record.get("resumed_after_step")) is not None:
                    for steps in self.by_step.values():
                        for step in [step for step in steps if step > checkpoint]:
                            del steps[step]
            elif kind == "restart" and self.starts:  # a restart in place belongs to the last start
                self.starts[-1].setdefault("restarts", []).append(record.get("reason", ""))
            elif kind == "end":
                self.end = record
            elif kind in self.by_step:
                # If a value was recorded twice in a step, perhaps by an earlier attempt, the newest record counts.
                self.by_step[kind].setdefault(record["step"], {}).update(record)
        if not self.starts:
            raise UserError(f"{path} has no start record: give the folder of a run that has started")


@functools.cache
def template_environment() -> Environment:
    """Return the templates' environment with the pages' filters, such as ``format_measure``, made at the first call."""
    import jinja2  # imported late, because every command would wait for the import

    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    formats = {name: function for name, function in vars(formatting).items() if name.startswith("format_")}
    environment.filters |= {**formats, "thumbnail": thumbnail, "mask_thumbnail": mask_thumbnail}
    environment.filters["mark_code"] = mark_code
    return environment


def mark_code(text: str) -> Markup:
    """Return a text as escaped HTML, with the parts between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 (it is escaped)


def render_template(template: str, **values: Any) -> str:
    """Return a template filled with values, as ASCII text. ``template`` is a file name in the folder ``templates``.

    Values are escaped. Characters outside ASCII become HTML references, which are correct in any encoding.
    """
    text = template_environment().get_template(template).render(values)
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def write_html(path: Path, page: str) -> Path:
    """Write a page of :func:`render_template`, replacing an existing file, and return the path."""
    with replace_file(path) as file:
        file.write(page.encode("ascii"))
    return path


def thumbnail(pixels: NDArray[np.uint8], side: int = 112) -> str:
    """Return an image uint8 [H, W, C], resized to fit ``side`` x ``side`` pixels, as a data URI (PNG).

    With 3 or more channels, the first three are red, green and blue. Otherwise the first channel is grey.
    """
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3] if pixels.shape[2] >= 3 else pixels[:, :, 0]))
    return encode_as_data_uri(fit_image(image, side))


def mask_thumbnail(mask: NDArray[Any], side: int = 112) -> str:
    """Return a mask [H, W] of class numbers in colours, as a data URI (PNG).

    Ignored pixels are grey. The image fits ``side`` x ``side`` pixels.
    """
    from PIL import Image

    is_ignored = mask == IGNORED
    classes = np.where(is_ignored, 0, mask).astype(np.int64)
    colors = np.where(is_ignored[..., np.newaxis], np.uint8(GREY), color_table(int(classes.max()) + 1)[classes])
    return encode_as_data_uri(fit_image(Image.fromarray(colors), side, mix=False))


def fit_image(image: Image, side: int, *, mix: bool = True) -> Image:
    """Return an image that fits ``side`` x ``side`` pixels: enlarged by a whole multiple, or shrunk.

    Shrinking changes ``image`` itself. With ``mix`` shrinking mixes the colours of neighbouring pixels.
    """
    from PIL.Image import Resampling

    times = side // max(image.size)
    if times > 1:
        image = image.resize((image.width * times, image.height * times), Resampling.NEAREST)
    image.thumbnail((side, side), Resampling.BICUBIC if mix else Resampling.NEAREST)
    return image


def encode_as_data_uri(image: Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def class_colors(count: int) -> list[str]:
    """Return a colour for each class, such as "#4c566a".

    The first colours are fixed. The hues of further colours are chosen by the golden angle.
    """
    colors = FIRST_COLORS[:count]
    for place in range(len(colors), count):
        hue, lightness = (place * 0.381966) % 1, 0.42 + 0.12 * (place % 3)
        red, green, blue = (round(255 * value) for value in colorsys.hls_to_rgb(hue, lightness, 0.62))
        colors.append(f"#{red:02x}{green:02x}{blue:02x}")
    return colors


def color_table(count: int) -> NDArray[np.uint8]:
    """Return the colours of :func:`class_colors` as uint8 [count, 3]."""
    return np.array([[*bytes.fromhex(color[1:])] for color in class_colors(count)], dtype=np.uint8).reshape(count, 3)
