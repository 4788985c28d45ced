"""A model of a table predicts rows by its own fit on every path: against the saved weights and scikit-learn by hand."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from own_tables import Model, read_plans, write_plans
from predictions import predict_rows
from training_runs import QUIET, train_in

from flyte_ddp import Hyperparameters, UserError, fetch, load_model, load_preprocessing, read_new_rows, split_by_id
from flyte_ddp.run import Result

HP = Hyperparameters(
    dataset="own_tables:Plans", model="own_tables:Model", epochs=3, batch_size=64, num_ranks=1, optimizer="adamw",
    learning_rate=0.03, precision="fp32",
)  # fmt: skip
ROWS = 300


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("plans")
    source = write_plans(folder / "plans.csv", ROWS)
    return source, train_in(folder / "run", HP, fetch(HP.dataset, str(source), folder / "data", progress="off"))


def predict(result: Result, output: Path, **given: Any) -> list[dict[str, str]]:
    return predict_rows(result.model, result.sidecar, output, settings=QUIET, **given)


def compute_scores(trained: tuple[Path, Result], rows: dict[str, Any]) -> np.ndarray:
    """The probability of "yes", of the saved weights and of inputs that are scaled by hand."""
    sizes = read_plans(str(trained[0]))[0]["size"][split_by_id(read_plans(str(trained[0]))[2], 0.4)[0]]
    model = Model(2, {"size": (1,)})
    model.load_state_dict(torch.load(trained[1].model, weights_only=True))
    codes = torch.tensor(["bcde".find(plan) + 1 for plan in rows["plan"]])
    size = torch.tensor((rows["size"] - sizes.mean()) / sizes.std(), dtype=torch.float32)[:, None]
    return model(codes, size).softmax(1)[:, 1].detach().numpy()


def test_new_rows_and_the_same_rows_as_a_data_set_have_the_same_predictions(
    trained: tuple[Path, Result], tmp_path: Path
) -> None:
    """Also of a source whose own fit would be another one: each size is larger, and a plan is new."""
    source = write_plans(tmp_path / "new.csv", 200, seed=1, first="a")
    lines = [line.split(",") for line in source.read_text().splitlines()]
    moved = [lines[0], *([name, plan, f"{float(size) + 80}", y] for name, plan, size, y in lines[1:])]
    source.write_text("".join(",".join(line) + "\n" for line in moved))
    by_table = predict(trained[1], tmp_path / "table.csv", table=source)
    data = fetch(HP.dataset, str(source), tmp_path / "data", progress="off")
    by_data = {row["id"]: row for row in predict(trained[1], tmp_path / "data.csv", dataset=data)}
    rows, targets, ids = read_plans(str(source))
    expected = compute_scores(trained, rows)
    np.testing.assert_allclose([float(row["score_yes"]) for row in by_table], expected, rtol=1e-4)
    assert [row["id"] for row in by_table] == ids
    assert [row["truth"] for row in by_table] == targets, "which the file has"
    assert by_data.keys() == {ids[place] for place in split_by_id(ids, 0.4)[1]}
    for row in by_table:
        if other := by_data.get(row["id"]):
            assert (row["prediction"], row["truth"]) == (other["prediction"], other["truth"])
            assert float(row["score_yes"]) == pytest.approx(float(other["score_yes"]), rel=1e-4)


def test_rows_in_memory_are_prepared_by_name(trained: tuple[Path, Result], tmp_path: Path) -> None:
    rows, _, ids = read_plans(str(write_plans(tmp_path / "new.csv", 50, seed=1)))
    frame = pd.DataFrame({"size": rows["size"], "further": 1, "plan": rows["plan"]})
    preprocessing = load_preprocessing(trained[1].sidecar)
    model, sidecar = load_model(trained[1].model, trained[1].sidecar)
    for given in (rows, {name: frame[name].to_numpy() for name in frame}):
        inputs = preprocessing.prepare(given)
        found = model(**{name: torch.from_numpy(leaf) for name, leaf in inputs.items()}).softmax(1)[:, 1]
        np.testing.assert_allclose(found.detach().numpy(), compute_scores(trained, rows), rtol=1e-4)
    read, names = read_new_rows(sidecar, str(tmp_path / "new.csv"))
    assert names is not None
    assert names.tolist() == ids
    np.testing.assert_array_equal(read["size"], inputs["size"])
    with pytest.raises(UserError, match=r"prepare: the column size is missing; the rows have plan;"):
        preprocessing.prepare({"plan": rows["plan"]})


def test_files_without_targets_in_other_orders_and_with_other_types(
    trained: tuple[Path, Result], tmp_path: Path
) -> None:
    source = write_plans(tmp_path / "new.csv", 40, seed=1, columns="size id plan")
    found = predict(trained[1], tmp_path / "out.csv", table=source)
    assert "truth" not in found[0]
    rows = read_plans(str(source))[0]
    np.testing.assert_allclose([float(row["score_yes"]) for row in found], compute_scores(trained, rows), rtol=1e-4)


def blank(source: Path, places: tuple[int, ...], column: int) -> Path:
    with source.open() as file:
        lines = [*csv.reader(file)]
    for place in places:
        lines[place + 1][column] = ""
    source.write_text("".join(",".join(line) + "\n" for line in lines))
    return source


def test_rows_that_cannot_be_used_are_left_out_at_their_places(trained: tuple[Path, Result], tmp_path: Path) -> None:
    source = blank(write_plans(tmp_path / "new.csv", 60, seed=1), (0, 7, 59), column=2)
    with pytest.raises(UserError) as caught:
        predict(trained[1], tmp_path / "out.csv", table=source)
    assert "3 of 60 rows cannot be predicted, for example 1-0: column 0 is nan; " in caught.value.message
    assert "bad_samples=3" in caught.value.message
    found = predict(trained[1], tmp_path / "out.csv", table=source, bad_samples=3, batch_size=7)
    assert [row["id"] for row in found] == [f"1-{row}" for row in range(60)]
    assert [row["id"] for row in found if not row["prediction"]] == ["1-0", "1-7", "1-59"]
    rows = read_plans(str(source))[0]
    usable = np.delete(np.arange(60), [0, 7, 59])
    expected = compute_scores(trained, {name: values[usable] for name, values in rows.items()})
    np.testing.assert_allclose([float(found[place]["score_yes"]) for place in usable], expected, rtol=1e-4)
    assert [row["truth"] for row in found[1:7]] == read_plans(str(source))[1][1:7]
    everything = blank(source, tuple(range(60)), column=2)
    with pytest.raises(UserError, match="60 of 60 rows cannot be predicted"):
        predict(trained[1], tmp_path / "out.csv", table=everything, bad_samples=60)


def test_truths_that_are_not_filled_in_are_unknown(trained: tuple[Path, Result], tmp_path: Path) -> None:
    source = blank(write_plans(tmp_path / "new.csv", 20, seed=1), (3, 4), column=3)
    found = predict(trained[1], tmp_path / "out.csv", table=source)
    assert [row["id"] for row in found if not row["truth"]] == ["1-3", "1-4"]
    assert "Correct" in (tmp_path / "out.html").read_text()
    assert "of 18," in (tmp_path / "out.html").read_text(), "of those that are known"
    source.write_text(source.read_text().replace("yes", "maybe"))
    with pytest.raises(UserError, match=r"the target 'maybe' is not a class of the model .no, yes"):
        predict(trained[1], tmp_path / "out.csv", table=source)


def test_another_fit_without_rows_is_refused(trained: tuple[Path, Result], tmp_path: Path) -> None:
    """A set of ``arrays`` that fits anew, and one that has fitted nothing."""
    source = write_plans(tmp_path / "new.csv", 60, seed=1)
    data = fetch("own_tables:plans_by_arrays", str(source), tmp_path / "data", progress="off")
    with pytest.raises(UserError, match=r"its inputs were made with preprocessing \w{12}, .* the model was trained"):
        predict(trained[1], tmp_path / "out.csv", dataset=data)
    description = json.loads((data / "dataset.json").read_text())
    (data / "dataset.json").write_text(json.dumps({**description, "preprocessing": {}}))
    with pytest.raises(UserError, match=r"made with no preprocessing"):
        predict(trained[1], tmp_path / "out.csv", dataset=data)


OWN = """
from flyte_ddp import Table
import own_tables
class Data(own_tables.Plans):
    def prepare(self, fitted, rows):
        inputs = super().prepare(fitted, rows)
        return {"plan": inputs["plan"], "size": inputs["size"] * FACTOR}
FACTOR = 1
"""


def test_rows_are_prepared_by_the_code_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what was fitted is the same today, and only the code differs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_plans.py").write_text(OWN)
    source = write_plans(tmp_path / "plans.csv", ROWS)
    hp = replace(HP, dataset="own_plans:Data")
    trained = source, train_in(tmp_path / "run", hp, fetch(hp.dataset, str(source), tmp_path / "data", progress="off"))
    (tmp_path / "own_plans.py").write_text(OWN.replace("FACTOR = 1", "FACTOR = -1"))
    rows, _, ids = read_plans(str(source))
    tests = split_by_id(ids, 0.4)[1]
    expected = compute_scores(trained, rows)
    found = predict(trained[1], tmp_path / "out.csv", table=source)
    np.testing.assert_allclose([float(row["score_yes"]) for row in found], expected, rtol=1e-4)
    of_data = predict(trained[1], tmp_path / "out.csv", dataset=tmp_path / "data")
    np.testing.assert_allclose([float(row["score_yes"]) for row in of_data], expected[tests], rtol=1e-4)
