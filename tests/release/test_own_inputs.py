"""The gate gives each model inputs of its own preprocessing: against predictions of the saved weights by hand."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from gate import Gate
from own_tables import PLANS, Model, read_plans, write_plans
from scipy.stats import binomtest
from sidecars import make_sidecar
from torch.nn import functional
from training_runs import train_in

from flyte_ddp import Hyperparameters, Table, UserError, fetch, split_by_id
from flyte_ddp.objectives import Classification, Facts
from flyte_ddp.predict.prediction_batches import SavedModel, reorder_targets
from flyte_ddp.release import checks, vetoes
from flyte_ddp.release.evaluation import Evaluation
from flyte_ddp.release.policy import COMPARE, Policy
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.samples import match_samples
from flyte_ddp.release.task import Task
from flyte_ddp.run import Result

HP = Hyperparameters(
    dataset="own_tables:Plans", model="own_tables:Model", epochs=6, batch_size=64, num_ranks=1, optimizer="adamw",
    learning_rate=0.03, precision="fp32",
)  # fmt: skip
POLICY = Policy(export="off")


def train(folder: Path, table: Path, **changes: object) -> Result:
    hp = replace(HP, **changes)
    data = fetch(hp.dataset, str(table), folder / "data", progress="off")
    return train_in(folder / "run", hp, data)


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs: a good model, and a crippled one of the next night, when a row of a new plan came."""
    folder = tmp_path_factory.mktemp("nights")
    tables = {"first": write_plans(folder / "first.csv"), "second": write_plans(folder / "second.csv", first="a")}
    for kind, dataset in (("table", "own_tables:Plans"), ("arrays", "own_tables:plans_by_arrays")):
        train(folder / f"{kind}-first", tables["first"], dataset=dataset)
        train(folder / f"{kind}-second", tables["second"], dataset=dataset, model="own_tables:Crippled")
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def gate(tmp_path: Path, nights: dict[str, Path]) -> Iterator[Gate]:
    return Gate({}, Registry(str(tmp_path / "registry"), "plans"), nights["table-first"] / "data", tmp_path)


def count_right(run: Path, table: Path, trained_on: Path) -> tuple[int, int]:
    """Of the test rows that were none of the training: right predictions of the saved weights, coded by hand."""
    rows, targets, ids = read_plans(str(table))
    _, tests = split_by_id(ids, 0.4)
    _, known, known_ids = read_plans(str(trained_on))
    training, _ = split_by_id(known_ids, 0.4)
    assert not {ids[place] for place in tests} & {known_ids[place] for place in training}, "the split is stable"
    assert known is not None
    sizes = read_plans(str(trained_on))[0]["size"][training]
    model = Model(2, {"size": (1,)})
    model.load_state_dict(torch.load(run / "model.pt", weights_only=True))
    codes = torch.tensor([PLANS.find(plan) + 1 for plan in rows["plan"]])
    size = torch.tensor((rows["size"] - sizes.mean()) / sizes.std(), dtype=torch.float32)[:, None]
    found = model(codes, size).argmax(1).numpy()
    truth = np.array([target == "yes" for target in targets])
    return int((found == truth)[tests].sum()), len(tests)


def test_a_worse_model_is_kept_back_though_each_code_moved(gate: Gate, nights: dict[str, Path]) -> None:
    first = gate.release(nights["table-first"] / "run", policy=POLICY).verdict
    assert first.promotes
    right, samples = count_right(nights["table-first"] / "run", nights["first.csv"], nights["first.csv"])
    assert (first.challenger_score, first.samples) == (pytest.approx(right / samples), samples)
    found = gate.release(nights["table-second"] / "run", nights["table-second"] / "data", POLICY).verdict
    right, samples = count_right(nights["table-first"] / "run", nights["second.csv"], nights["first.csv"])
    assert (found.champion_score, found.samples) == (pytest.approx(right / samples), samples)
    assert found.decision == "keep"
    assert found.challenger_score < 0.8 < found.champion_score
    assert found.champion_at_release == first.challenger_score
    assert f"had {first.challenger_score:.2%}".replace("%", "") in found.outcome
    [check] = [check for check in found.checks if check.name.startswith("champion's answers")]
    assert check.passed
    assert check.value == 1.0, "the same answers on the same rows"


