"""Windows of real champions: what moved is named, what cannot be used is told, and the truth is measured."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import window_tasks
from cli import HELPERS
from gate import Gate
from PIL import Image
from scipy.stats import fisher_exact
from training_runs import QUIET, train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models.saving import save_model
from flyte_ddp.core.models.sidecar import read_sidecar
from flyte_ddp.core.training.evaluate import compute_batch_columns
from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.monitor.page import write_csv_table, write_window_page
from flyte_ddp.monitor.records import read_windows, record_window
from flyte_ddp.monitor.score import measure_samples_with_truth
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.monitor.watch import WatchedModel, predict_window
from flyte_ddp.monitor.window import Score, Window
from flyte_ddp.objectives import Facts, make_objective
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.release.promotion import promote_version, require_champion, store_version
from flyte_ddp.release.registry import Registry
from tasks.monitor import raise_alarm

pytestmark = pytest.mark.slow
NOW = datetime(2026, 11, 28, 7, 5, tzinfo=UTC)


def release(folder: Path, hp: Hyperparameters, data: Path) -> Gate:
    """Train a model, and make it a champion."""
    gate = Gate({"good": train_in(folder / "run", hp, data)}, Registry(str(folder / "registry"), "model"), data, folder)
    assert gate.release("good").verdict.promotes
    return gate


@pytest.fixture(scope="module")
def digits_gate(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return release(tmp_path_factory.mktemp("digits"), Hyperparameters(num_ranks=1, epochs=5), digits)


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("prices")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)
        own = {"dataset": "window_tasks:prices", "model": "window_tasks:linear", "objective": "regression"}
        hp = Hyperparameters(num_ranks=1, epochs=10, learning_rate=0.05, optimizer="adamw", batch_size=20, **own)
        yield release(folder, hp, fetch(hp.dataset, "", folder / "data", progress="off"))


def watch(gate: Gate, **source: Any) -> tuple[Window, WatchedModel]:
    entry, window = require_champion(gate.registry), WindowSource(**source).fill_in_time(NOW)
    local = Path(window.images or window.table or ".")
    return predict_window(gate.registry, entry, window, local, settings=QUIET, by="somebody")


def moved(window: Window) -> set[str]:
    return {each.column for each in window.moved}


def write_digits(gate: Gate, folder: Path, change: Callable[[Any], Any] = lambda image: image) -> np.ndarray:
    """Write the test split's pictures as files 000.png, 001.png and so on; return their classes."""
    found = open_arrays(gate.data)
    folder.mkdir(parents=True)
    for number, pixels in enumerate(found.test_inputs):
        Image.fromarray(change(np.array(pixels)[..., 0])).save(folder / f"{number:03}.png")
    return np.array(found.test_targets)


def test_pictures_that_are_the_same_have_not_moved_and_brighter_ones_have(digits_gate: Gate, tmp_path: Path) -> None:
    """The folder's name has the hour before."""
    write_digits(digits_gate, tmp_path / "2026-11-28/06")
    same, watched = watch(digits_gate, images=f"{tmp_path}/%Y-%m-%d/%H", hours_back=1)
    assert (same.samples, same.bad, same.address) == (297, 0, f"{tmp_path}/2026-11-28/06")
    assert [*watched.columns] == ["brightness", "contrast", "sharpness", "prediction", "confidence", "entropy"]
    assert max(each.effect for each in same.columns) < 0.01, "the very samples of the reference"
    assert same.describe() == "no alarm: no column has moved"

    write_digits(digits_gate, tmp_path / "bright", lambda pixels: (pixels * 0.5 + 127).astype(np.uint8))
    bright, watched = watch(digits_gate, images=str(tmp_path / "bright"))
    assert moved(bright) >= {"brightness", "contrast"}
    assert "sharpness" not in moved(watch(digits_gate, dataset="digits")[0])
    entry = require_champion(digits_gate.registry)
    recorded = record_window(digits_gate.registry, entry, bright)
    page = write_window_page(recorded, watched, [], "digits", tmp_path / "page.html").read_text()
    assert "<h1>digits: No alarm</h1>" in page, "the first window is silent"
    assert page.count("<svg") == len(recorded.moved)
    assert page.count('class="mistake"') == 24
    table = write_csv_table(tmp_path / "window.csv", watched.columns, watched.ids).read_text().splitlines()
    assert table[0] == "id,brightness,contrast,sharpness,prediction,confidence,entropy"
    assert len(table) == 298
    assert float(table[1].split(",")[1]) == pytest.approx(watched.columns["brightness"][0])


