"""What is found in samples that are no images, whose faults are known."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import plain_sets
import pytest
from encoded_runs import quiet
from own_tables import write_plans

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading import workers
from flyte_ddp.datasets import arrays, fetch
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.validation.leaf_statistics import count_by_range, describe_range
from flyte_ddp.validation.profile import DataProfile, render_profile
from flyte_ddp.validation.profiling import check_profile, compute_profile, iterate_differences_from_champion

RANDOM = np.random.default_rng(0)
HP = Hyperparameters(dataset="tables:own")


def profile_of(data: SampleArrays, folder: Path) -> DataProfile:
    folder.mkdir()
    write_prepared_set(data, folder, {})
    found = compute_profile(folder)
    assert DataProfile.from_json(found.to_json()) == found
    return found


def problems(found: DataProfile, hp: Hyperparameters = HP) -> list[str]:
    with pytest.raises(UserError) as raised:
        check_profile(found, hp, max_duplicates=0.01, max_conflicts=0.01)
    return [line.removeprefix("dataset='tables:own': ") for line in str(raised.value).splitlines()]


def test_numbers_are_counted_as_one_by_one() -> None:
    numbers = np.array([0.0, -0.0, 1, 2, 2.5, -3, 1e-3, np.nan, np.inf, -np.inf, 0.5, np.nan])
    assert count_by_range(numbers) == Counter(describe_range(number + 0.0) for number in numbers.tolist())


def test_faults_of_a_table_are_refused_with_their_samples(tmp_path: Path) -> None:
    rows = RANDOM.normal(size=(40, 3)).astype(np.float32)
    rows[34], rows[5] = rows[4], rows[6]
    classes = np.arange(40) % 2
    data = arrays((rows[:30], classes[:30]), (rows[30:], classes[30:]), classes=["a", "b", "c"])
    data.train_inputs[25, 1], data.test_inputs[1, 0] = np.nan, np.inf  # which arrays() itself would refuse
    found = profile_of(data, tmp_path / "data")
    assert found.training.labels == {"0": 15, "1": 15}
    assert found.training.statistics["types of inputs"] == {"float32 [3]": 30}
    assert found.training.statistics["column 2 of inputs"] == Counter(map(describe_range, rows[:30, 2].tolist()))
    unusable, *empty, twins, conflicts = problems(found)
    assert unusable.startswith(
        "2 samples with NaN or infinity: test sample 1 (inputs), training sample 25 (inputs); remove"
    )
    assert [problem.partition(";")[0] for problem in empty] == [
        f"no {split} sample is of class c" for split in ("training", "test")
    ]
    assert "such as test sample 4 and training sample 4; remove them" in twins
    assert "such as training sample 5 (label 1) and training sample 6 (label 0); correct the labels" in conflicts
    assert (found.duplicates, found.conflicts) == (1, 2)


@pytest.mark.parametrize(
    ("targets", "kind", "counts"),
    [
        (np.array([3.5, np.nan, -5, 0], np.float32), "numbers", {"2 to 4": 1, "nan": 1, "-8 to -4": 1, "0": 1}),
        (np.array([[1, 0], [1, 1], [np.nan, 1], [0, 0]], np.float32), "labels", {"0": 2, "1": 2}),
        (np.array([[1, -100], [2, 3], [-100, -100], [0, 4]]), "tokens",
         {"1 to 2": 1, "2 to 4": 1, "0": 1, "4 to 8": 1}),
        ([np.array([1, 5]), np.array([2, -100, -100]), np.array([0]), np.array([0])], "tokens",
         {"1 to 2": 1, "4 to 8": 1, "2 to 4": 1, "0": 2}),
        ({"a": np.zeros(4), "b": np.ones((4, 2))}, "others", {}),
        (None, "others", {}),
    ],
)  # fmt: skip
def test_other_targets_than_classes(targets: Any, kind: str, counts: dict[str, int], tmp_path: Path) -> None:
    """Equal inputs with other targets are no conflict, unless these are labels; NaN is an unknown number."""
    equal = np.ones((4, 2, 3), np.int16)
    found = profile_of(arrays((equal, targets), (equal + 1, targets)), tmp_path / "data")
    assert found.target_shape == [*getattr(targets, "shape", ())[1:]]
    assert (found.targets, found.training.labels, found.not_finite) == (kind, counts, 0)
    assert bool(found.conflicts) == (kind == "labels")
    if kind == "tokens":
        assert problems(found, Hyperparameters(dataset="tables:own", objective="language", num_classes=4))[0] in (
            "training sample 3 has token 4: must be 0..3 with 4 classes; correct the data, or set num_classes",
            "training sample 0 has token 5: must be 0..3 with 4 classes; correct the data, or set num_classes",
        )


def test_other_columns_and_lengths_are_told(tmp_path: Path) -> None:
    """A column that moved, and longer texts; the same source gives no warning."""

    def drawn(seed: int, shift: float = 0.0, longest: int = 8) -> SampleArrays:
        random = np.random.default_rng(seed)
        rows = random.normal(size=(400, 5))
        rows[:, 3] += shift
        texts = [np.full(random.integers(4, longest), random.integers(50)) for _ in range(400)]  # lengths alone differ
        inputs = {"row": rows, "text": texts}
        parts = [{name: leaf[part] for name, leaf in inputs.items()} for part in (slice(0, 300), slice(300, 400))]
        return arrays((parts[0], np.zeros(300, np.float32)), (parts[1], np.zeros(100, np.float32)))

    champion = profile_of(drawn(0), tmp_path / "champion")
    assert not [*iterate_differences_from_champion(profile_of(drawn(1), tmp_path / "same"), champion)]
    now = profile_of(drawn(2, shift=3, longest=40), tmp_path / "now")
    told = [each.text for each in iterate_differences_from_champion(now, champion)]
    assert {re.split(" differs? ", line)[0] for line in told} == {
        f"{split} split: {what}" for split in ("training", "test")
        for what in ("column 3 of inputs row", "lengths of inputs text")
    }  # fmt: skip
    page = render_profile(now, "own", told)
    assert "300 samples in 1 ranges of numbers of 300 to 300<" in page
    assert "lengths of inputs text" in page.lower()
    assert not any(word in page.partition("<body")[2].lower() for word in ("image", "picture", "pixel"))


def test_items_of_another_form_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no item that is measured with them is like the first one."""
    monkeypatch.setattr(workers, "POSSIBLE", False)
    data = fetch("plain_sets:rows_of_rows", "", tmp_path / "data", progress="off")
    with pytest.raises(
        UserError, match=r"training sample 64 has leaves of the dimensions .* and training sample 0 has \["
    ):
        compute_profile(data, quiet(tmp_path))


