"""The report: its figures against the records that they come from, read back out of the HTML, and by themselves."""

import base64
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from report_page import Page, matrix, records, write_run

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.text import formatting
from flyte_ddp.core.text.sections import Confusions, Scatter, Section, Table, encode_sections
from flyte_ddp.report import figures, report
from flyte_ddp.report.figures import Series, make_section_views


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("report") / "a run", records(), matrix(10))


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(report.render_report(folder))


def test_the_headline_has_the_figures_of_the_records(page: Page) -> None:
    assert page.texts("h1") == ["a run"]
    assert page.tiles() == {
        "Test accuracy": ("91.37\N{NO-BREAK SPACE}%", "9,137 of 10,000 correct"),
        "Test loss": ("0.2468", "validation loss 0.1667"),
        "Duration": ("10.0 s", "300 of 300 steps"),
        "Samples per second": ("16,543", "in training, over all ranks"),
        "Model": ("small_cnn", "431,080 parameters"),
        "Data set": ("mnist", "54,000 training, 6,000 validation, 10,000 test"),
        "Ranks": ("2 on CPU", "1 node, gloo, shared memory, 1 thread each"),
        "Precision": ("bf16", ""),
    }


def test_the_time_is_divided_as_recorded(page: Page) -> None:
    widths = [float(width) for style in page.attributes("style") for width in re.findall(r"width:([\d.]+)%", style)]
    assert widths == [10.0, 50.0, 20.0, 15.0, 5.0]
    body = "".join(page.texts("div", class_="parts"))
    shown = ("Data1.00 s", "Forward and backward5.00 s", "Communication2.00 s", "Evaluation1.50 s", "Other500 ms")
    expected = [f"{part} ({width:.2f}\N{NO-BREAK SPACE}%)" for part, width in zip(shown, widths, strict=True)]
    assert body == "".join(expected)


def test_hyperparameters_that_differ_from_their_defaults_are_set_apart(page: Page) -> None:
    given, default = records()[0]["hyperparameters"], Hyperparameters().to_dict()
    rows = {row[0]: row[1:3] for row in page.rows() if len(row) >= 4 and row[0] in default}
    assert rows == {name: [json.dumps(given[name]), json.dumps(default[name])] for name in default}
    different = [name for name in default if given[name] != default[name]]
    assert {"dataset", "learning_rate", "num_ranks"} <= set(different)
    assert list(rows)[: len(different)] == different
    (changed,) = page.texts("table", class_="settings changed")
    assert [name for name in default if re.search(rf"^{name}(?![a-z_])", changed, flags=re.MULTILINE)] == different


def test_the_confusion_matrix_and_its_lists(page: Page) -> None:
    counts = matrix(10)
    picture = Page(figures.draw_confusion_heatmap(counts, list("abcdefghij")))
    assert sorted(int(text) for text in picture.texts("text") if text.isdecimal()) == sorted(counts[counts > 0])
    assert [text for text in picture.texts("text") if len(text) == 1 and text.isalpha()] == list("abcdefghij") * 2
    of_class = f"{100 * 40 / counts[1].sum():.2f}\N{NO-BREAK SPACE}%"
    assert ["class 1", "class 0", "40", of_class] in page.rows()
    recall = counts.diagonal() / counts.sum(axis=1)
    hardest = [row[0] for row in page.rows()[page.rows().index(["Class", "Correct", "Samples"]) + 1 :][:8]]
    assert hardest == [f"class {k}" for k in np.argsort(recall, kind="stable")[:8]]