def test_truth_is_measured_with_an_interval(digits_gate: Gate, tmp_path: Path) -> None:
    """Of 200 pictures the class is known: the accuracy, and Wilson's formula; a data set has its own truth."""
    classes = write_digits(digits_gate, tmp_path / "in")
    truth = tmp_path / "truth.csv"
    truth.write_text("id,truth\n" + "".join(f"{place:03}.png,{classes[place]}\n" for place in range(200)))
    found, watched = watch(digits_gate, images=str(tmp_path / "in"), truth=str(truth))
    right = watched.columns["prediction"][:200].astype(int) == classes[:200]
    accuracy = right.mean()
    z = 1.959964
    middle, reach = accuracy + z**2 / 400, z * math.sqrt(accuracy * (1 - accuracy) / 200 + z**2 / 160_000)
    low, high = ((middle + side * reach) / (1 + z**2 / 200) for side in (-1, 1))
    assert (found.measure, found.truths) == ("accuracy", 200)
    assert (found.score, found.low, found.high) == pytest.approx((accuracy, low, high))
    floats = (f"{place:03}.png,{f'{classes[place]}.0' if place < 200 else 'nan'}\n" for place in range(297))
    truth.write_text("".join(["id,truth\n", *floats]))
    assert watch(digits_gate, images=str(tmp_path / "in"), truth=str(truth))[0].score == found.score, "as pandas writes"
    truth.write_text("id,truth\n" + "".join(f"{place:03}.png,\n" for place in range(297)))
    empty = watch(digits_gate, images=str(tmp_path / "in"), truth=str(truth))[0]
    assert (empty.truths, empty.score) == (0, None), "no error, as none is filled in yet"
    own = watch(digits_gate, dataset="digits")[0]
    assert own.truths == 297
    assert own.score == own.held_out == pytest.approx(digits_gate.runs["good"].test_accuracy)
    assert (own.worse, own.worse_p) == (False, pytest.approx(0.5, abs=0.5))
    truth.write_text("id,truth\n000.png,eleven\n")
    with pytest.raises(UserError, match="truth: unknown class 'eleven'; the model knows 0, 1"):
        watch(digits_gate, images=str(tmp_path / "in"), truth=str(truth))
    truth.write_text("id,truth\n0,1\n")
    with pytest.raises(
        UserError, match=r"has none of the ids of the samples, such as 000.png, 001.png, \.\.\.; give the"
    ):
        watch(digits_gate, images=str(tmp_path / "in"), truth=str(truth))
    truth.write_text("id,truth\n000.png,1\n")
    few = watch(digits_gate, images=str(tmp_path / "in"), truth=str(truth))[0]
    assert (few.truths, few.score) == (1, None)


