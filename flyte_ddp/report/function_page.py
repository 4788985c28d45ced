"""The page of a user-defined function's run: state, recorded values, pictures and arguments."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from flyte_ddp.core import results
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import list_files
from flyte_ddp.core.runs.metrics import FunctionStart, TrainingEnd
from flyte_ddp.core.runs.run_folder import METRICS
from flyte_ddp.core.text.formatting import format_value
from flyte_ddp.report.figures import BLUE, Series, draw_line_chart
from flyte_ddp.report.page import RunRecords, encode_png_data_uri, render_template, resize_to_fit

Points = list[tuple[int, float | None]]  # steps and values; None stands for a value that was not finite
PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
SHOWN_PICTURES, PICTURE_SIDE = 24, 256  # the number of newest pictures, and the size in pixels


def render_function_page(folder: Path, name: str, failure: str = "") -> str:
    """Return the HTML page of a user-defined function's run, which may still be running.

    Reads the files of the run's folder. Pictures that cannot be read are skipped. ``name`` is the title. ``failure`` is
    the reason if the run has failed.

    Raises:
        UserError: ``metrics.jsonl`` cannot be read, is damaged, has no start record, or is of a training.
    """
    records = RunRecords(folder)
    start, end = records.attempts[-1].start, records.end
    if not isinstance(start, FunctionStart) or isinstance(end, TrainingEnd):
        raise UserError(f"{folder / METRICS} is of a training; give the folder of a user-defined function's run")
    points = group_values_by_name(records.values)
    return render_template(
        "function.html",
        title=name,
        failure=failure,
        state="Failed" if failure else "Finished" if end else "Running",
        attempts=records.attempts,
        last_step=end.step if end else max(records.values, default=None),
        seconds=end.seconds if end else None if start.time is None else max(0.0, time.time() - start.time),
        values=[(value, *describe_recorded_values(of)) for value, of in points.items()],
        charts=[(value, chart) for value, of in points.items() if (chart := draw_recorded_values(value, of))],
        pictures=[*encode_newest_pictures(folder / results.FOLDER)],
        arguments=[
            (argument, json.dumps(given, ensure_ascii=False)) for argument, given in start.hyperparameters.items()
        ],
    )


def group_values_by_name(steps: Mapping[int, Mapping[str, float | None]]) -> dict[str, Points]:
    """Return the recorded (step, value) pairs by the value's name, in ascending order of steps.

    ``steps`` has the values of each step by name.
    """
    points: dict[str, Points] = {}
    for step in sorted(steps):
        for name, value in steps[step].items():
            points.setdefault(name, []).append((step, value))
    return points


def encode_newest_pictures(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and data URI of the newest SHOWN_PICTURES (24) pictures below a folder, oldest first.

    Files that cannot be read as pictures are skipped.
    """
    from PIL import Image

    times = dict[Path, int]()
    for path in list_files(folder):
        if path.suffix.lower() in PICTURES:
            with suppress(OSError):  # the picture has vanished meanwhile
                times[path] = path.stat().st_mtime_ns
    for path in sorted(times, key=times.__getitem__)[-SHOWN_PICTURES:]:
        with suppress(Exception), Image.open(path) as image:
            shown = resize_to_fit(image.convert("RGBA"), PICTURE_SIDE)
            yield path.relative_to(folder).as_posix(), encode_png_data_uri(shown)


def draw_recorded_values(name: str, points: Points) -> str:
    """Return an SVG chart of the finite values by step, or "" unless at least two values differ."""
    finite = [(step, value) for step, value in points if value is not None]
    if len({value for _, value in finite}) < 2:  # the table shows the last values
        return ""
    steps, values = zip(*finite, strict=True)
    scale = "log" if name.lower().endswith("loss") else "linear"
    return draw_line_chart([Series("", steps, values, BLUE)], x_label="step", y_label="value", scale=scale, x_from=0)


def describe_recorded_values(points: Points) -> tuple[str, ...]:
    """Return four texts: the last value, the last step, the smallest value and the largest value.

    A value that is not finite is "n/a".
    """
    step, last = points[-1]
    finite = [value for _, value in points if value is not None]
    low, high = min(finite, default=None), max(finite, default=None)
    return format_value(last), f"{step:,}", format_value(low), format_value(high)
