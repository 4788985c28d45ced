"""The checks of a judgement, on simulated models whose truth is known; files that say which samples are a slice."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sidecars import TINY, make_sidecar

from benchmarks.simulated_models import Correct, answers
from flyte_ddp.core.errors import UserError
from flyte_ddp.objectives import Classification, Facts
from flyte_ddp.release import checks, vetoes
from flyte_ddp.release.evaluation import Evaluation
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.slices import group_by_slice
from flyte_ddp.release.statistics import compare_scores
from flyte_ddp.release.task import Task
from flyte_ddp.release.verdict import Check

LABELS = np.arange(10_000) % 10
NAMES = [f"class {number}" for number in range(10)]


def check_classes(
    challenger: Correct, champion: Correct, labels: np.ndarray, names: list[str], **policy: float
) -> tuple[Check, list[Check]]:
    one, other = (answers(correct, labels, len(names)) for correct in (challenger, champion))
    parts = {name: np.flatnonzero(labels == place) for place, name in enumerate(names)}
    pairs = {name: checks.compare_evaluations(one, other, part) for name, part in parts.items()}
    return vetoes.judge_parts_not_worse("class", pairs, Policy(**policy))


def test_a_class_that_loses_is_a_veto_that_names_it() -> None:
    random = np.random.default_rng(3)
    champion = random.random(len(LABELS)) < 0.85
    challenger = champion | (random.random(len(LABELS)) < 0.3)
    of_three = np.flatnonzero((LABELS == 3) & champion)
    challenger[of_three] = True
    challenger[of_three[:100]] = False  # 10 points of 1,000 samples
    challenger[(LABELS == 3) & ~champion] = False
    assert checks.judge_superior(compare_scores(challenger, champion, "accuracy"), 0.05).passed
    found, rows = check_classes(challenger, champion, LABELS, NAMES)
    assert not found.passed
    assert found.reason.startswith("class 'class 3' loses: -10.00 points")
    assert [row.name for row in rows if not row.passed] == ["class 3"]
    assert check_classes(challenger, champion, LABELS, NAMES, class_loss=0.11)[0].passed


def test_no_p_value_is_0() -> None:
    """Of 1,200 samples gained and none lost it is 2**-1200, which no float holds."""
    pair = compare_scores(np.ones(1200), np.zeros(1200), "accuracy")
    assert pair.p_value_of_gain() == 0
    found = checks.judge_superior(pair, 0.05)
    assert found.passed
    assert found.shown == "p < 1e-300"
    assert found.reason.startswith("+100.00 points: 1,200 samples gained and 0 lost of 1,200 (p < 1e-300, ")
    lost = check_classes(np.zeros(10_000, bool), np.ones(10_000, bool), LABELS, NAMES)[1][0]
    assert lost.shown == "-100.00 points, p < 1e-300"


def test_a_class_of_few_samples_is_only_shown() -> None:
    labels = np.array([0] * 29 + [1] * 40)
    found, rows = check_classes(labels == 1, np.ones(69, dtype=bool), labels, ["a", "b"])
    assert found.passed
    assert rows[0].reason == "only 29 samples"
    assert rows[0].shown.endswith("not tested")


def test_models_are_compared_only_on_the_same_task() -> None:
    """Their inputs' mean and deviation are the data sets', and do not matter."""
    sidecar = make_sidecar()
    task = Task.from_sidecar(sidecar)
    of_other_data = Task.from_sidecar(make_sidecar(replace(TINY, mean=(0.4,))))
    assert checks.judge_same_task(of_other_data, task).passed
    for name, other in {
        "objective": replace(sidecar, objective="multilabel"),
        "objective options": replace(sidecar, options={"objective": {"gamma": 2}}),
        "classes": replace(sidecar, classes=["b", "c"]),
        "target shape": replace(sidecar, target_shape=[2]),
        "input": make_sidecar(replace(TINY, channels=3)),
    }.items():
        assert f"the {name} changed" in checks.judge_same_task(Task.from_sidecar(other), task).reason
    assert checks.judge_same_task(Task.from_sidecar(replace(sidecar, classes=["b", "a"])), task).passed
    of_tokens = [Task.from_sidecar(make_sidecar(objective="language", classes=[*names])) for names in ("ba", "ab")]
    assert "the classes changed" in checks.judge_same_task(*of_tokens).reason, "their numbers are the model's input"


def test_likelihoods_and_scores_are_those_of_their_definitions() -> None:
    random = np.random.default_rng(5)
    logits = random.normal(size=(700, 4)).astype(np.float32)
    labels = random.integers(0, 4, 700)
    parts = (slice(0, 500), slice(500, 700))
    found = Evaluation.from_batches(
        Classification(Facts(tuple("abcd"))),
        ((torch.from_numpy(logits[part]), torch.from_numpy(labels[part]), len(labels[part])) for part in parts),
    )
    np.testing.assert_array_equal(found.columns["prediction"], logits.argmax(axis=1))
    scores = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(axis=1, keepdims=True)
    truth = np.eye(4)[labels]
    np.testing.assert_allclose(found.columns["nll"], -np.log((scores * truth).sum(axis=1)))
    np.testing.assert_allclose(found.columns["confidence"], scores.max(axis=1))


def test_a_rise_counts_where_it_is_large_and_no_chance() -> None:
    random = np.random.default_rng(6)
    before = random.normal(0.5, 0.2, 4000)

    def rises(after: np.ndarray, before: np.ndarray, limit: float) -> bool:
        pair = (SimpleNamespace(columns={"nll": torch.from_numpy(values)}) for values in (after, before))
        return not vetoes.judge_likelihood(*pair, Policy(nll_rise=limit)).passed

    assert rises(before + 0.1, before, 0.05)
    assert not rises(before + 0.01, before, 0.05), "small"
    assert not rises(random.normal(0.06, 5.0, 100), np.zeros(100), 0.01), "by chance"


def members(table: Path, ids: list[str], undecoded: tuple[str, ...] = ()) -> dict[str, list[int]]:
    return {name: found.tolist() for name, found in group_by_slice(str(table), ids, undecoded).items()}


def test_slices(tmp_path: Path) -> None:
    table = tmp_path / "slices.csv"
    table.write_bytes(b"\xef\xbb\xbfslice,id\r\nnight,2\r\nnight,0\r\n\r\nday,1\r\nrain,2\r\n")
    assert members(table, ["0", "1", "2"]) == {"night": [0, 2], "day": [1], "rain": [2]}
    assert members(table, ["0", "1"], ("2",)) == {"night": [0], "day": [1]}, "what cannot be decoded is in none"
    with pytest.raises(UserError, match="id '1' in line 5 is not in the test split; correct it"):
        members(table, ["0", "2"])
    for content, said in (
        (b"a,b\n0,1\n", "must be CSV in UTF-8 with the columns id and slice"),
        (b"id,slice\n0\n", "id '0' in line 2 has no slice; correct it"),
        (b"", "must be CSV in UTF-8 with the columns id and slice"),
        (b"\n", "must be CSV in UTF-8 with the columns id and slice"),
        (b"foo,bar\n", "must be CSV in UTF-8 with the columns id and slice \\(its first line is 'foo,bar'"),
        (b"id,slice\n", "has no rows, so no slice would be checked"),
        (b"id,slice\n0,day,2\n", "line 2 has more cells than the first line"),
        (b"id,slice\n0,n\xe4chts\n", "must be CSV in UTF-8"),
    ):
        table.write_bytes(content)
        with pytest.raises(UserError, match=said):
            members(table, ["0"])
