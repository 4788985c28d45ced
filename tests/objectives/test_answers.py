"""What each objective shows people, after real runs: pages and tables against scikit-learn and the model's outputs."""

import base64
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import objective_tasks as tasks
import pytest
import torch
from cli import HELPERS
from PIL import Image
from predictions import predict_rows
from report_page import Page
from sklearn import metrics
from training_runs import QUIET, train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.models.sidecar import read_sidecar
from flyte_ddp.datasets import SampleArrays, open_arrays
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.models.artifacts import load_model
from flyte_ddp.objectives import make_objective_of_saved_model
from flyte_ddp.report.page import color_table
from flyte_ddp.run import Result

pytestmark = pytest.mark.slow

Floats = np.ndarray[Any, Any]
FLAT, PIXELS = {"model": "objective_tasks:flat"}, {"model": "objective_tasks:pixels"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "multilabel": ("labels", {**FLAT, "objective": "multilabel", "class_weights": "1,2,0.5"}),
    "regression": ("numbers", {**FLAT, "objective": "regression"}),
    "number": ("number", {**FLAT, "objective": "regression"}),
    "segmentation": ("masks", {**PIXELS, "objective": "segmentation"}),
    "focal": ("classes", {**FLAT, "objective": "objective_tasks:focal", "options": '{"model": {"width": 4}}'}),
    "plain": ("numbers", {**FLAT, "objective": "objective_tasks:Plain"}),
}


class Finished(NamedTuple):
    """A run, its page, and what its model gives for the test split."""

    result: Result
    arrays: SampleArrays
    data: Path
    page: Page
    outputs: Floats
    truth: Floats

    def table(self, title: str) -> list[list[str]]:
        """Return the rows of the table below a headline, without its header."""
        html = self.result.report.read_text()
        part = html[html.index(f"<h2>{title}</h2>") :]
        return Page(part[part.index("<table") : part.index("</table>") + 8]).rows()[1:]

    def predict(self, folder: Path) -> list[dict[str, str]]:
        """Return the rows of the table of predictions of the test split, written into ``folder``."""
        options = {"dataset": self.data, "batch_size": 7, "settings": QUIET}
        return predict_rows(self.result.model, self.result.sidecar, folder / "table.csv", **options)


def finish(arrays: SampleArrays, folder: Path, given: dict[str, Any]) -> Finished:
    (folder / "data").mkdir(parents=True)
    write_prepared_set(arrays, folder / "data", {"source": "a test"})
    opened = open_arrays(folder / "data")
    common: dict[str, Any] = {"epochs": 3, "batch_size": 8, "num_ranks": 1, "precision": "fp32", "learning_rate": 0.02}
    hp = Hyperparameters(**common, dataset=arrays.name or "objective_tasks:labels", log_interval=1, **given)
    result = train_in(folder / "run", hp, folder / "data")
    model, _ = load_model(result.model, result.sidecar)
    inputs = (opened.test_inputs / 255 - np.array(opened.mean)) / np.array(opened.std)
    with torch.no_grad():
        outputs = model(torch.from_numpy(inputs.transpose(0, 3, 1, 2)).float())
    outputs = outputs["out"] if isinstance(outputs, dict) else outputs
    page = Page(result.report.read_text())
    return Finished(result, opened, folder / "data", page, outputs.double().numpy(), np.array(opened.test_targets))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """Return a function that trains a case, once."""
    runs: dict[str, Finished] = {}

    def train(name: str) -> Finished:
        if name not in runs:
            dataset, given = CASES[name]
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(HELPERS)
                runs[name] = finish(getattr(tasks, dataset)(""), tmp_path_factory.mktemp("run"), given)
        return runs[name]

    return train


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HELPERS)


def sigmoid(values: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-values)))


