"""New rows of a table, prepared by what was fitted for the training: against scikit-learn and the saved weights."""

import base64
import csv
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from predictions import predict_rows
from sidecars import make_sidecar
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from training_runs import QUIET, train_in

from flyte_ddp import Hyperparameters, UserError, arrays, fetch, load_model, read_new_rows
from flyte_ddp.core.user_code.stored import StoredSpec
from flyte_ddp.models.preprocessing import pack_preprocessing
from flyte_ddp.run import Result

CODE = """
import csv
import numpy as np
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import nn
from flyte_ddp import arrays

def read(source):
    with open(source) as file:
        rows = [*csv.DictReader(file)]
    table = np.array([[float(row["age"] or "nan"), row["city"]] for row in rows], dtype=object)
    return table, [row["id"] for row in rows], np.array([int(row.get("bought", 0)) for row in rows])

def data(source):
    table, ids, bought = read(source)
    scaled = make_pipeline(SimpleImputer(), StandardScaler())
    fitted = make_column_transformer((scaled, [0]), (OneHotEncoder(handle_unknown="ignore"), [1])).fit(table[:60])
    sides = [(fitted.transform(table[part]), bought[part], ids[part]) for part in (slice(60), slice(60, None))]
    return arrays(*sides, preprocessing=fitted, prepare=prepare)

def prepare(fitted, source):
    table, ids, _ = read(source)
    return fitted.transform(table), ids

def model(num_classes, input_shape):
    return nn.Linear(*input_shape, num_classes)
"""
HP = Hyperparameters(
    dataset="shop:data", model="shop:model", epochs=2, batch_size=20, num_ranks=1, optimizer="adamw",
    learning_rate=0.05, precision="fp32",
)  # fmt: skip
CITIES = ["Bern", "Oslo", "Roma"]


def write_table(path: Path, rows: list[tuple[str, str, str, int]]) -> Path:
    with path.open("w") as file:
        csv.writer(file).writerows([("id", "age", "city", "bought"), *rows])
    return path


def draw_rows() -> list[tuple[str, str, str, int]]:
    """80 rows of customers; every seventh age is missing."""
    random = np.random.default_rng(0)
    ages = ["" if place % 7 == 3 else f"{random.normal(40, 9):.3f}" for place in range(80)]
    return [(f"customer {place}", age, CITIES[place % 3], place % 3 % 2) for place, age in enumerate(ages)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The working directory, with the user's module and a table, and what a training on it made."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(CODE)
    source = str(write_table(folder / "table.csv", draw_rows()))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        hp = replace(HP, data_source=source)
        data = fetch(hp.dataset, source, folder / "data", progress="off")
        yield folder, data, train_in(folder / "run", hp, data)


def predict(result: Result, output: Path, **given: Any) -> list[dict[str, str]]:
    return predict_rows(result.model, result.sidecar, output, settings=QUIET, **given)


def test_new_rows_are_prepared_as_the_training_rows_were(shop: Any, tmp_path: Path) -> None:
    """Three rows far from the training's mean, one with a missing age, one with a city that nobody knows."""
    _, _, result = shop
    rows = [("a", "90", "Oslo", 0), ("b", "", "Roma", 0), ("c", "71.5", "Atlantis", 0)]
    found = predict(result, tmp_path / "out.csv", table=write_table(tmp_path / "new.csv", rows))

    known = np.array([[float(age or "nan"), city] for _, age, city, _ in draw_rows()[:60]], dtype=object)
    scaled = make_pipeline(SimpleImputer(), StandardScaler())
    fitted = make_column_transformer((scaled, [0]), (OneHotEncoder(handle_unknown="ignore"), [1])).fit(known)
    new = np.array([[float(age or "nan"), city] for _, age, city, _ in rows], dtype=object)
    weights = torch.load(result.model, weights_only=True)
    inputs = torch.tensor(fitted.transform(new).astype(np.float32))
    expected = (inputs @ weights["weight"].T + weights["bias"]).softmax(1)
    assert [row["id"] for row in found] == ["a", "b", "c"]
    scores = torch.tensor([[float(row["score_0"]), float(row["score_1"])] for row in found])
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)

    model, sidecar = load_model(result.model, result.sidecar)
    own, ids = read_new_rows(sidecar, tmp_path / "new.csv")
    assert ids is not None
    assert ids.tolist() == ["a", "b", "c"]
    torch.testing.assert_close(model(torch.from_numpy(own)).softmax(1), expected, rtol=1e-5, atol=1e-6)


