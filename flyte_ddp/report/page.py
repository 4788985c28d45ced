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
