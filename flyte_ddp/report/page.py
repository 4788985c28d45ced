"""Shared parts of pages: a run's records, templates with escaped values, and embedded images."""

from __future__ import annotations

import base64
import colorsys
import functools
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import replace_file
from flyte_ddp.core.runs.metrics import (
    EvaluationRecord,
    FunctionEnd,
    MetricsRecord,
    RestartRecord,
    StartRecord,
    TrainingEnd,
    TrainRecord,
    ValuesRecord,
    read_metrics,
)
from flyte_ddp.core.runs.run_folder import METRICS
from flyte_ddp.core.samples.leaves import IGNORED
from flyte_ddp.core.text import formatting

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from numpy.typing import NDArray
    from PIL.Image import Image

TEMPLATES = Path(__file__).with_name("templates")
# Colours of classes, for masks in reports and for files of predicted masks.
FIRST_COLORS = "#4c566a #2e9e6b #e07b39 #3b6fd4 #c9428c #d9b310 #7a4fc4 #23a5b8 #b5453b #86a02c".split()  # noqa: SIM905
GREY = 220  # of ignored pixels


@dataclass
class Attempt:
    """The start of an attempt, and the reasons of restarts in place after this start."""

    start: StartRecord
    restarts: list[str] = field(default_factory=list)


class RunRecords:
    """The records of ``metrics.jsonl`` of the last attempt, and of earlier attempts up to the last resumed checkpoint.

    Later records of earlier attempts are dropped. If a step has several records of a kind, the newest values count. The
    constructor raises UserError if the file cannot be read, is damaged, or has no start record.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / METRICS
        self.attempts: list[Attempt] = []  # oldest first
        self.end: TrainingEnd | FunctionEnd | None = None  # None: the last attempt has not finished
        self.train: dict[int, TrainRecord] = {}  # by step, as the next two
        self.evaluations: dict[int, EvaluationRecord] = {}
        self.values: dict[int, dict[str, float | None]] = {}  # that a user-defined function has recorded, by name
        for record in read_metrics(path):
            self._add_record(record)
        if not self.attempts:
            raise UserError(f"{path} has no start record: give the folder of a run that has started")

    def _add_record(self, record: MetricsRecord) -> None:
        """Add a record of ``metrics.jsonl``. A start record drops later steps than its checkpoint."""
        if isinstance(record, StartRecord):
            self.attempts.append(Attempt(record))
            self.end, checkpoint = None, record.resumed_after_step
            for steps in (self.train, self.evaluations, self.values):
                for step in [step for step in steps if checkpoint is not None and step > checkpoint]:
                    del steps[step]
        elif isinstance(record, RestartRecord) and self.attempts:
            self.attempts[-1].restarts.append(record.reason)
        elif isinstance(record, (TrainingEnd, FunctionEnd)):
            self.end = record
        elif isinstance(record, TrainRecord):
            self.train[record.step] = record
        elif isinstance(record, EvaluationRecord):
            self.evaluations[record.step] = record
        elif isinstance(record, ValuesRecord):
            self.values.setdefault(record.step, {}).update(record.values)


@functools.cache
def get_template_environment() -> Environment:
    """Return jinja2's environment with the pages' templates and filters. Made at the first call."""
    import jinja2  # imported late, because every command would wait for the import

    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    formats = {name: function for name, function in vars(formatting).items() if name.startswith("format_")}
    environment.filters |= {**formats, "thumbnail": encode_thumbnail, "mask_thumbnail": encode_mask_thumbnail}
    environment.filters["mark_code"] = convert_backticks_to_html
    return environment


def convert_backticks_to_html(text: str) -> Markup:
    """Return a text as escaped HTML, in which the parts between backticks are ``<code>`` elements."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 (it is escaped)


def render_template(template: str, **values: Any) -> str:
    """Return a page: a template of the folder ``templates``, filled with ``values``, as ASCII text.

    Values are escaped. Characters outside ASCII become HTML references, which are correct in any encoding.
    """
    text = get_template_environment().get_template(template).render(values)
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def write_html(path: Path, page: str) -> Path:
    """Write a page of :func:`render_template` to a file, and return the path. Replaces an existing file."""
    with replace_file(path) as file:
        file.write(page.encode("ascii"))
    return path


def encode_thumbnail(pixels: NDArray[np.uint8], side: int = 112) -> str:
    """Return a small copy of an image uint8 [H, W, C] as a data URI (PNG).

    The copy has at most ``side`` x ``side`` pixels. With 3 or more channels, the first three are red, green and blue.
    Otherwise the first channel is grey.
    """
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3] if pixels.shape[2] >= 3 else pixels[:, :, 0]))
    return encode_png_data_uri(resize_to_fit(image, side))


def encode_mask_thumbnail(mask: NDArray[Any], side: int = 112) -> str:
    """Return a small copy of a mask [H, W] of class numbers, in colours, as a data URI (PNG).

    The copy has at most ``side`` x ``side`` pixels. Ignored pixels are grey.
    """
    from PIL import Image

    is_ignored = mask == IGNORED
    classes = np.where(is_ignored, 0, mask).astype(np.int64)
    colors = np.where(is_ignored[..., np.newaxis], np.uint8(GREY), color_table(int(classes.max()) + 1)[classes])
    return encode_png_data_uri(resize_to_fit(Image.fromarray(colors), side, mix=False))


def resize_to_fit(image: Image, side: int, *, mix: bool = True) -> Image:
    """Return an image enlarged by a whole multiple, or shrunk, to fit ``side`` x ``side`` pixels.

    Shrinking changes ``image`` in place. If ``mix`` is True, shrinking mixes the colours of neighbouring pixels.
    """
    from PIL.Image import Resampling

    times = side // max(image.size)
    if times > 1:
        image = image.resize((image.width * times, image.height * times), Resampling.NEAREST)
    image.thumbnail((side, side), Resampling.BICUBIC if mix else Resampling.NEAREST)
    return image


def encode_png_data_uri(image: Image) -> str:
    """Return an image as a data URI of a PNG."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def choose_class_colors(count: int) -> list[str]:
    """Return a colour for each of ``count`` classes, such as "#4c566a".

    The first colours are fixed. The hues of further colours are chosen by the golden angle.
    """
    colors = FIRST_COLORS[:count]
    for place in range(len(colors), count):
        hue, lightness = (place * 0.381966) % 1, 0.42 + 0.12 * (place % 3)
        red, green, blue = (round(255 * value) for value in colorsys.hls_to_rgb(hue, lightness, 0.62))
        colors.append(f"#{red:02x}{green:02x}{blue:02x}")
    return colors


def color_table(count: int) -> NDArray[np.uint8]:
    """Return the colours of :func:`choose_class_colors` as uint8 [count, 3]."""
    return np.array([[*bytes.fromhex(color[1:])] for color in choose_class_colors(count)], dtype=np.uint8).reshape(
        count, 3
    )
