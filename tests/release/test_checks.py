"""The checks of a judgement, on simulated models whose truth is known; files that say which samples are a slice."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.simulated_models import Correct, answers, changed_model
from flyte_ddp.errors import UserError
from flyte_ddp.objectives import Classification, Facts
from flyte_ddp.release import checks
from flyte_ddp.release.evaluation import Evaluation
from flyte_ddp.release.pairs import compare_scores
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.slices import group_by_slice
from flyte_ddp.release.verdict import Check
from flyte_ddp.release.versions import read_task

LABELS = np.arange(10_000) % 10
NAMES = [f"class {number}" for number in range(10)]


def check_classes(
    challenger: Correct, champion: Correct, labels: np.ndarray, names: list[str], **policy: float
) -> tuple[Check, list[Check]]:
    one, other = (answers(correct, labels, len(names)) for correct in (challenger, champion))
    parts = checks.group_by_class(one, names)
    pairs = {name: checks.compare_evaluations(one, other, part) for name, part in parts.items()}
    return checks.check_losses("class", pairs, Policy(**policy))


def test_a_class_that_loses_is_a_veto_that_names_it() -> None:
    random = np.random.default_rng(3)
    champion = random.random(len(LABELS)) < 0.85
    challenger = champion | (random.random(len(LABELS)) < 0.3)
    of_three = np.flatnonzero((LABELS == 3) & champion)
    challenger[of_three] = True
    challenger[of_three[:100]] = False  # 10 points of 1,000 samples
    challenger[(LABELS == 3) & ~champion] = False
    assert checks.check_superior(compare_scores(challenger, champion, "accuracy"), 0.05).passed
    found, rows = check_classes(challenger, champion, LABELS, NAMES)
    assert not found.passed
    assert found.reason.startswith("class 'class 3' loses: -10.00 points")
    assert [row.name for row in rows if not row.passed] == ["class 3"]
    assert check_classes(challenger, champion, LABELS, NAMES, class_loss=0.11)[0].passed


def test_a_class_of_few_samples_is_only_shown() -> None:
    labels = np.array([0] * 29 + [1] * 40)
    found, rows = check_classes(labels == 1, np.ones(69, dtype=bool), labels, ["a", "b"])
    assert found.passed
    assert rows[0].reason == "only 29 samples"
    assert rows[0].shown.endswith("not tested")


def test_small_losses_that_add_up_are_stopped_by_the_best_version_ever() -> None:
    """Each is within the margin of the champion before it."""
    random, best = np.random.default_rng(4), np.ones(10_000, dtype=bool)

    def degrade(*, anchored: bool) -> tuple[int, float]:
        """How many of 50 slightly worse models are promoted, and the accuracy of the last champion."""
        champion, promotions = best, 0
        for _ in range(50):
            worse = changed_model(random, champion, 0.0, 0.004)
            pairs = [
                compare_scores(worse, other, "accuracy") for other in ((champion, best) if anchored else (champion,))
            ]
            if all(checks.check_not_worse("x", pair, 0.01, 0.05).passed for pair in pairs):
                champion, promotions = worse, promotions + 1
        return promotions, float(np.mean(champion))

    promotions, accuracy = degrade(anchored=False)
    assert (promotions, accuracy < 0.85) == (50, True)
    promotions, accuracy = degrade(anchored=True)
    assert (promotions < 10, accuracy > 0.99) == (True, True)


def test_models_are_compared_only_on_the_same_task() -> None:
    """Their inputs' mean and deviation are the data sets', and do not matter."""
    sidecar = {"classes": ["a", "b"], "input": {"channels": 1, "height": 8, "width": 8, "mean": [0.5], "std": [0.2]}}
    task = read_task(sidecar)
    of_other_data = read_task({**sidecar, "input": {**sidecar["input"], "mean": [0.4]}})
    assert checks.check_same_task(of_other_data, task).passed
    for name, other in {
        "objective": {"objective": "multilabel"},
        "objective's options": {"options": {"objective": {"gamma": 2}}},
        "classes": {"classes": ["b", "a"]},
        "target shape": {"target_shape": [2]},
        "input": {"input": {**sidecar["input"], "channels": 3}},
    }.items():
        assert f"the {name} changed" in checks.check_same_task(read_task({**sidecar, **other}), task).reason


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
    np.testing.assert_allclose(found.columns["brier"], ((scores - truth) ** 2).sum(axis=1))
    np.testing.assert_allclose(found.columns["confidence"], scores.max(axis=1))


def test_a_rise_counts_where_it_is_large_and_no_chance() -> None:
    random = np.random.default_rng(6)
    before = random.normal(0.5, 0.2, 4000)
    assert not checks.check_loss_rise("loss", before + 0.1, before, 0.05, 0.05).passed
    assert checks.check_loss_rise("loss", before + 0.01, before, 0.05, 0.05).passed, "small"
    few = random.normal(0.06, 5.0, 100)
    assert checks.check_loss_rise("loss", few, np.zeros(100), 0.01, 0.05).passed, "by chance"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"alpha": 0.0}, "alpha=0.0: must be above 0.0"),
        ({"rule": "best"}, "unknown rule 'best': choose one of not_worse, superior"),
        ({"alhpa": 0.1}, "unknown policy setting 'alhpa': did you mean 'alpha'"),
    ],
)
def test_a_policy_out_of_range(values: dict[str, object], said: str) -> None:
    for make in (lambda: Policy(**values), lambda: Policy.from_dict(values)):  # type: ignore[arg-type]
        with pytest.raises(UserError) as caught:
            make()
        assert said in str(caught.value)


def members(table: Path, ids: list[str], undecoded: tuple[str, ...] = ()) -> dict[str, list[int]]:
    return {name: found.tolist() for name, found in group_by_slice(str(table), ids, undecoded).items()}


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_slices(tmp_path: Path, start: bytes) -> None:
    table = tmp_path / "slices.csv"
    table.write_bytes(start + b"slice,id\r\nnight,2\r\nnight,0\r\n\r\nday,1\r\nrain,2\r\n")
    assert members(table, ["0", "1", "2"]) == {"night": [0, 2], "day": [1], "rain": [2]}
    assert members(table, ["0", "1"], ("2",)) == {"night": [0], "day": [1]}, "what cannot be decoded is in none"
    with pytest.raises(UserError, match="id '1' in line 5 is not in the test split; correct it"):
        members(table, ["0", "2"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n", "must have the columns id and slice"),
        (b"id,slice\n0\n", "line 2 has no id or no slice; complete it"),
        (b"id,slice\n0,n\xe4chts\n", "is no CSV file in UTF-8"),
        (b"id,slice\n0," + b"x" * 140_000 + b"\n", "is no CSV file in UTF-8"),
        (None, "cannot be read: no such file; check the address"),
    ],
)
def test_what_is_no_such_file(tmp_path: Path, content: bytes | None, said: str) -> None:
    table = tmp_path / "slices.csv"
    if content is not None:
        table.write_bytes(content)
    with pytest.raises(UserError, match=said):
        members(table, ["0"])
