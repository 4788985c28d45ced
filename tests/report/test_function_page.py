"""The page of an own function's run: its figures against the records that they come from, read back out of the HTML."""

import base64
import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from report_page import Page, Record

from flyte_ddp.report.function_page import render_function_page

BEGAN = 1_700_000_000.0


def start(resumed_after: int = 0, **other: Any) -> Record:
    facts = {"num_ranks": 2, "num_nodes": 1, "device": "cpu", "backend": "gloo", "resumed_after_step": resumed_after}
    called = {"function": "mine:train", "hyperparameters": {"epochs": 3, "names": ["a", "b"]}}
    return {"kind": "start", **called, **facts, "time": BEGAN, **other}


def record(step: int, **values: float | None) -> Record:
    return {"kind": "record", "step": step, **values, "time": BEGAN + step}


def write(folder: Path, *lines: Record) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def drawn_heights(html: str, title: str) -> list[float]:
    """Return the heights of the points of a chart's line, from 0 for the lowest to 1 for the highest."""
    figure = html[html.index(f"<h3>{title}</h3>") :]
    path = next(iter(re.findall(r'<path d="([^"]*)"[^>]*stroke: #2457c5; stroke-width: 1\.6', figure)))
    heights = np.array([float(height) for height in re.findall(r"[ML] [\d.]+ ([\d.]+)", path)])
    return ((heights.max() - heights) / np.ptp(heights)).tolist()  # type: ignore[no-any-return]


def test_a_finished_run_shows_its_last_values_and_a_chart_for_each(tmp_path: Path) -> None:
    lines = [
        start(),
        record(1, accuracy=0.25),
        record(10, train_loss=2.5),
        record(10, accuracy=0.5),  # at the step of the record before, with another value
        record(20, train_loss=None),  # was not finite
        record(30, train_loss=1234.5),
        record(30, accuracy=0.75, speed=None),
        {"kind": "end", "step": 30, "seconds": 75.0, "time": 0.0},
    ]
    html = render_function_page(write(tmp_path / "run", *lines), "my <i>run</i>")
    page = Page(html)
    assert page.texts("h1") == ["my <i>run</i>"]
    assert page.tiles() == {
        "State": ("Finished", "step 30"),
        "Duration": ("1 min 15 s", ""),
        "Ranks": ("2 on CPU", "1 node, gloo"),
        "Resumed": ("no", "attempt 1"),
    }
    assert page.pieces("banner") == []
    assert page.rows() == [
        ["Value", "Last", "At step", "Smallest", "Largest"],
        ["accuracy", "0.75", "30", "0.25", "0.75"],
        ["train_loss", "1,234", "30", "2.5", "1,234"],
        ["speed", "n/a", "30", "n/a", "n/a"],
        ["Name", "Value"],
        ["epochs", "3"],
        ["names", '["a", "b"]'],
    ]
    assert page.texts("h3") == ["accuracy", "train_loss"]
    assert drawn_heights(html, "accuracy") == pytest.approx([0, 0.5, 1])
    assert len(drawn_heights(html, "train_loss")) == 2
    assert [text for text in page.texts("text") if "log" in text] == ["value, logarithmic"]


def test_a_run_that_goes_on_or_has_failed_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", start(time=time.time() - 3600), record(7, loss=0.5), record(7, speed=35.0))
    page = Page(render_function_page(folder, "a run"))
    assert page.tiles()["State"] == ("Running", "step 7")
    assert page.tiles()["Duration"][0] == "1 h 00 min"
    assert page.texts("p", class_="banner") == ["This run has not finished. The figures are preliminary."]
    html = render_function_page(folder, "a run", "rank 1: ValueError: <b>no</b>")
    assert Page(html).tiles()["State"] == ("Failed", "step 7")
    assert Page(html).texts("p", class_="banner") == ["This attempt has failed: rank 1: ValueError: <b>no</b>"]
    begun = render_function_page(write(tmp_path / "begun", start()), "a run")
    assert Page(begun).texts("h2") == ["Arguments"]


def test_an_attempt_that_resumed_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    first = [start(), *(record(step, loss=2.0) for step in range(0, 100, 10)), record(90, only_before=1.0)]
    second = [start(40, num_ranks=3), record(40, loss=3.0), record(55, loss=4.0)]
    html = render_function_page(write(tmp_path / "run", *first, *second), "a run")
    page = Page(html)
    assert page.tiles()["Resumed"] == ("after step 40", "attempt 2")
    assert page.tiles()["Ranks"][0] == "3 on CPU"
    assert ["loss", "4", "55", "2", "4"] in page.rows()
    assert drawn_heights(html, "loss") == pytest.approx([0, 0, 0, 0, 0.5, 1])
    assert page.texts("h3") == ["loss"]
    attempts = page.rows()[page.rows().index(["Started", "After step", "Ranks", "Nodes"]) + 1 :][:2]
    assert [row[1:] for row in attempts] == [["0", "2", "1"], ["40", "3", "1"]]


def test_pictures_that_were_handed_in_are_shown(tmp_path: Path) -> None:
    """In the order in which they came; what is no picture is left out."""
    folder = write(tmp_path / "run", start(), record(1, loss=1.0))
    for number, (name, color) in enumerate([("maps/b <1>.png", "red"), ("a.JPG", "blue")]):
        path = folder / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), color).save(path)
        os.utime(path, (number, number))
    (folder / "results/broken.png").write_bytes(b"no picture")
    (folder / "results/gone.png").symlink_to("nowhere.png")
    page = Page(render_function_page(folder, "a run"))
    shown = [found for tag, found, _ in page.elements if tag == "img"]
    assert [each["alt"] for each in shown] == ["maps/b <1>.png", "a.JPG"]
    first = Image.open(io.BytesIO(base64.b64decode(shown[0]["src"].partition(",")[2])))
    assert (first.size, first.getpixel((5, 5))) == ((256, 256), (255, 0, 0, 255))