def test_labels_have_a_row_each_with_scikit_learns_measures(finished: Callable[[str], Finished]) -> None:
    run = finished("multilabel")
    scores = sigmoid(run.outputs)
    columns: list[list[float]] = []
    for k in range(3):
        known = ~np.isnan(run.truth[:, k])
        truth, score = run.truth[known, k] == 1, scores[known, k]
        measured = [metrics.f1_score(truth, score >= 0.5), metrics.roc_auc_score(truth, score)]
        measured.append(metrics.average_precision_score(truth, score))
        measured.append(metrics.balanced_accuracy_score(truth, score >= 0.5))
        columns.append(measured)
        row = run.table("Labels")[k]
        assert row[:3] == [tasks.CLASSES[k], str(known.sum()), str(truth.sum())]
        assert row[3:] == [f"{value:.4f}" for value in measured]
    means = np.mean(columns, axis=0)
    assert [*run.result.measures] == ["f1", "auroc", "average_precision", "balanced_accuracy", "loss"]
    assert [*run.result.measures.values()][:4] == pytest.approx(means, rel=1e-6)
    shown = run.page.tiles()["Test F1"]
    assert float(shown[0]) == pytest.approx(means[0], abs=1e-4)
    rest = f"AUROC {means[1]:.4g}, average precision {means[2]:.4g}, balanced accuracy {means[3]:.4g}"
    assert shown[1].endswith(rest), "it may begin with the best constant answer's"
    assert run.page.texts("h3")[:5] == ["Loss", "F1", "AUROC", "Average precision", "Balanced accuracy"]
    assert "binary cross-entropy (nats)" in "".join(run.page.texts("text"))
    [first, *_] = ["".join(card) for card in run.page.pieces("mistake")]
    weight = np.array([1, 2, 0.5]) * ~np.isnan(run.truth)
    losses = np.logaddexp(0, run.outputs) - run.outputs * np.nan_to_num(run.truth)
    means = (losses * weight).sum(1) / np.where(weight.any(1), weight.sum(1), np.inf)
    worst = int(means.argmax())
    said = ", ".join(np.array(tasks.CLASSES)[scores[worst] >= 0.5]) or "none"
    there = ", ".join(np.array(tasks.CLASSES)[run.truth[worst] == 1]) or "none"
    assert first == f"prediction {said}truth {there}loss {means[worst]:.4g}sample {worst}"


def test_numbers_have_their_errors_and_charts(finished: Callable[[str], Finished]) -> None:
    run = finished("regression")
    truths, outputs = run.truth.reshape(len(run.truth), -1), run.outputs
    rows = run.table("Errors")
    assert len(rows) == truths.shape[1]
    functions = metrics.root_mean_squared_error, metrics.mean_absolute_error, metrics.r2_score
    measured = []
    for k, row in enumerate(rows):
        known = ~np.isnan(truths[:, k])
        truth, predicted = truths[known, k].astype(float), outputs[known, k]
        measured.append([function(truth, predicted) for function in functions])
        residuals = predicted - truth
        values = [*measured[-1], residuals.mean()]
        assert row[:2] == [f"number {k}", str(known.sum())]
        assert [float(cell) for cell in row[2:]] == pytest.approx(values, abs=6e-5)
    assert [*run.result.measures.values()][:3] == pytest.approx(np.mean(measured, axis=0), rel=1e-5)
    assert run.result.measures["rmse"] == run.result.test_accuracy
    assert float(run.page.tiles()["Test RMSE"][0]) == pytest.approx(run.result.test_accuracy, rel=1e-3)
    assert "image" in {tag for tag, *_ in run.page.elements}, "of the points"
    assert "squared error" in "".join(run.page.texts("text"))


def test_classes_of_pixels_have_their_iou_and_pictures_their_masks(finished: Callable[[str], Finished]) -> None:
    run = finished("segmentation")
    predicted, counts = run.outputs.argmax(1), run.truth != 255
    truth, guess = run.truth[counts], predicted[counts]
    found = metrics.jaccard_score(truth, guess, average=None)
    for k, row in enumerate(run.table("Classes")):
        pixels = [(truth == k).sum(), (guess == k).sum(), ((truth == k) & (guess == k)).sum()]
        assert row == [tasks.CLASSES[k], f"{found[k]:.4f}", *map(str, pixels)]
    assert run.result.measures["miou"] == pytest.approx(found.mean(), abs=1e-12)
    assert run.page.tiles()["Test mean IoU"][1] == f"pixel accuracy {(truth == guess).mean():.4g}"
    assert [*map(str.strip, run.page.pieces("legend")[0])] == [*tasks.CLASSES]
    cards = run.page.pieces("mistake")
    assert 0 < len(cards) <= min(16, counts.any((1, 2)).sum())
    sources = [found["src"] for tag, found, _ in run.page.elements if tag == "img"]
    for place, card in enumerate(cards):
        sample = int(card[-1].removeprefix("sample "))
        masks = [read_image_pixels(source) for source in sources[3 * place + 1 : 3 * place + 3]]
        times = masks[0].shape[0] // tasks.SIDE
        for mask, expected in zip(masks, (run.truth[sample], predicted[sample]), strict=True):
            large = np.kron(expected, np.ones((times, times), int))
            assert np.array_equal(mask[large != 255], color_table(3)[large[large != 255]])
            grey = mask[large == 255]
            assert (grey == 220).all()