def test_few_samples_have_no_verdict_and_unreadable_ones_are_named(
    digits_gate: Gate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_digits(digits_gate, tmp_path / "in")
    for number in range(45, 297):
        (tmp_path / f"in/{number:03}.png").unlink()
    (tmp_path / "in/broken.png").write_text("no picture")
    entry = require_champion(digits_gate.registry)
    source, settings = WindowSource(images=str(tmp_path / "in")), replace(QUIET, progress="lines")
    found, _ = predict_window(digits_gate.registry, entry, source, tmp_path / "in", settings=settings, by="me")
    assert (found.samples, found.bad, found.columns) == (45, 1, [])
    assert found.describe() == "no verdict: 45 samples are too few; at least 50 are needed"
    assert "in: 1 of 46 samples cannot be decoded or predicted: " in capsys.readouterr().err
    for number in range(10):
        (tmp_path / f"in/broken-{number}.png").write_text("no picture")
    with pytest.raises(UserError, match=r"in: 11 of 56 samples cannot be decoded or predicted, and at most a tenth"):
        watch(digits_gate, images=str(tmp_path / "in"))


def test_a_tables_columns_are_named_and_its_truth_is_numbers(prices: Gate, tmp_path: Path) -> None:
    rows, truth = window_tasks.draw_rows(400, 3)
    known = tmp_path / "truth.csv"
    known.write_text("id,truth\n" + "".join(f"row {place},{each}\n" for place, each in enumerate(truth[:300])))
    table = str(window_tasks.write_rows(tmp_path / "rows.csv", rows))
    found, watched = watch(prices, table=table, truth=str(known))
    assert [*watched.columns] == [*(f"input {place}" for place in range(4)), "prediction"]
    assert not found.moved
    weights = torch.load(prices.runs["good"].model, weights_only=True)
    predicted = rows @ weights["weight"][0].numpy() + weights["bias"].item()
    np.testing.assert_allclose(watched.columns["prediction"], predicted, rtol=1e-4, atol=1e-5)
    squares = (predicted[:300] - truth[:300]) ** 2
    reach = 1.959964 * squares.std(ddof=1) / math.sqrt(300)
    expected = [math.sqrt(each) for each in (squares.mean(), squares.mean() - reach, squares.mean() + reach)]
    assert [found.score, found.low, found.high] == pytest.approx(expected, rel=1e-4)
    assert found.held_out == pytest.approx(
        json.loads(prices.runs["good"].sidecar.read_text())["metrics"]["test_rmse"], rel=1e-5
    )

    rows[:, 1] += 0.5
    rows[:100, 3] = window_tasks.CATEGORIES
    found, _ = watch(prices, table=str(window_tasks.write_rows(tmp_path / "other.csv", rows)))
    assert moved(found) >= {"input 1", "input 3"}
    assert not moved(found) & {"input 0", "input 2"}


def test_rows_with_a_gap_are_left_out_and_named_up_to_a_tenth(prices: Gate, tmp_path: Path) -> None:
    rows, _ = window_tasks.draw_rows(300, 7)
    others = window_tasks.write_rows(tmp_path / "whole.csv", np.delete(rows, 50, axis=0))
    whole, _ = watch(prices, table=str(others))
    rows[50, 2] = np.nan
    found, watched = watch(prices, table=str(window_tasks.write_rows(tmp_path / "gap.csv", rows)))
    assert (found.samples, found.bad) == (299, 1)
    assert watched.bad.names == {"row row 50": "column 2 is nan"}
    assert found.columns == whole.columns
    rows[:31, 1] = np.nan
    with pytest.raises(
        UserError, match=r"gap.csv: 32 of 300 samples cannot be decoded or predicted, and at most a tenth"
    ):
        watch(prices, table=str(window_tasks.write_rows(tmp_path / "gap.csv", rows)))


def test_whole_numbers_are_floats_where_the_model_takes_floats(prices: Gate, tmp_path: Path) -> None:
    """An hourly file may have no other numbers."""
    rows = np.rint(window_tasks.draw_rows(100, 8)[0])
    table = tmp_path / "whole.csv"
    lines = (f"row {place},{','.join(str(int(each)) for each in row)}\n" for place, row in enumerate(rows))
    table.write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_tasks, "float", int, raising=False)  # prepare then returns whole numbers
        found, watched = watch(prices, table=str(table))
    assert found.samples == 100
    weights = torch.load(prices.runs["good"].model, weights_only=True)
    expected = rows @ weights["weight"].double().numpy()[0] + weights["bias"].item()
    np.testing.assert_allclose(watched.columns["prediction"], expected, rtol=1e-4, atol=1e-5)


def test_the_verdict_does_not_depend_on_the_windows_size(prices: Gate, tmp_path: Path) -> None:
    """A shift below the floor, which 20,000 samples would make as significant as one likes."""
    rows, _ = window_tasks.draw_rows(20_000, 4)
    rows[:, 0] += 0.1
    table = str(window_tasks.write_rows(tmp_path / "rows.csv", rows))
    found, again = (watch(prices, table=table)[0] for _ in range(2))
    assert found.samples == 20_000
    assert not found.moved
    assert replace(found, time="") == replace(again, time="")
    [column] = [each for each in found.columns if each.column == "input 0"]
    assert column.p > 1e-6, "1,000 of them are compared"


