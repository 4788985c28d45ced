"""Data sets of rows by a user's class: what the library does with it, against scikit-learn by hand."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import own_tables
import pandas as pd
import pytest
from own_tables import Plans, read_plans, write_plans
from scipy.sparse import csr_matrix
from sklearn.preprocessing import StandardScaler

from flyte_ddp import Table, fetch, split_by_id
from flyte_ddp.core.errors import UserError
from flyte_ddp.datasets import SampleArrays, open_arrays
from flyte_ddp.datasets.table import load_table


def load(found: type[Table], source: Path) -> SampleArrays:
    return load_table("own:Data", found, str(source))


def make(**members: Any) -> type[Table]:
    """A table with other methods or values."""
    return type("Data", (Plans,), members)


def test_the_library_fits_to_the_training_rows_and_prepares_both_sides(tmp_path: Path) -> None:
    source = write_plans(tmp_path / "plans.csv", 300)
    folder = fetch("own_tables:Plans", str(source), tmp_path / "data", progress="off")
    found = open_arrays(folder)
    rows, targets, ids = read_plans(str(source))
    train, test = split_by_id(ids, 0.4)
    scaler = StandardScaler().fit(rows["size"][train, None])
    for side, places in (("train", train), ("test", test)):
        inputs = getattr(found, f"{side}_inputs")
        np.testing.assert_allclose(inputs["size"], scaler.transform(rows["size"][places, None]), rtol=1e-5)
        assert inputs["plan"].tolist() == ["bcde".index(plan) + 1 for plan in rows["plan"][places]]
        assert [found.classes[number] for number in getattr(found, f"{side}_targets")] == [targets[at] for at in places]
        assert getattr(found, f"{side}_ids").tolist() == [ids[at] for at in places]
        assert found.load_rows(side)["plan"].tolist() == rows["plan"][places].tolist()
    assert found.classes == ("no", "yes")
    assert found.preprocessing.rows == ["plan", "size"]


def test_ids_keep_their_side_when_rows_come_and_go() -> None:
    ids = [f"c{number}" for number in range(5000)]
    train, test = split_by_id(ids, 0.1)
    assert sorted([*train, *test]) == [*range(5000)]
    assert 430 < len(test) < 570, "four standard deviations around a tenth"
    tests = {ids[place] for place in test}
    fewer = ids[::-3]
    assert {fewer[place] for place in split_by_id(fewer, 0.1)[1]} == tests & {*fewer}
    numbers = pd.Series([7, 8, None, 9]).iloc[[0, 1, 3]]  # floats, as pandas makes them of ids with a gap
    assert split_by_id(numbers, 0.5)[0].tolist() == split_by_id([7, 8, 9], 0.5)[0].tolist()
    with pytest.raises(UserError, match=r"test=1\.5: must be .* between 0 and 1"):
        split_by_id(ids, 1.5)


def test_rows_stay_as_they_were_read_where_own_code_changes_them(tmp_path: Path) -> None:
    def fit(self: Any, rows: Any, targets: Any) -> Any:
        rows["size"] *= 0
        targets[:] = 0
        return Plans.fit(self, rows, targets)

    def prepare(self: Any, fitted: Any, rows: Any) -> Any:
        rows["size"] -= 1000
        return Plans.prepare(self, fitted, rows)

    source = write_plans(tmp_path / "plans.csv", 100)
    found, plain = load(make(fit=fit, prepare=prepare), source), load(Plans, source)
    for side in ("train", "test"):
        np.testing.assert_array_equal(found.load_rows(side)["size"], plain.load_rows(side)["size"])
        assert getattr(found, f"{side}_targets").tolist() == getattr(plain, f"{side}_targets").tolist()


def test_what_is_kept_in_the_table_itself_is_not_there_for_prepare(tmp_path: Path) -> None:
    """Else each night's instance would make inputs of another fit, and no digest would tell."""

    def fit(self: Any, rows: Any, targets: Any) -> Any:
        self.sizes = StandardScaler().fit(rows["size"][:, None])
        return "something"

    def prepare(self: Any, fitted: Any, rows: Any) -> Any:
        return self.sizes.transform(rows["size"][:, None])

    with pytest.raises(AttributeError, match="sizes"):
        load(make(fit=fit, prepare=prepare), write_plans(tmp_path / "plans.csv", 60))