def test_test_samples_have_the_users_ids_in_predictions_and_report(shop: Any, tmp_path: Path) -> None:
    _, data, result = shop
    names = [row[0] for row in draw_rows()[60:]]
    of_split = predict(result, tmp_path / "split.csv", dataset=data)
    assert [row["id"] for row in of_split] == names
    shown = re.findall(r"customer \d+", result.report.read_text())
    assert shown
    assert {*shown} <= {*names}
    rows = write_table(tmp_path / "again.csv", draw_rows()[60:])
    again = predict(result, tmp_path / "again-out.csv", table=rows)
    assert again == [{name: value for name, value in row.items() if name != "truth"} for row in of_split]


def changed(result: Result, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of the sidecar with a change."""
    sidecar = json.loads(result.sidecar.read_text())
    change(sidecar)
    (folder / "model.json").write_text(json.dumps(sidecar))
    return folder / "model.json"


def test_a_preprocessing_that_cannot_be_used(shop: Any, tmp_path: Path) -> None:
    _, _, result = shop
    content = b"cnowhere\nThing\n."
    elsewhere = {"pickle": base64.b64encode(content).decode(), "sha256": hashlib.sha256(content).hexdigest()}
    cases: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (
            lambda sidecar: sidecar.pop("preprocessing"),
            "the model has no preprocessing; derive the data set from flyte_ddp.Table",
        ),
        (lambda sidecar: sidecar["preprocessing"].update(sha256="0" * 64), "preprocessing in model.json is damaged"),
        (lambda sidecar: sidecar["preprocessing"].update(elsewhere), "'nowhere'.*saved with torch .*scikit-learn 1"),
    ]
    for change, words in cases:
        sidecar = changed(result, tmp_path, change)
        with pytest.raises(UserError, match=words):
            predict(replace(result, sidecar=sidecar), tmp_path / "out.csv", table=tmp_path / "new.csv")


def rows_of(fitted: Any, source: Any) -> Any:
    """A ``prepare`` of a module."""


def test_what_cannot_be_handed_over_is_told_when_arrays_is_called() -> None:
    side = np.ones((2, 1)), [0, 1]
    with pytest.raises(UserError, match=r"preprocessing: cannot be pickled .*lambda"):
        arrays(side, side, preprocessing=lambda row: row, prepare=rows_of)
    with pytest.raises(UserError, match=r"prepare=.*must be a function defined in a module"):
        arrays(side, side, prepare=lambda *rows: rows)


def scaled_rows(_: Any, source: Any) -> Any:
    return np.full((2, 1), np.nan), source


@pytest.mark.parametrize(
    ("ids", "words"), [(["a"], "rows'.*: ids has 1 samples, .*: inputs has 2"), ([b"a", "é"], r"row 0 \(id 'a'\)")]
)
def test_new_rows_that_do_not_fit_are_told(ids: list[Any], words: str) -> None:
    packed = pack_preprocessing(1, scaled_rows, {})
    with pytest.raises(UserError, match=words):
        read_new_rows(make_sidecar(preprocessing=packed), ids)


FITTED = """
class Scale:
    def apply(self, rows):
        return rows * {factor}

def prepare(scale, rows):
    return scale.apply(rows), None
"""


def test_a_fitted_object_has_the_code_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class is today's nowhere: neither where it is unpickled nor in what it does."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_scale.py").write_text(FITTED.format(factor=3))
    module = importlib.import_module("own_scale")
    packed = pack_preprocessing(module.Scale(), module.prepare, {})
    (tmp_path / "own_scale.py").write_text(FITTED.format(factor=7).replace("apply", "scale"))
    stored = StoredSpec(packed.prepare, {"own_scale.py": FITTED.format(factor=3)})
    monkeypatch.delitem(sys.modules, "own_scale")
    inputs, _ = read_new_rows(make_sidecar(preprocessing=replace(packed, prepare=stored)), np.ones((2, 1)))
    assert inputs.tolist() == [[3.0], [3.0]]