def test_the_worst_mistakes_are_pictures_of_the_samples(folder: Path, page: Page) -> None:
    assert ["".join(card).replace("\N{NO-BREAK SPACE}", " ") for card in page.pieces("mistake")] == [
        "prediction class 1truth class 0score 97.00 %sample 71",
        "prediction class 0truth class 1score 86.00 %sample 52",
        "prediction class 9truth class 0score 75.00 %sample 33",
    ]
    images = np.load(folder / "predictions.npz")["images"][2:, :, :, 0]
    for uri, image in zip(page.attributes("src"), images, strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,")))))
        assert np.array_equal(pixels, np.kron(image, np.ones((14, 14), np.uint8)))


def test_the_worst_mistakes_have_the_names_of_their_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(), matrix(10))
    arrays = dict(np.load(folder / "predictions.npz"))
    names = ["a", "b", "cat/1.jpg", "<b>dog</b>/2.jpg", os.fsdecode(b"n\xf6n/3.jpg")]
    np.savez(folder / "predictions.npz", **arrays, names=np.array(names))
    html = report.render_report(folder)
    shown = ["cat/1.jpg", "<b>dog</b>/2.jpg", "n\N{REPLACEMENT CHARACTER}n/3.jpg"]
    assert [card[-1] for card in Page(html).pieces("mistake")] == shown
    assert [found["alt"] for tag, found, _ in Page(html).elements if tag == "img"] == shown
    assert "sample 71" not in html
    np.savez(folder / "predictions.npz", **arrays, names=np.array([], dtype=np.str_))
    cards = Page(report.render_report(folder)).pieces("mistake")
    assert [card[-1] for card in cards] == ["sample 71", "sample 52", "sample 33"]


def test_a_matrix_of_two_classes_is_small_and_says_what_is_zero(page: Page) -> None:
    small = Page(figures.draw_confusion_heatmap(np.array([[1156, 0], [44, 0]]), ["stays", "churns"]))
    assert [text for text in small.texts("text") if text[0].isdecimal()] == ["1,156", "0", "44", "0"]
    assert not [each for each in small.attributes("transform") if "rotate(-90)" in each][1:], "only truth is turned"
    widths = [
        int(re.findall(r"width:(\d+)px", style)[0])
        for drawn in (small, page)
        for tag, found, _ in drawn.elements
        if tag == "svg" and "px" in (style := found.get("style", ""))
    ]
    assert len(widths) == 2
    assert widths[0] < 0.6 * widths[1]


def test_what_does_not_change_is_named_and_not_drawn(tmp_path: Path) -> None:
    """The rates of the records are constant, as is one of the measures here; the other one changes a little."""
    lines = records()
    lines[0]["measures"] = {"accuracy": "higher", "f1": "higher"}
    for line in lines[1:]:
        line |= {"validation_f1": 0.0, "test_f1": 0.25, "test_accuracy": 0.97 + line.get("epoch", 0) / 1e5}
        line.pop("validation_accuracy", None)
    page = Page(report.render_report(write_run(tmp_path / "run", lines)))
    assert page.texts("h3")[:3] == ["Loss", "Accuracy", "Training speed"]
    said = "Not drawn, because the values did not change: F1 0 (validation), 0.25 (test), learning rate 0.1."
    assert said in page.texts("p")
    line = Series("", [1, 2, 3], [97.0, 97.001, 97.0], figures.BLUE)
    ticks = [
        float(text) for text in Page(figures.draw_line_chart([line], x_label="", y_label="")).texts("text")[3:] if text
    ]
    assert max(ticks) - min(ticks) > 0.3, "a thousandth does not fill the chart"


def test_what_stands_between_backticks_is_code(tmp_path: Path) -> None:
    lines = records()
    lines[-1]["notes"] = ["your own `sample` has <b>changed</b>"]
    html = report.render_report(write_run(tmp_path / "run", lines))
    assert "`" not in html
    page = Page(html)
    assert {"sample", "shards:ADDRESS", "package.module:callable"} <= {*page.texts("code")}
    assert "your own sample has <b>changed</b>" in page.texts("li")


def test_rows_of_a_table_have_values_beside_their_ids(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(), matrix(10))
    arrays = dict(np.load(folder / "predictions.npz"))
    del arrays["images"]
    values = np.array([["41", "1,234"], ["0.25", "b & c"], ["-1", "0"]])
    np.savez(folder / "predictions.npz", **arrays, value_columns=np.array(["age", "income"]), values=values)
    rows = Page(report.render_report(folder)).rows()
    first = rows.index(["Sample", "Prediction", "Truth", "Score", "age", "income"]) + 1
    assert [row[4:] for row in rows[first : first + 3]] == values.tolist()