def test_equal_inputs_of_other_rows_are_another_data_set(tmp_path: Path) -> None:
    """As where each size is a power of two larger, which a scaler takes back to the bit."""
    first = write_plans(tmp_path / "first.csv", 100)
    lines = [line.split(",") for line in first.read_text().splitlines()]
    larger = [lines[0], *([name, plan, repr(float(size) * 1024), y] for name, plan, size, y in lines[1:])]
    (tmp_path / "second.csv").write_text("".join(",".join(line) + "\n" for line in larger))
    folders = [
        fetch("own_tables:Plans", str(tmp_path / f"{name}.csv"), tmp_path / name, progress="off")
        for name in ("first", "second")
    ]
    one, other = map(open_arrays, folders)
    np.testing.assert_array_equal(one.train_inputs["size"], other.train_inputs["size"])
    assert one.digest != other.digest


def test_rows_without_ids_are_divided_by_their_content(tmp_path: Path) -> None:
    source = write_plans(tmp_path / "plans.csv", 300)
    found = load(make(read=lambda self, source: read_plans(source)[:2]), source)
    assert found.train_ids is None
    lines = source.read_text().splitlines()
    source.write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")  # the other way round
    again = load(make(read=lambda self, source: read_plans(source)[:2]), source)
    sizes = [{*each.load_rows("test")["size"].tolist()} for each in (found, again)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("targets", "classes", "names", "numbers"),
    [
        (["hot", "cold", "hot"], (), ("cold", "hot"), [1, 0, 1]),
        ([True, False, True], (), ("False", "True"), [1, 0, 1]),
        ([10, 9, 10], (), ("9", "10"), [1, 0, 1]),
        ([1, 0, 1], ("low", "high"), ("low", "high"), [1, 0, 1]),
        (["high", "low", "high"], ("low", "high"), ("low", "high"), [1, 0, 1]),
        ([1, 0, 1], ("1", "0"), ("1", "0"), [0, 1, 0]),
        ([6, 5, 6], (6, 5), ("6", "5"), [0, 1, 0]),
        (pd.Series(["b", "a", "b"], dtype="category"), (), ("a", "b"), [1, 0, 1]),
        ([0.5, 1.5, 2.5], (), (), [0.5, 1.5, 2.5]),
    ],
)
def test_classes_go_by_name(targets: Any, classes: Any, names: Any, numbers: Any) -> None:
    def read(self: Any, source: str) -> Any:
        return {"x": np.arange(3.0)}, targets, ["a", "b", "c"]

    members = {
        "read": read,
        "fit": Table.fit,
        "prepare": lambda self, fitted, rows: rows["x"][:, None],
        "classes": classes,
    }
    found = load(make(**members, is_test=lambda self, rows, ids: np.array([False, False, True])), Path("any"))
    assert found.classes == names
    assert [*found.train_targets, *found.test_targets] == numbers


def mean_of_all(self: Any, fitted: Any, rows: Any) -> Any:
    return {"x": (rows["size"] - rows["size"].mean())[:, None]}


def number_plans(self: Any, fitted: Any, rows: Any) -> Any:
    """Fits in what it was given."""
    return {"x": np.array([[fitted.setdefault(plan, len(fitted))] for plan in rows["plan"]])}


