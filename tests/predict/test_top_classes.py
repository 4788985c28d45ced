"""Tables of predictions of more than 100 classes, which list the likeliest of each sample."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cli import ROOT, pyflyte
from PIL import Image
from predictions import predict_rows
from sidecars import make_sidecar
from torch import Tensor

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models import saving
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.objectives import Classification, Facts, Multilabel, Objective, Segmentation
from flyte_ddp.objectives.class_columns import make_unique_column_names
from flyte_ddp.predict.answer_table import is_limited_to_top_classes, make_answer_columns, mark_rows_with_nan

SPEC = InputSpec(channels=1, height=4, width=4, mean=(0.3,), std=(0.4,))
SOURCE = """
from torch import nn

def make(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))
"""


def name_classes(number: int) -> list[str]:
    return [f"class {place}" for place in range(number)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 12 images below ``images``, and the code of a model beside."""
    (tmp_path / "images").mkdir()
    (tmp_path / "model_of_many_classes.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    for place, image in enumerate(np.random.default_rng(0).integers(0, 256, (12, 4, 4), dtype=np.uint8)):
        Image.fromarray(image).save(tmp_path / f"images/{place:02d}.png")
    return tmp_path


def save(folder: Path, classes: int) -> tuple[Path, Path]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(classes, 16, generator=generator), torch.randn(classes, generator=generator)
    sidecar = make_sidecar(SPEC, "model_of_many_classes:make", classes=name_classes(classes))
    return saving.save_model(folder / "model", dict(zip(("1.weight", "1.bias"), weights, strict=True)), sidecar)


def expected_scores(model: tuple[Path, Path], folder: Path) -> Any:
    """Softmax [12, classes] of the images, in numpy's fp64."""
    state = {name: value.double().numpy() for name, value in torch.load(model[0], weights_only=True).items()}
    images = np.stack([np.asarray(Image.open(path)) for path in sorted((folder / "images").iterdir())])
    logits = (images.reshape(12, 16) / 255 - 0.3) / 0.4 @ state["1.weight"].T + state["1.bias"]
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def check_ranks(rows: list[dict[str, str]], scores: Any, ranks: int) -> None:
    named = [name for rank in range(1, ranks + 1) for name in (f"top_{rank}", f"score_top_{rank}")]
    assert [*rows[0]] == ["id", "prediction", "score", *named]
    order = np.argsort(-scores, axis=1)
    for row, places, of_row in zip(rows, order, scores, strict=True):
        assert [row[f"top_{rank + 1}"] for rank in range(ranks)] == [f"class {place}" for place in places[:ranks]]
        found = [float(row[f"score_top_{rank + 1}"]) for rank in range(ranks)]
        np.testing.assert_allclose(found, of_row[places[:ranks]], rtol=1e-4)
        assert (row["prediction"], row["score"]) == (row["top_1"], row["score_top_1"])


@pytest.mark.parametrize(("given", "ranks"), [({}, 5), ({"top_classes": 2}, 2), ({"top_classes": 500}, 101)])
def test_more_than_100_classes_are_listed_by_rank(folder: Path, given: dict[str, int], ranks: int) -> None:
    model = save(folder, 101)
    rows = predict_rows(*model, folder / "table.csv", images=folder / "images", batch_size=5, **given)
    check_ranks(rows, expected_scores(model, folder), ranks)


@pytest.mark.parametrize(("classes", "given"), [(100, {}), (101, {"top_classes": 0})])
def test_each_of_100_classes_has_a_column_and_of_more_on_demand(
    folder: Path, classes: int, given: dict[str, int]
) -> None:
    model = save(folder, classes)
    rows = predict_rows(*model, folder / "table.csv", images=folder / "images", **given)
    assert [*rows[0]] == ["id", "prediction", "score", *(f"score_{name}" for name in name_classes(classes))]
    found = [[float(row[f"score_{name}"]) for name in name_classes(classes)] for row in rows]
    np.testing.assert_allclose(found, expected_scores(model, folder), rtol=1e-4)


def test_a_negative_number_of_classes_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="top_classes=-1: must be at least 0"):
        predict_rows(*save(folder, 101), folder / "table.csv", images=folder / "images", top_classes=-1)


def test_an_image_that_cannot_be_decoded_has_empty_ranks(folder: Path) -> None:
    (folder / "images/00.png").write_bytes(b"no image")
    rows = predict_rows(*save(folder, 101), folder / "table.csv", images=folder / "images", bad_samples=1, batch_size=1)
    assert [bool(row["top_1"]) for row in rows] == [False] + [True] * 11
    assert {value for name, value in rows[0].items() if name != "id"} == {""}