def test_whatever_a_run_is_called_stays_text(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "$\\frac{$", "a & b", "\u732b", "two\nrows"]
    lines = records(classes=names)
    lines[0]["hyperparameters"]["model"] = "<i>module</i>:make"
    lines[-1]["notes"] = ["<b>note</b> & more"]
    lines[-1]["stopped"] = "<u>after epoch 2</u>"
    html = report.render_report(write_run(tmp_path / "<b>run", lines, matrix(6)))
    page = Page(html)
    assert {tag for tag, _, _ in page.elements}.isdisjoint({"script", "u"})
    assert not [name for _, found, _ in page.elements for name in found if name.startswith("on")]
    assert page.texts("h1") == ["<b>run"]
    assert page.texts("li") == ["<b>note</b> & more"]
    assert page.texts("p", class_="banner") == ["Stopped early: <u>after epoch 2</u>"]
    assert page.tiles()["Model"][0] == "<i>module</i>:make"
    listed = {cell for row in page.rows() for cell in row}
    assert set(names) <= listed
    assert "$\\frac{$" in page.texts("text"), "a class name is no formula"


def test_the_page_needs_nothing_from_elsewhere_and_styles_nothing_else(folder: Path, page: Page) -> None:
    html = report.render_report(folder)
    assert all(uri.startswith("data:") for uri in page.attributes("src"))
    assert all(uri.startswith(("#", "data:")) for name in ("href", "xlink:href") for uri in page.attributes(name))
    assert not re.search(r"url\((?!['\"]?#)|@import", html)
    style = re.sub(r"@media[^{]*\{(.*?\})\s*\}", r"\1", page.texts("style")[0], flags=re.DOTALL)
    selectors = [one.strip() for group in re.findall(r"([^{}]+)\{", style) for one in group.split(",")]
    assert selectors
    assert [one for one in selectors if not one.startswith(".ddp-report")] == []


def test_a_run_without_a_validation_split_shows_none(tmp_path: Path) -> None:
    page = Page(report.render_report(write_run(tmp_path / "run", records(validation=False))))
    assert not [text for text in page.texts("text") if text == "validation"]
    assert page.tiles()["Test loss"] == ("0.2468", "")
    assert page.tiles()["Data set"] == ("mnist", "54,000 training, 10,000 test")


def test_of_many_classes_the_worst_confusions_are_listed(tmp_path: Path) -> None:
    names = [f"synset {k}" for k in range(1001)]
    folder = write_run(tmp_path / "run", records(classes=names), matrix(2))
    counts = [[k, k, 2] for k in range(1001) if k != 17] + [[17, 4, 30], [17, 17, 2], [3, 4, 1]]
    with np.load(folder / "predictions.npz") as kept:
        sections = np.array(encode_sections([Confusions(names, counts)]))
        np.savez(folder / "predictions.npz", **{**kept, "sections": sections})
    page = Page(report.render_report(folder))
    assert page.texts("svg", **{"aria-label": "confusion matrix: truth by prediction"}) == []
    rows = page.rows()
    first = rows[rows.index(["Truth", "Prediction", "Samples", "Of the class"]) + 1]
    assert first[:3] == ["synset 17", "synset 4", "30"]
    hardest = rows[rows.index(["Class", "Correct", "Samples"]) + 1 :]
    assert [row[0] for row in hardest[:3]] == ["synset 17", "synset 3", "synset 0"]


def test_an_unfinished_run_says_so_and_shows_what_there_is(tmp_path: Path) -> None:
    lines = records()[:15]  # the start, an evaluation and 13 training records
    page = Page(report.render_report(write_run(tmp_path / "run", lines)))
    assert page.texts("p", class_="banner") == ["This run has not finished. The figures are preliminary."]
    assert page.tiles()["Test accuracy"][0] == "70.10\N{NO-BREAK SPACE}%"
    assert page.tiles()["Duration"] == ("13.0 s", "130 of 300 steps")
    page = Page(report.render_report(write_run(tmp_path / "only started", lines[:1])))
    assert page.tiles()["Test accuracy"] == ("n/a", "")
    assert "svg" not in {tag for tag, _, _ in page.elements}