def test_ids_are_said_with_samples(tmp_path: Path) -> None:
    names = [f"p{place}" for place in range(8)]
    rows = np.arange(8.0).reshape(8, 1)
    data = arrays((rows, np.arange(8) % 2, names), (rows[3:4], [1], ["q"]), classes=["a", "b"])
    data.train_inputs[5] = np.nan
    found = profile_of(data, tmp_path / "data")
    assert found.bad == ["training sample 5 (id 'p5') (inputs)"]
    assert found.duplicated == ["test sample 0 (id 'q') and training sample 3 (id 'p3')"]


@pytest.mark.slow
def test_items_on_demand(tmp_path: Path) -> None:
    """Each is read in a loader process; one that changes between two looks is named."""
    found = compute_profile(fetch("plain_sets:texts", "", tmp_path / "texts", progress="off"), quiet(tmp_path))
    lengths = [len(plain_sets.Texts(0, 40)[sample]["tokens"]) for sample in range(40)]
    assert found.training.statistics["lengths of inputs tokens"] == Counter(map(describe_range, lengths))
    assert (found.training.labels, found.test.labels) == ({"0": 20, "1": 20}, {"0": 5, "1": 5})
    assert (found.duplicates, found.conflicts, found.bad) == (0, 0, [])
    changing = fetch("plain_sets:changing_texts", "", tmp_path / "changing", progress="off")
    with pytest.raises(UserError, match="changing_texts': test sample 9 has other content when read again"):
        compute_profile(changing, quiet(tmp_path))


def test_columns_of_rows_are_compared_as_they_were_read(tmp_path: Path) -> None:
    """By name, whatever was fitted: a unit that changed in a part of the rows, and a category that is new."""
    first = write_plans(tmp_path / "first.csv")
    champion = compute_profile(fetch("own_tables:Plans", str(first), tmp_path / "1", progress="off"))
    again = write_plans(tmp_path / "again.csv", seed=1)
    same = compute_profile(fetch("own_tables:Plans", str(again), tmp_path / "2", progress="off"))
    assert not [*iterate_differences_from_champion(same, champion)]
    lines = [line.split(",") for line in again.read_text().splitlines()]
    for place, line in enumerate(lines[1:]):
        line[1] = "z" if place % 4 == 0 else line[1]
        line[2] = f"{float(line[2]) * 1000}" if place % 11 == 0 else line[2]
    again.write_text("".join(",".join(line) + "\n" for line in lines))
    changed = compute_profile(fetch("own_tables:Plans", str(again), tmp_path / "3", progress="off"))
    found = {each.text.partition(" differs")[0]: each for each in iterate_differences_from_champion(changed, champion)}
    names = [f"{split} split: column {name}" for split in ("training", "test") for name in ("plan", "size")]
    assert sorted(found) == sorted(names)
    assert found["training split: column size"].share == pytest.approx(1 / 11, abs=0.03)
    assert "most in z: 2" in found["training split: column plan"].text
