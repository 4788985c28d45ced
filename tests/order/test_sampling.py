"""The global order: the same batches whatever the number of ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flyte_ddp.order import sampling

LENGTHS = st.integers(1, 500)


def epoch_order(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    return next(sampling.ListedOrder(samples, seed).batches(epoch, len(samples)))


@given(samples=LENGTHS, batch_size=st.integers(1, 600), epoch=st.integers(0, 5), seed=st.integers(0, 2**31))
def test_an_epoch_visits_every_sample_once(samples: int, batch_size: int, epoch: int, seed: int) -> None:
    batches = list(sampling.ListedOrder(np.arange(samples), seed).batches(epoch, batch_size))
    assert sorted(np.concatenate(batches)) == list(range(samples))
    assert len(batches) == sampling.steps_per_epoch(samples, batch_size)
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(length=LENGTHS, ranks=st.integers(1, 9))
def test_the_ranks_shares_make_up_the_batch(length: int, ranks: int) -> None:
    batch = np.arange(length)
    shares = [sampling.take_slice(batch, rank, ranks) for rank in range(ranks)]
    reference = np.array_split(batch, ranks)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(shares, reference, strict=True))


def test_orders_differ_between_epochs_and_seeds_and_repeat() -> None:
    indices = np.arange(1000)
    orders = [epoch_order(indices, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert np.array_equal(orders[0], epoch_order(indices, 0, 0))


@given(samples=st.integers(2, 1000), fraction=st.floats(0, 0.9), seed=st.integers(0, 100))
def test_the_split_is_a_partition_of_the_stated_size(samples: int, fraction: float, seed: int) -> None:
    training, validation = sampling.split_indices(samples, fraction, seed)
    assert sorted([*training, *validation]) == list(range(samples))
    assert len(validation) == round(samples * fraction)


def test_the_order_is_fixed_for_ever() -> None:
    """A change here changes every result; the figures are what this code gave when it was first released."""
    assert epoch_order(np.arange(10), 0, 0).tolist() == [6, 2, 1, 0, 8, 4, 3, 9, 7, 5]