def read_image_pixels(uri: str) -> Floats:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,")))))


def test_own_objectives_have_the_page_of_their_base(finished: Callable[[str], Finished]) -> None:
    run = finished("focal")
    right = (run.outputs.argmax(1) == run.truth).sum()
    assert run.page.tiles()["Test accuracy"][1] == f"{right} of {tasks.TEST} correct"
    assert {"Confusion matrix", "Worst mistakes"} <= {*run.page.texts("h2")}
    assert "cross-entropy" not in "".join(run.page.texts("text"))
    plain = finished("plain")
    assert [*plain.page.tiles()][:2] == ["Test loss", "Duration"]
    assert [*plain.result.measures] == ["loss"]
    assert plain.result.epoch_accuracies[-1] == plain.result.test_accuracy == plain.result.measures["loss"]
    losses = np.abs(plain.outputs - np.nan_to_num(plain.truth)).sum(1)
    cards = ["".join(card) for card in plain.page.pieces("mistake")]
    worst = (-losses).argsort()[:16]
    assert [card.partition("loss ")[2] for card in cards] == [f"{losses[k]:.4g}sample {k}" for k in worst]


def test_tables_of_predictions_have_the_answers_of_each_objective(
    finished: Callable[[str], Finished], tmp_path: Path
) -> None:
    def numbers(rows: list[dict[str, str]], *columns: str) -> Floats:
        return np.array([[float(row[column] or "nan") for column in columns] for row in rows])

    run = finished("multilabel")
    rows, scores = run.predict(tmp_path / "labels"), sigmoid(run.outputs)
    truths, probabilities = ([f"{kind}_{name}" for name in tasks.CLASSES] for kind in ("truth", "probability"))
    assert [*rows[0]] == ["id", "prediction", "truth", *truths, *probabilities]
    np.testing.assert_array_equal(numbers(rows, *truths), run.truth)
    np.testing.assert_allclose(numbers(rows, *probabilities), scores, rtol=2e-5)
    for row, score, truth in zip(rows, scores, run.truth, strict=True):
        assert row["prediction"] == (", ".join(np.array(tasks.CLASSES)[score >= 0.5]) or "none")
        there = "unknown" if np.isnan(truth).all() else "none"
        assert row["truth"] == (", ".join(np.array(tasks.CLASSES)[truth == 1]) or there)

    for name, columns in (("regression", ["prediction_0", "prediction_1"]), ("number", ["prediction"])):
        run = finished(name)
        rows = run.predict(tmp_path / name)
        truths = [column.replace("prediction", "truth") for column in columns]
        assert sorted(rows[0]) == sorted(["id", *columns, *truths])
        np.testing.assert_array_equal(numbers(rows, *truths).astype(np.float32), run.truth.reshape(len(rows), -1))
        np.testing.assert_allclose(numbers(rows, *columns), run.outputs, rtol=1e-5, atol=1e-6)

    run = finished("plain")
    rows = run.predict(tmp_path / "plain")
    assert [*rows[0]] == ["id", "truth_0", "truth_1", "output_0", "output_1"]
    np.testing.assert_allclose(numbers(rows, "output_0", "output_1"), run.outputs, rtol=1e-5, atol=1e-6)

    run = finished("focal")
    rows = run.predict(tmp_path / "focal")
    assert [row["prediction"] for row in rows] == [tasks.CLASSES[k] for k in run.outputs.argmax(1)]
    assert [row["truth"] for row in rows] == [tasks.CLASSES[k] for k in run.truth]

    run = finished("segmentation")
    rows, predicted = run.predict(tmp_path / "masks"), run.outputs.argmax(1)
    shares = np.stack([(predicted == k).mean((1, 2)) for k in range(3)], 1)
    np.testing.assert_allclose(numbers(rows, *(f"share_{name}" for name in tasks.CLASSES)), shares, rtol=1e-5)
    for row, mask in zip(rows, predicted, strict=True):
        with Image.open(tmp_path / "masks" / row["mask"]) as picture:
            assert picture.mode == "P"
            assert np.array_equal(np.asarray(picture), mask)
            assert np.array_equal(np.asarray(picture.convert("RGB")), color_table(3)[mask])