def sparse_and_fitted_again(self: Any, fitted: Any, rows: Any) -> Any:
    return csr_matrix(StandardScaler().fit_transform(rows["size"][:, None]))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (
            {"prepare": mean_of_all},
            r"prepare\(\) returns different inputs for test row \d+",
        ),
        ({"prepare": lambda self, rows: rows}, r"prepare must accept \(self, fitted, rows\)"),
        ({"fit": lambda self, rows: rows}, r"fit must accept \(self, rows, targets\)"),
        ({"fit": lambda self, rows, targets: lambda row: row}, "cannot be pickled"),
        ({"read": lambda self, source: [1, 2]}, r"read\(\) returned int as rows; rows must be a frame"),
        ({"read": lambda self, source: ({"x": [1, 2]}, [0], None)}, r"read\(\) returned 2 rows but 1 targets"),
        ({"read": lambda self, source: ({"x": [1, 2]}, None, None)}, "returned no targets; training needs them"),
        ({"read": lambda self, source: ({"x": []}, [], None)}, r"read\(\) found no row in 'any'"),
        ({"read": lambda self, source: ({"x": [1, 2]}, ["a", None], None)}, "row 1 has no target"),
        ({"classes": ["no"]}, "the target 'yes' is not in classes = no"),
        ({"test": 0.0}, r"test=0\.0: must be .* between 0 and 1"),
        ({"test": 20}, r"test=20: must be .* between 0 and 1"),
        ({"is_test": lambda self, rows, ids: np.zeros(len(ids), bool)}, r"none of the \d+ rows is"),
        ({"fit": lambda self, rows, targets: None}, r"fit\(\) returned None; return the fitted object"),
        ({"read": lambda self, source: (csr_matrix(np.eye(3)), [0, 1, 0], None)}, "make sparse matrices in prepare"),
        (
            {"fit": lambda self, rows, targets: {}, "prepare": number_plans},
            r"returns different inputs for test row \d+",
        ),
        ({"prepare": sparse_and_fitted_again}, r"returns different inputs for test row \d+"),
        (
            {"is_test": lambda self, rows, ids: ids},
            r"is_test\(\) returned .*; must return a bool for each of the 30 rows",
        ),
    ],
)
def test_a_wrong_table_is_refused_by_a_sentence(
    members: dict[str, Callable[..., Any]], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        load(make(**members), write_plans(tmp_path / "any", 30).relative_to(tmp_path))
    assert "\n" not in caught.value.message


def test_a_missing_number_is_named_by_row_and_column(tmp_path: Path) -> None:
    source = write_plans(tmp_path / "plans.csv", 30)
    lines = source.read_text().splitlines()
    cells = lines[1].split(",")
    source.write_text("\n".join([lines[0], ",".join([*cells[:2], "", cells[3]]), *lines[2:]]) + "\n")
    with pytest.raises(UserError, match=r"dataset='own:Data': (train|test)_inputs\['size'\]: row \d+ \(id '0-0'\)"):
        load(Plans, source)


def test_own_exceptions_go_through_with_their_type(tmp_path: Path) -> None:
    def fail(self: Any, rows: Any, targets: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        load(make(fit=fail), write_plans(tmp_path / "plans.csv", 30))


def test_texts_of_any_length_are_rows(tmp_path: Path) -> None:
    """A tokenizer that was fitted, and inputs of different lengths."""

    class Texts(Table):
        test = 0.5

        def read(self, source: str) -> Any:
            with Path(source).open() as file:
                rows = [*csv.reader(file)]
            return [row[0] for row in rows], [row[1] for row in rows], None

        def fit(self, rows: Any, targets: Any) -> Any:
            return {
                word: place for place, word in enumerate(sorted({word for text in rows for word in text.split()}), 1)
            }

        def prepare(self, fitted: Any, rows: Any) -> Any:
            return [np.array([fitted.get(word, 0) for word in text.split()]) for text in rows]

    (tmp_path / "texts.csv").write_text("".join(f"{'good ' * (n % 3 + 1)}day {n},{'ab'[n % 2]}\n" for n in range(40)))
    found = load(Texts, tmp_path / "texts.csv")
    assert found.train_samples + found.test_samples == 40
    texts = found.load_rows("test")
    assert [len(found.test_inputs[place]) for place in range(len(texts))] == [len(text.split()) for text in texts]
    assert json.loads(json.dumps(found.preprocessing.to_json_value()))["rows"] == ["row"]
    assert own_tables.Plans is Plans