def answer(outputs: Tensor, objective: Classification, ranks: int) -> dict[str, Any]:
    undefined = mark_rows_with_nan(outputs, len(outputs))
    model: Any = SimpleNamespace(objective=objective, sidecar=make_sidecar())
    return make_answer_columns(model, outputs, None, undefined, ranks)


def test_the_first_rank_is_the_prediction_whatever_the_outputs() -> None:
    objective, outputs = Classification(Facts(tuple(name_classes(200)))), torch.zeros(4, 200)
    outputs[1, 30] = torch.nan
    outputs[2, 40] = torch.inf
    outputs[3, [50, 60]] = 3.0
    found = answer(outputs, objective, 3)
    assert found["prediction"] == found["top_1"] == ["class 0", "", "class 40", "class 50"]
    assert found["prediction"] == [*map(str, answer(outputs, objective, 0)["prediction"])]
    assert (found["top_2"][1], found["top_2"][3]) == ("", "class 60")
    assert np.isnan(found["score_top_1"]).tolist() == [False, True, True, False]
    assert found["score_top_1"][3] == found["score_top_2"][3] > found["score_top_3"][3]


def test_names_of_columns_are_unique_where_names_of_classes_repeat() -> None:
    assert make_unique_column_names("score", ["a", "a", "b", "a"]) == ["score_a", "score_a'", "score_b", "score_a''"]


def test_labels_are_listed_by_their_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(6, 150, generator=generator), torch.zeros(6, 150)
    targets[0, [3, 140]], targets[1] = 1.0, torch.nan
    objective = Multilabel(Facts(tuple(name_classes(150)), (150,)))
    whole, found = objective.answers(outputs), objective.top_answers(outputs, 3)
    assert found["prediction"] == whole["prediction"]
    for row, logits in enumerate(outputs.double().numpy()):
        best = np.argsort(-logits)[:3]
        assert [found[f"top_{rank}"][row] for rank in (1, 2, 3)] == [f"class {place}" for place in best]
        listed = [found[f"probability_top_{rank}"][row] for rank in (1, 2, 3)]
        np.testing.assert_allclose(listed, 1 / (1 + np.exp(-logits[best])), rtol=1e-5)
    assert objective.top_truths(targets, 3) == {"truth": ["class 3, class 140", "unknown", *["none"] * 4]}


def test_a_masks_classes_are_listed_by_their_pixels() -> None:
    objective, outputs = Segmentation(Facts(tuple(name_classes(120)), (2, 4))), torch.zeros(2, 120, 2, 4)
    masks = torch.tensor([[[7, 7, 7, 7], [7, 99, 99, 0]], [[5, 5, 5, 5], [5, 5, 5, 5]]])
    found = objective.top_answers(outputs.scatter(1, masks[:, None], 1.0), 4)
    assert [found[f"top_{rank}"] for rank in range(1, 5)] == [
        *(["class 7", "class 5"], ["class 99", ""], ["class 0", ""], ["", ""])
    ]
    np.testing.assert_equal([found[f"share_top_{rank}"][0] for rank in range(1, 5)], [5 / 8, 2 / 8, 1 / 8, np.nan])
    masks[0, 0], masks[0, 1, 3], masks[1] = 255, 255, 255
    truths = objective.top_truths(masks, 2)
    assert (truths["truth_top_1"], truths["truth_top_2"]) == (["class 99", ""], ["class 7", ""])
    np.testing.assert_equal(truths["truth_share_top_1"], [2 / 3, np.nan])


@pytest.mark.parametrize(("kind", "shape"), [(Multilabel, (101,)), (Segmentation, (2, 4))])
def test_answers_and_truths_of_own_classes_keep_their_columns(kind: type[Objective], shape: tuple[int, ...]) -> None:
    class Own(kind):  # type: ignore[misc,valid-type]
        def truths(self, targets: Any) -> dict[str, list[str]]:
            return {"truth": ["mine"] * len(targets)}

    for classes, expected in ((101, (True, False)), (100, (False, False))):
        objective = Own(Facts(tuple(name_classes(classes)), shape))
        assert tuple(is_limited_to_top_classes(objective, method) for method in ("answers", "truths")) == expected


@pytest.mark.slow
def test_predict_wf_takes_the_number_of_classes(folder: Path) -> None:
    weights, sidecar = save(folder, 101)
    given = f"--model_state {weights} --sidecar {sidecar} --images {folder / 'images'} --top_classes 3".split()
    ended = pyflyte(
        "run", str(ROOT / "workflows/prediction.py"), "predict_wf", *given, home=folder / "home", PYTHONPATH=str(folder)
    )
    assert ended.exit_code == 0, ended.output
    [table] = (folder / "home/runs").glob("predictions-*/predictions.csv")
    with table.open(newline="") as file:
        check_ranks([*csv.DictReader(file)], expected_scores((weights, sidecar), folder), 3)