def test_the_same_samples_are_the_same_window_where_outputs_are_rounded_otherwise(
    prices: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by other numbers of threads."""
    tables = [
        str(window_tasks.write_rows(tmp_path / f"{seed}.csv", window_tasks.draw_rows(100, seed)[0])) for seed in (6, 7)
    ]
    found, other = (watch(prices, table=table)[0] for table in tables)
    compute = SavedModel.compute_outputs
    monkeypatch.setattr(SavedModel, "compute_outputs", lambda model, inputs: compute(model, inputs) * (1 + 1e-6))
    again, watched = watch(prices, table=tables[0])
    assert watched.columns["prediction"].any()
    assert again.digest == found.digest != other.digest


def test_what_is_wrong_is_told(prices: Gate, tmp_path: Path) -> None:
    rows, _ = window_tasks.draw_rows(100, 5)
    table = str(window_tasks.write_rows(tmp_path / "rows.csv", rows))
    for change, words in (
        (
            {"table": str(window_tasks.write_rows(tmp_path / "few.csv", rows[:, :3]))},
            r"has float \[3\], .* the model accepts",
        ),
        ({"table": str(window_tasks.write_rows(tmp_path / "empty.csv", rows[:0]))}, "at least one sample, got"),
        ({"images": "x"}, "give exactly one of the three"),
        ({"table": ""}, "give exactly one of the three"),
        ({"truth": str(tmp_path / "none.csv")}, "truth='.*none.csv': cannot be read"),
        ({"truth": table}, "must be CSV in UTF-8 with the columns id and truth"),
        ({"table": "", "images": str(tmp_path / "nothing")}, "nothing: must be a folder of images"),
    ):
        with pytest.raises(UserError, match=words):
            watch(prices, **{"table": table, **change})
    (tmp_path / "truth.csv").write_text("id,truth\nrow 0,much\n")
    with pytest.raises(UserError, match=re.escape("could not convert string to float: 'much'; give a number for each")):
        watch(prices, table=table, truth=str(tmp_path / "truth.csv"))


def test_a_champion_of_before_has_no_reference(digits_gate: Gate, tmp_path: Path) -> None:
    gate = Gate(digits_gate.runs, Registry(str(tmp_path / "registry"), "digits"), digits_gate.data, tmp_path)
    judged = gate.judge("good")
    version = store_version(gate.registry, *judged.model.files, judged.verdict, {})
    with pytest.raises(UserError, match="digits has no champion; promote a version first"):
        watch(gate, dataset="digits")
    promote_version(gate.registry, version.name, "a test", by="me")
    with pytest.raises(UserError, match=f"version {version.name[:12]} of digits has no reference.npz"):
        watch(gate, dataset="digits")


def test_a_score_that_is_worse_in_two_windows_is_an_alarm_also_where_its_truth_comes_later(
    prices: Gate, tmp_path: Path
) -> None:
    """The prices have changed, and no column has. Truths are not filled in yet, then some are, then all."""
    registry = Registry(str(tmp_path / "registry"), "model")
    gate = Gate(prices.runs, registry, prices.data, tmp_path)
    gate.release("good")
    entry = require_champion(registry)

    def monitor(seed: int, known: int) -> tuple[Window, WatchedModel]:
        rows, truth = window_tasks.draw_rows(400, seed)
        truth = truth + np.where(np.arange(400) % 2, 0.8, -0.8)
        table = window_tasks.write_rows(tmp_path / "rows.csv", rows)
        lines = [f"row {place},{each if place < known else 'nan'}\n" for place, each in enumerate(truth)]
        (tmp_path / "truth.csv").write_text("".join(["id,truth\n", *lines]))
        found, watched = watch(gate, table=str(table), truth=str(tmp_path / "truth.csv"))
        return record_window(registry, entry, found), watched

    first, _ = monitor(11, 0)
    assert (first.truths, first.score, first.worse_p, first.alarm) == (0, None, None, False)
    some, _ = monitor(11, 20)
    assert (some.number, some.truths, some.score) == (1, 20, None)
    every, _ = monitor(11, 400)
    assert (every.number, every.truths, every.worse, every.alarm) == (1, 400, True, False)
    assert every.score is not None
    assert every.score > 1.3 * every.held_out
    assert every.worse_p is not None
    assert every.worse_p <= 0.01
    assert every.describe().startswith("no alarm yet (an alarm needs 2 of 3 windows): RMSE is ")
    second, watched = monitor(12, 400)
    assert (second.number, second.worse, second.alarm) == (2, True, True)
    windows = read_windows(registry, entry)
    assert windows == [every, second]
    with pytest.raises(
        UserError, match=r"rows.csv: alarm: RMSE is .*, and was .* on the held-out samples; see the page"
    ):
        raise_alarm(found=second, window=WindowSource(table="rows.csv"))
    page = write_window_page(second, watched, windows, "x", tmp_path / "x").read_text()
    assert "<h1>x: Alarm</h1>" in page
    assert page.count("<svg") == 2


def test_the_truth_of_a_champion_of_before_is_compared_with_its_score_alone(digits_gate: Gate, tmp_path: Path) -> None:
    """An accuracy by Fisher's test, because both numbers of samples are known."""
    gate = Gate(digits_gate.runs, Registry(str(tmp_path / "registry"), "digits"), digits_gate.data, tmp_path)
    judged = gate.judge("good")
    assert judged.challenger is not None
    described = judged.challenger.monitoring_columns
    np.savez_compressed(tmp_path / "reference.npz", np.array([*described]), *described.values())
    beside = {"reference.npz": tmp_path / "reference.npz"}
    version = store_version(gate.registry, *judged.model.files, judged.verdict, beside)
    promote_version(gate.registry, version.name, "a test", by="me")
    classes = write_digits(gate, tmp_path / "in")
    right = round(judged.verdict.challenger_score * 297)
    for wrong, worse in ((0, False), (60, True)):
        truths = [(each + (place < wrong)) % 10 for place, each in enumerate(classes)]
        (tmp_path / "truth.csv").write_text("id,truth\n" + "".join(f"{p:03}.png,{t}\n" for p, t in enumerate(truths)))
        found, _ = watch(gate, images=str(tmp_path / "in"), truth=str(tmp_path / "truth.csv"))
        now = round(found.score * 297)
        expected = fisher_exact([[now, 297 - now], [right, 297 - right]], alternative="less").pvalue
        assert (found.worse_p, found.worse) == (pytest.approx(expected), worse)


@pytest.mark.parametrize("how", ["raises", "few", "other"])
def test_a_release_does_not_depend_on_what_is_described(
    how: str, prices: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same model, of an objective whose own answers fail, is released by the same verdict; the reason is told."""
    monkeypatch.chdir(HELPERS)
    weights, sidecar = (prices.runs["good"].run_folder / name for name in ("model.pt", "model.json"))
    changed, objective = read_sidecar(sidecar), "window_tasks:Silent"
    hyperparameters = {**changed.hyperparameters, "objective": objective, "test_batch_size": 250}
    options = {"objective": {"how": how}}
    changed = replace(changed, objective=objective, options=options, hyperparameters=hyperparameters)
    save_model(tmp_path / "model", torch.load(weights, weights_only=True), changed)
    gate = Gate({}, Registry(str(tmp_path / "registry"), "model"), prices.data, tmp_path)
    found, before = gate.release(tmp_path / "model"), prices.judge("good", may_promote=False)
    assert found.verdict.promotes, found.verdict.reason
    assert found.challenger is not None
    assert found.challenger.monitoring_error is not None
    assert ("Traceback" in capfd.readouterr().err) == (how == "raises")
    assert before.challenger is not None
    assert found.verdict.challenger_score == pytest.approx(before.challenger.score)
    with pytest.raises(UserError, match=r"has no reference.npz: .* answers failed"):
        watch(gate, table="x")


def test_an_interval_is_of_the_measure_or_there_is_none() -> None:
    random = np.random.default_rng(0)
    for shape, intervals in (((), True), ((1,), True), ((2,), False)):
        objective = make_objective("regression", Facts(target_shape=shape), {})
        outputs, targets = (torch.tensor(random.normal(size=(100, *shape))) for _ in range(2))
        columns = compute_batch_columns(objective, outputs, targets, 100)
        found = measure_samples_with_truth(objective, columns)
        expected = (outputs - targets).square().mean(0).sqrt().mean().item()
        assert (found.truths, found.score) == (100, pytest.approx(expected))
        assert (found.low is not None) == intervals
        if intervals:
            assert found.low < found.score < found.high
        same = measure_samples_with_truth(objective, compute_batch_columns(objective, targets + 1, targets, 100))
        assert same == Score(truths=100, score=pytest.approx(1))
        outputs[3] = torch.inf
        assert measure_samples_with_truth(objective, compute_batch_columns(objective, outputs, targets, 100)) == Score(
            truths=100
        )


def test_an_interval_of_a_share_ends_at_one() -> None:
    objective = make_objective("multilabel", Facts(("a", "b")), {})
    truth = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(50, 1)
    outputs = (truth - 0.5) * 9
    outputs[0, 0] = -1
    found = measure_samples_with_truth(objective, compute_batch_columns(objective, outputs, truth, 100))
    assert 0.9 < found.low < found.score < found.high == 1