def test_without_rows_nothing_is_compared_with_another_fit(gate: Gate, nights: dict[str, Path]) -> None:
    data = nights["arrays-first"] / "data"
    assert gate.release(nights["arrays-first"] / "run", data, POLICY).verdict.promotes
    found = gate.release(nights["arrays-second"] / "run", nights["arrays-second"] / "data", POLICY).verdict
    assert found.decision == "no_comparison"
    mine, theirs = (
        json.loads((nights[name] / "run/model.json").read_text())["preprocessing"]["sha256"][:12]
        for name in ("arrays-first", "arrays-second")
    )
    assert f"made with preprocessing {theirs}, but the model was trained with preprocessing {mine}" in found.reason
    assert "flyte_ddp.Table" in found.reason
    again = gate.judge(nights["arrays-first"] / "run", data, POLICY).verdict
    assert "champion's weights" in again.reason, "by the same fit models are compared"


def test_the_same_rows_are_the_same_test_split_whatever_was_fitted(tmp_path: Path, nights: dict[str, Path]) -> None:
    """Else each night would be the first look at another test split."""
    table = write_plans(tmp_path / "grown.csv")
    _, _, ids = read_plans(str(table))
    _, tests = split_by_id(ids, 0.4)
    lines = table.read_text().splitlines()
    training = next(place for place in range(len(ids)) if place not in tests)
    moved = lines[training + 1].split(",")
    lines[training + 1] = ",".join([moved[0], "z", "5000", moved[3]])
    table.write_text("\n".join(lines) + "\n")
    data = fetch(HP.dataset, str(table), tmp_path / "data", progress="off")
    before, now = (json.loads((each / "dataset.json").read_text()) for each in (nights["table-first"] / "data", data))
    assert before["test_digest"] == now["test_digest"]
    assert before["digest"] != now["digest"]
    assert before["preprocessing"]["sha256"] != now["preprocessing"]["sha256"]


class Halves(Table):
    """The first half of a file is for training."""

    def read(self, source: str) -> object:
        return read_plans(source)

    def is_test(self, rows: object, ids: list[str]) -> object:
        return np.arange(len(ids)) >= len(ids) // 2


