"""Sampling by weights, by classes and by the user's own function: how often, on any ranks, and after any step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import own_training
import pytest
from scipy import stats
from sklearn.utils.class_weight import compute_class_weight
from training_runs import cut_off, losses, train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.order.sampling import Indices, ListedOrder
from flyte_ddp.core.order.weighted import compute_inverse_class_counts, make_custom_order, make_weighted_order
from flyte_ddp.datasets import image_arrays, open_arrays, open_prepared
from flyte_ddp.datasets.prepared import apply_sampling, check_prepared_set, count_training_classes
from flyte_ddp.datasets.prepared_set import write_prepared_set

pytestmark = pytest.mark.usefixtures("user_models")

LISTED = ListedOrder(np.arange(1000, 1600), seed=3)
KINDS = ("weighted", "balanced", "own_training:every_third")
BASE = Hyperparameters(epochs=2, batch_size=40, validation_fraction=0.9, precision="fp64", backend="gloo")
BASE = replace(BASE, num_ranks=1, log_interval=1, learning_rate=0.01)  # 150 samples: 4 steps an epoch, the last ragged


@pytest.fixture(scope="module")
def weighted_digits(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits, of which the nines are drawn twenty times as often as others, and the zeros never."""
    arrays = open_arrays(digits)
    labels = arrays.train_targets
    weights = np.where(labels == 9, 20.0, 1.0) * (labels > 0)
    folder = tmp_path_factory.mktemp("data") / "weighted"
    folder.mkdir()
    write_prepared_set(replace(arrays, sample_weights=weights), folder, {"source": "a test"})
    return folder


def epochs(order: ListedOrder, number: int) -> Indices:
    """All samples of the first epochs."""
    return np.concatenate([batch for epoch in range(number) for batch in order.batches(epoch, 128)])


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    weights = np.random.default_rng(0).integers(0, 5, 600).astype(float)
    drawn = epochs(make_weighted_order(LISTED, weights), 200)
    counts = np.bincount(drawn - 1000, minlength=600)
    assert len(drawn) == 200 * 600
    assert not counts[weights == 0].any()
    expected = weights[weights > 0] / weights.sum() * len(drawn)
    assert stats.chisquare(counts[weights > 0], expected).pvalue > 1e-3
    assert len({tuple(epochs(replace(make_weighted_order(LISTED, weights), seed=seed), 1)) for seed in range(5)}) == 5


def test_classes_are_drawn_alike() -> None:
    labels = np.repeat([0, 1, 7], [500, 90, 10])
    drawn = epochs(make_weighted_order(LISTED, compute_inverse_class_counts(labels)), 100) - 1000
    assert stats.chisquare(np.unique(labels[drawn], return_counts=True)[1]).pvalue > 1e-3


@pytest.mark.parametrize("first", range(5))
def test_an_epoch_goes_on_in_its_middle_as_it_would_have(first: int) -> None:
    for order in (
        make_weighted_order(LISTED, np.arange(600)),
        make_custom_order(LISTED, "x:y", own_training.every_third),
    ):
        whole = [*order.batches(7, 64)]
        for batch, again in zip(whole[first:], order.batches(7, 64, first), strict=True):
            np.testing.assert_array_equal(batch, again)


def test_an_own_order_is_that_of_its_function() -> None:
    order = make_custom_order(LISTED, "own:every_third", own_training.every_third)
    assert len(order) == 200
    for epoch in range(3):
        expected = np.random.default_rng([3, epoch]).permutation(np.arange(1000, 1600))[::3]
        np.testing.assert_array_equal(np.concatenate([*order.batches(epoch, 32)]), expected)
    make_custom_order(LISTED, "own:sorted_in_place", own_training.sorted_in_place)
    np.testing.assert_array_equal(LISTED.listed, np.arange(1000, 1600), "the function gets a copy")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("drawing", "returned different samples .* for epoch 0"),
        ("outside", "returned sample 0 for epoch 0, .* not in the training split"),
        ("fractions", r"returned float64 \[600\] for epoch 0: must be whole numbers"),
        ("nothing", r"returned float64 \[0\] for epoch 0"),
    ],
)
def test_what_is_no_order_is_refused(function: str, words: str) -> None:
    with pytest.raises(UserError, match=f"sampling='own:{function}': {words}"):
        make_custom_order(LISTED, f"own:{function}", getattr(own_training, function))