def test_a_folder_of_images_is_predicted_with_masks_that_have_its_names(
    finished: Callable[[str], Finished], tmp_path: Path
) -> None:
    run = finished("segmentation")
    for name, image in zip(("b.png", "a/b.png", "a.png"), run.arrays.test_inputs, strict=False):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(tmp_path / "in" / name)
    (tmp_path / "in/0.png").write_text("no image, and the first in a batch of its own")
    options = {"images": tmp_path / "in", "batch_size": 1, "bad_samples": 1, "settings": QUIET}
    rows = predict_rows(run.result.model, run.result.sidecar, tmp_path / "out/table.csv", **options)
    masks = [f"table.csv.masks/{name}.png" for name in ("a/b.png", "a.png", "b.png")]
    assert [row["mask"] for row in rows] == ["", *masks]
    assert [*rows[0]] == ["id", "share_a", "share_b", "share_c", "mask"]
    for row, sample in zip(rows[1:], (1, 2, 0), strict=True):
        assert np.array_equal(read_mask(tmp_path / "out" / row["mask"]), run.outputs[sample].argmax(0))


def read_mask(path: Path) -> Floats:
    with Image.open(path) as picture:
        return np.asarray(picture)


def test_a_measure_that_is_not_defined_is_a_dash_and_null(tmp_path: Path, capfd) -> None:
    """No sample has a label, so that neither F1 nor the others are defined: the run goes on, by its loss."""
    arrays = tasks.labels("")
    for labels in (arrays.train_targets, arrays.test_targets):
        labels[labels == 1] = 0
    given = {**FLAT, "objective": "multilabel", "keep": "best", "select_by": "f1"}
    (tmp_path / "data").mkdir()
    write_prepared_set(arrays, tmp_path / "data", {"source": "a test"})
    hp = Hyperparameters(epochs=2, batch_size=8, num_ranks=1, dataset="objective_tasks:labels", **given)
    result = train_in(tmp_path / "run", hp, tmp_path / "data", progress="lines")
    assert all(map(math.isnan, (result.test_accuracy, *result.epoch_accuracies, result.measures["auroc"])))
    assert result.measures["loss"] > 0
    for path in (result.metrics, result.sidecar):
        for line in path.read_text().splitlines() if path == result.metrics else [path.read_text()]:
            json.loads(line, parse_constant=pytest.fail)
    page = Page(result.report.read_text())
    rest = "AUROC \N{EN DASH}, average precision \N{EN DASH}, balanced accuracy \N{EN DASH}"
    assert page.tiles()["Test F1"] == ("\N{EN DASH}", rest)
    assert "Not in the means, because no sample has the label: a, b, c." in "".join(page.texts("p"))
    assert "test F1 \N{EN DASH} (loss 0." in capfd.readouterr().err
    assert page.texts("h3")[0] == "Loss"
    assert "F1" not in page.texts("h3"), "no value to draw"


def test_a_loss_that_came_reduced_is_said(tmp_path: Path) -> None:
    run = finish(tasks.classes(""), tmp_path, {**FLAT, "objective": "objective_tasks:reduced"})
    said = "unless the number is the mean over samples, another number of ranks would give another result"
    assert [note for note in run.page.texts("li") if said in note]


def test_an_own_objective_that_cannot_describe_its_predictions_loses_no_training(tmp_path: Path) -> None:
    """Its table of predictions is refused, with what to do."""
    run = finish(tasks.numbers(""), tmp_path, {**FLAT, "objective": "objective_tasks:Mute"})
    [note] = [note for note in run.page.texts("li") if "could not describe" in note]
    assert "no words" in note
    assert len(run.page.pieces("mistake")) == 16
    objective = make_objective_of_saved_model(read_sidecar(run.result.sidecar))
    assert type(objective).__name__ == "Mute"
    with pytest.raises(ValueError, match="no words"):
        run.predict(tmp_path / "table")