def test_rows_that_the_champion_was_trained_on_are_left_out(
    gate: Gate, nights: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a split that moves: the next night's file begins with new rows, and the champion's rows are tests."""
    import own_tables

    halves = type("Halves", (own_tables.Plans,), {"is_test": Halves.is_test, "__module__": "own_tables"})
    monkeypatch.setattr(own_tables, "Halves", halves, raising=False)
    first, second = write_plans(tmp_path / "1.csv", 600), write_plans(tmp_path / "2.csv", 200, seed=1)
    second.write_text(second.read_text() + "\n".join(first.read_text().splitlines()[1:]) + "\n")
    runs = [train(tmp_path / table.stem, table, dataset="own_tables:Halves") for table in (first, second)]
    assert gate.release(runs[0].run_folder, tmp_path / "1/data", POLICY).verdict.promotes
    # 800 rows, of which the last 400 are tests: 600 - 400 = 200 of these are not the champion's last 300, its tests.
    found = gate.judge(runs[1].run_folder, tmp_path / "2/data", POLICY)
    assert (found.verdict.seen, found.verdict.samples) == (100, 300)
    [check] = [check for check in found.verdict.checks if check.name == "training samples of the champion"]
    assert "100 of 400 test samples (25.0%)" in check.reason
    assert "excluded" in check.reason
    right = found.champion
    assert right is not None
    assert right.samples == 300
    assert [*right.ids] == [f"0-{row}" for row in range(300, 600)]
    kept = gate.judge(runs[1].run_folder, tmp_path / "2/data", replace(POLICY, seen_samples=COMPARE)).verdict
    assert (kept.seen, kept.samples) == (0, 400)


def train_points(folder: Path, source: str, **changes: object) -> Path:
    """A run on points whose classes are numbered as ``source`` says."""
    own = {"dataset": "own_tables:coded", "model": "own_tables:points_model", "num_ranks": 1, "precision": "fp32"}
    hp = Hyperparameters(**{**own, "epochs": 4, "optimizer": "adamw", "learning_rate": 0.02, **changes})
    data = fetch(hp.dataset, source, folder / f"data-{source}", progress="off")
    return train_in(folder / f"run-{source}", hp, data).run_folder


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; ``data_source`` names empty files there."""
    monkeypatch.chdir(tmp_path)
    for source in ("0-bare-cold", "0-bare-hot", "1-bare-hot", "0-named-cold", "0-named-hot"):
        Path(source).write_text("")
    return tmp_path


def test_numbers_that_changed_places_compare_nothing(gate: Gate, points: Path) -> None:
    """Classes without names: on the same samples, and on others, which the constant answer tells."""
    first = gate.release(train_points(points, "0-bare-cold"), points / "data-0-bare-cold", POLICY).verdict
    assert first.promotes
    found = gate.judge(train_points(points, "0-bare-hot"), points / "data-0-bare-hot", POLICY).verdict
    assert found.decision == "no_comparison"
    assert found.champion_score == pytest.approx(1 - first.challenger_score)
    assert found.look == 0, "no look is spent"
    passed = {check.name: check.passed for check in found.checks}
    assert not passed["champion's answers on samples of its release"]
    assert not passed["champion not below a constant answer"]
    elsewhere = gate.judge(train_points(points, "1-bare-hot"), points / "data-1-bare-hot", POLICY).verdict
    assert elsewhere.decision == "no_comparison"
    shown = {check.name: check for check in elsewhere.checks}
    assert shown["champion's answers on samples of its release"].shown == "no sample in common"
    assert "below a constant answer" in shown["champion not below a constant answer"].reason
    assert found.constant_score == pytest.approx(max(first.constant_score or 0, 1 - (first.constant_score or 0)))


def test_named_classes_in_another_order_are_compared(gate: Gate, points: Path) -> None:
    first = gate.release(train_points(points, "0-named-cold"), points / "data-0-named-cold", POLICY).verdict
    assert first.promotes
    found = gate.judge(train_points(points, "0-named-hot", epochs=1), points / "data-0-named-hot", POLICY)
    assert found.verdict.champion_score == pytest.approx(first.challenger_score)
    assert found.verdict.decision == "keep"
    by_name = {check.name: check for check in found.verdict.checks}
    assert by_name["objective, classes and input"].passed
    assert by_name["champion's answers on samples of its release"].value == 1.0


def test_a_champion_that_never_was_above_a_constant_answer_blocks_nothing() -> None:
    """As a person may have promoted it, such as for rare classes."""
    objective = Classification(Facts(("a", "b")))
    truth = torch.tensor([0] * 90 + [1] * 10)
    logits = functional.one_hot(1 - truth, 2).float() * 5
    found = Evaluation.from_batches(objective, [(logits, truth, 100)])
    for was_above, passed in ((True, False), (False, True)):
        check = checks.judge_champion_above_constant(found, was_above=was_above)
        assert check is not None
        assert check.passed is passed
        assert "90.00" in check.reason


def test_answers_are_compared_as_mcnemars_test_does() -> None:
    random = np.random.default_rng(0)
    then = (random.random(400) < 0.9).astype(float)
    now = then.copy()
    now[:12] = 1 - now[:12]
    gained, lost = int((now > then).sum()), int((now < then).sum())
    check = checks.judge_repeated_answers(then, now, classifies=True)
    assert check.value == pytest.approx(binomtest(gained, gained + lost).pvalue)
    assert check.passed
    now[:40] = 0
    assert not checks.judge_repeated_answers(then, now, classifies=True).passed
    losses = -random.exponential(size=400)
    noisy = losses * (1 + random.uniform(-0.005, 0.005, 400))
    assert checks.judge_repeated_answers(losses, noisy, classifies=False).value == 1.0, "rounding is no change"
    assert not checks.judge_repeated_answers(losses, losses * 1.5, classifies=False).passed


def test_labels_and_masks_are_compared_by_the_names_of_their_classes() -> None:
    names = SimpleNamespace(classes=["a", "b", "c"])
    labels = torch.tensor([[1.0, 0.0, float("nan")]])
    ordered = reorder_targets(cast("SavedModel", names), "own", ["c", "a", "b"], labels)
    np.testing.assert_array_equal(ordered, [[0.0, float("nan"), 1.0]])
    masks = torch.tensor([[[0, 1], [2, 255]]])
    assert reorder_targets(cast("SavedModel", names), "own", ["c", "a", "b"], masks).tolist() == [[[2, 0], [1, 255]]]
    with pytest.raises(UserError, match="classes or labels c, a, d, but the model has a, b, c"):
        reorder_targets(cast("SavedModel", names), "own", ["c", "a", "d"], labels)


def test_equal_weights_with_another_fit_are_not_the_champion(
    gate: Gate, nights: dict[str, Path], tmp_path: Path
) -> None:
    """Two models of equal weights would serve rows otherwise; one of them would be lost in the registry."""
    run = nights["table-first"] / "run"
    gate.release(run, policy=POLICY)
    sidecar = json.loads((run / "model.json").read_text())
    sidecar["preprocessing"]["sha256"] = "0" * 64
    sidecar["digests"]["data"] = "0" * 64
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.pt").write_bytes((run / "model.pt").read_bytes())
    (other / "model.json").write_text(json.dumps(sidecar))
    found = gate.judge(other, policy=POLICY)
    assert "other preprocessing" in found.verdict.reason
    assert found.verdict.decision == "no_comparison"
    with pytest.raises(UserError, match="already in the registry, with another preprocessing"):
        gate.release(other, policy=POLICY)


def test_samples_are_matched_where_they_are_unique() -> None:
    """Of rows that occur twice nobody knows which is which; an id on both sides names no sample."""
    then, now = match_samples(np.array([5, 3, 3, 9, 7], np.uint64), np.array([9, 9, 3, 5, 1], np.uint64))
    assert (then.tolist(), now.tolist()) == ([0], [3])


def of_scores(truth: list[int], scores: list[float], measure: str) -> Evaluation:
    logits = torch.tensor(scores).logit()
    both = torch.stack([torch.zeros_like(logits), logits], 1)
    objective = Classification(Facts(("no", "yes"), select_by=measure))
    return Evaluation.from_batches(objective, [(both, torch.tensor(truth), len(truth))])


@pytest.mark.parametrize("measure", ["accuracy", "f1", "balanced_accuracy"])
def test_a_class_is_compared_by_what_is_right(measure: str) -> None:
    """Whatever the measure of all samples is: 20 of 40 rare ones are lost, and 30 of the others are gained."""
    truth = [1] * 40 + [0] * 60
    champion = of_scores(truth, [0.9] * 40 + [0.9] * 30 + [0.1] * 30, measure)
    challenger = of_scores(truth, [0.9] * 20 + [0.1] * 20 + [0.1] * 60, measure)
    pair = vetoes.compare_part(challenger, champion, np.arange(40))
    assert (pair.gained, pair.lost, pair.difference) == (0, 20, -0.5)
    check, _ = vetoes.judge_parts_not_worse("class", {"yes": pair}, Policy())
    assert not check.passed
    assert vetoes.is_judged_by_predictions(challenger.objective)
    assert not vetoes.is_judged_by_predictions(of_scores(truth, [0.9] * 100, "auroc").objective)


def test_another_positive_class_is_another_task() -> None:
    task = Task.from_sidecar(make_sidecar(classes=["no", "yes"]))
    for values, passed in (
        (dict[str, Any](), True),
        ({"hyperparameters": {"select_by": "auroc"}}, True),
        ({"hyperparameters": {"select_by": "f1"}}, False),
        ({"threshold": 0.2}, False),
    ):
        assert (
            checks.judge_same_task(Task.from_sidecar(make_sidecar(classes=["yes", "no"], **values)), task).passed
            is passed
        )