def test_epochs_of_other_lengths_are_refused() -> None:
    order = make_custom_order(LISTED, "own:shrinking", own_training.shrinking)
    assert len([*order.batches(0, 100)]) == 6
    with pytest.raises(UserError, match="returned 599 samples for epoch 1 and 600 for epoch 0"):
        next(order.batches(1, 100))


def test_held_out_samples_are_those_of_any_other_run_and_never_drawn(weighted_digits: Path) -> None:
    data = open_arrays(weighted_digits)
    for sampling in KINDS:
        orders = data.make_split_orders(validation_fraction=0.5, seed=1, shuffle_shards=16)
        order = apply_sampling(data, orders["training"], sampling)
        drawn = {*epochs(order, 5).tolist()}
        assert drawn <= {*orders["training"].samples_at(slice(None)).tolist()}
        assert not drawn & {*orders["validation"].samples_at(slice(None)).tolist()}


@pytest.mark.slow
def test_ranks_train_on_the_same_samples_as_one(weighted_digits: Path, tmp_path: Path) -> None:
    hp = replace(BASE, sampling="balanced", epochs=1)
    one, two = (train_in(tmp_path / f"{ranks}", replace(hp, num_ranks=ranks), weighted_digits) for ranks in (1, 2))
    assert losses(two) == pytest.approx(losses(one), abs=1e-9)
    assert len(losses(one)) == 4


def test_a_run_that_is_cut_off_in_its_third_epoch_goes_on_bit_for_bit(weighted_digits: Path, tmp_path: Path) -> None:
    hp = replace(BASE, sampling="own_training:every_third", precision="fp32", augment="crop", epochs=4)
    expected = train_in(tmp_path / "undisturbed", hp, weighted_digits)
    cut_off(lambda: train_in(tmp_path / "run", hp, weighted_digits), 5)
    result = train_in(tmp_path / "run", hp, weighted_digits)
    assert result.model.read_bytes() == expected.model.read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": "balanced", "dataset": "shards:/index.json"}, "not supported for dataset='shards:/index.json'"),
        ({"sampling": "own:order", "dataset": "shards:/index.json"}, "not supported for dataset='shards:/index.json'"),
        ({"sampling": "balance"}, "unknown sampling 'balance': did you mean 'balanced'"),
    ],
)
def test_samplings_that_do_not_fit_are_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Hyperparameters(**changes)


def check(folder: Path, sampling: str) -> None:
    check_prepared_set(folder, replace(BASE, sampling=sampling))


def test_a_set_without_weights_is_refused_before_ranks_start(digits: Path, weighted_digits: Path) -> None:
    check(weighted_digits, "weighted")
    check(digits, "balanced")
    with pytest.raises(UserError, match="sampling='weighted': dataset='digits' has no sample_weights"):
        check(digits, "weighted")


def test_balanced_class_weights_count_all_that_an_own_function_chooses_from(digits: Path) -> None:
    """Though its epochs are shorter; the weights are scikit-learn's."""
    labels, listed = open_arrays(digits).train_targets, np.arange(100, 900)
    order = make_custom_order(ListedOrder(listed, seed=3), "own_training:every_third", own_training.every_third)
    counts = count_training_classes(open_prepared(digits), order, 10)
    expected = compute_class_weight("balanced", classes=np.arange(10), y=labels[listed])
    assert [len(listed) / (10 * count) for count in counts] == pytest.approx(expected)


IMAGES = np.zeros((4, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1, 2, 3], r"one number for each of the 4 training samples, got \[3\]"),
        ([0, 0, 0, 0], "are all 0"),
        ([1, 2, 3, -1], "weight -1 of sample 3: must be a finite number of at least 0"),
        ([1, float("nan"), 3, 1], "weight nan of sample 1"),
    ],
)
def test_wrong_weights_are_refused(weights: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"sample_weights.*{words}"):
        image_arrays(IMAGES, [0, 1] * 2, IMAGES, [0, 1] * 2, ["a", "b"], sample_weights=weights)