def test_tiles_and_charts_are_those_of_the_objectives_measures(tmp_path: Path) -> None:
    """Before the run has ended, too; what is not defined is a dash, and no point of a line."""
    lines = records()
    lines[0] |= {"measures": {"rmse": "lower", "own_measure": "higher"}, "loss_unit": "squared error"}
    for line in lines:
        for split in ("validation", "test"):
            if line.pop(f"{split}_accuracy", None) is not None:
                epoch = line.get("epoch", 1)
                own = None if line["kind"] == "end" else 0.25 * epoch
                line.update({f"{split}_rmse": 1234.5 / epoch, f"{split}_own_measure": own})
    page = Page(report.render_report(write_run(tmp_path / "ended", lines)))
    assert page.tiles()["Test RMSE"] == ("1,234", "own measure \N{EN DASH}")
    assert page.tiles()["Test loss"] == ("0.2468", "validation loss 0.1667")
    assert page.texts("h3")[:4] == ["Loss", "RMSE", "Own measure", "Training speed"]
    units = ("squared error, logarithmic", "RMSE, lower is better", "Own measure, higher is better")
    assert {*units} <= {*page.texts("text")}
    page = Page(report.render_report(write_run(tmp_path / "goes on", lines[:15])))
    assert page.tiles()["Test RMSE"] == ("1,234", "own measure 0.25")
    page = Page(report.render_report(write_run(tmp_path / "begun", lines[:1])))
    assert page.tiles()["Test RMSE"] == ("n/a", "own measure n/a")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "empty", [])
    os.truncate(write_run(tmp_path / "predictions", records(), matrix(10)) / "predictions.npz", 500)
    (write_run(tmp_path / "sidecar", records()) / "model.json").write_text("{")
    for folder, words in {
        ".": r"cannot read .*metrics.jsonl: No such file",
        "empty": "has no start record",
        "predictions": r"cannot read .*predictions.npz",
        "sidecar": r"model.json is not JSON",
    }.items():
        with pytest.raises(UserError, match=words):
            report.render_report(tmp_path / folder)


def test_a_long_line_shows_the_range_of_its_means() -> None:
    """So that a spike of one step is not hidden."""
    values = [1.0] * 1500 + [800.0] + [1.0] * 1500
    drawn = figures.draw_line_chart([Series("", range(3001), values, figures.BLUE)], x_label="step", y_label="loss")
    assert re.search(r">\s*600\s*<", drawn)


@pytest.mark.parametrize("values", [[float("nan")], [1e-9, 1e9], [float("inf"), 1.0]])
def test_odd_values_can_be_drawn(values: list[float]) -> None:
    line = Series("loss", list(range(len(values))), values, figures.BLUE)
    Page(figures.draw_line_chart([line], x_label="step", y_label="loss", scale="log"))


@pytest.mark.parametrize(
    "section",
    [Scatter("Mine", "", "", "x", "y", [1.7e308, -1.7e308], [1.0, 2.0]), Table("Mine", "", ["a"], [[10**400]])],
)
def test_a_section_that_cannot_be_drawn_says_so_in_its_place(section: Section) -> None:
    fine = Table("Fine", "", ["a"], [[1.0]])
    drawn = [*make_section_views([section, fine], {}, [])]
    assert [each.title for each in drawn] == ["Mine", "Fine"]
    assert "could not be drawn (" in drawn[0].text
    assert drawn[1].rows == [("1.0000",)]


def test_numbers_are_given_in_units_that_suit_them() -> None:
    durations = {0.0404: "40 ms", 9.876: "9.88 s", 59.9: "59.9 s", 60: "1 min 00 s", 3599: "59 min 59 s"}
    durations |= {3600: "1 h 00 min", 90_061: "25 h 01 min"}
    assert {seconds: formatting.format_duration(seconds) for seconds in durations} == durations
    p_values = {0.0: "< 1e-300", 1e-310: "< 1e-300", 1.2345e-5: "= 1.23e-05", 0.5: "= 0.5", 1.0: "= 1"}
    assert {p: formatting.format_p_value(p) for p in p_values} == p_values
    assert formatting.format_p_value(1.2345e-5, 0.0001) == "< 0.0001"
    values = {0.0: "0", 0.41234: "0.4123", -999.94: "-999.9", 12345.6: "12,346", 1.234e-5: "1.234e-05", 1e20: "1e+20"}
    assert {value: formatting.format_value(value) for value in values} == values
