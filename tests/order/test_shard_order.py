"""The global order: the same batches whatever the number of ranks; of shards few at a time, from any step."""

import itertools
from collections import Counter, OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flyte_ddp.core.order import sampling
from flyte_ddp.core.order.shard_order import ShardOrder, ShardSplits, count_streams_per_rank

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


def test_the_order_of_arrays_is_fixed_for_ever() -> None:
    """A change here changes every result; the figures are what this code gave when it was first released."""
    assert epoch_order(np.arange(10), 0, 0).tolist() == [6, 2, 1, 0, 8, 4, 3, 9, 7, 5]


COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum).map(np.array)


def order_of(counts, *, streams=3, weights=None, validation=0.0, test=0.0, split="training", seed=0) -> ShardOrder:
    counts = np.asarray(counts, dtype=np.int64)
    weights = np.ones(len(counts)) if weights is None else np.asarray(weights, dtype=np.float64)
    return ShardOrder(ShardSplits(counts, validation, test, seed), split, weights, streams)


@given(counts=COUNTS, batch_size=st.integers(1, 70), streams=st.integers(1, 20), epoch=st.integers(0, 3))
def test_an_epoch_visits_every_sample_once_in_full_batches(counts, batch_size, streams, epoch) -> None:
    batches = list(order_of(counts, streams=streams).batches(epoch, batch_size))
    assert sorted(np.concatenate(batches)) == list(range(counts.sum()))
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert 0 < len(batches[-1]) <= batch_size


@given(counts=COUNTS, batch_size=st.integers(1, 70), streams=st.integers(1, 9), first=st.integers(0, 30))
def test_an_epoch_can_start_at_any_step(counts, batch_size, streams, first) -> None:
    """By another object, that has not been through the steps before."""
    gone_through = list(itertools.islice(order_of(counts, streams=streams).batches(2, batch_size), first, None))
    begun = list(order_of(counts, streams=streams).batches(2, batch_size, first))
    assert [batch.tolist() for batch in begun] == [batch.tolist() for batch in gone_through]


@given(counts=COUNTS, validation=st.floats(0, 0.9), test=st.sampled_from([0.0, 0.1]), seed=st.integers(0, 5))
def test_the_splits_are_a_partition_of_the_stated_sizes(counts, validation, test, seed) -> None:
    parts = {
        split: order_of(counts, validation=validation, test=test, split=split, seed=seed)
        for split in ("training", "validation", "test")
    }
    samples = {split: order.samples_at(slice(0, len(order))).tolist() for split, order in parts.items()}
    assert sorted(itertools.chain(*samples.values())) == list(range(counts.sum()))
    assert all(found == sorted(found) for found in samples.values())
    assert abs(len(samples["test"]) - counts.sum() * test) <= 0.5 + 1e-9
    assert abs(len(samples["validation"]) - (counts.sum() - len(samples["test"])) * validation) <= 0.5 + 1e-9


def test_a_shard_without_samples_of_a_split_gives_none() -> None:
    splits = ShardSplits(np.array([1, 6, 0]), 0.5, 0.0, seed=0)
    for split, sizes in splits.sizes.items():
        found = [splits.samples_in_shard(shard, split) for shard in range(3)]
        assert [len(samples) for samples in found] == sizes.tolist(), split
        assert {samples.dtype for samples in found} == {np.dtype(np.int64)}


def test_what_is_held_out_for_testing_does_not_depend_on_the_seed() -> None:
    tests, validations = (
        [order_of([50] * 8, validation=0.2, test=0.1, split=split, seed=seed) for seed in (0, 1)]
        for split in ("test", "validation")
    )
    assert tests[0].samples_at(slice(0, 40)).tolist() == tests[1].samples_at(slice(0, 40)).tolist()
    assert validations[0].samples_at(slice(0, 72)).tolist() != validations[1].samples_at(slice(0, 72)).tolist()


def test_a_share_reads_from_its_own_streams_and_an_epoch_opens_each_shard_once_a_stream() -> None:
    """64 shards, 8 streams, 4 ranks: a rank is in 2 shards at a time, or 4 where they change, and in 18 at most."""
    counts, batch_size, ranks = np.full(64, 25), 40, 4
    shard_of = np.repeat(np.arange(64), 25)
    order = order_of(counts, streams=8)
    for epoch in range(2):
        used = [set[int]() for _ in range(ranks)]
        for batch in order.batches(epoch, batch_size):
            for rank in range(ranks):
                now = set(shard_of[sampling.take_slice(batch, rank, ranks)].tolist())
                assert len(now) <= 4
                used[rank] |= now
        assert all(len(shards) <= 64 // ranks + 2 for shards in used)
        assert set().union(*used) == set(range(64))


def test_the_shards_that_a_rank_keeps_open_are_enough() -> None:
    """Those used last, two for each of its streams: none is opened twice for one, whatever the micro-batches."""
    streams, ranks, parts, counts, batch_size = 8, 3, 16, np.full(64, 50), 96
    shard_of = np.repeat(np.arange(64), 50)
    order = order_of(counts, streams=streams)
    for rank in range(ranks):
        kept, opened, needed = OrderedDict[int, None](), 0, set[tuple[int, int]]()
        for batch in order.batches(0, batch_size):
            for part in range(parts):
                for place in sampling.take_slice(sampling.take_slice(np.arange(len(batch)), part, parts), rank, ranks):
                    shard = int(shard_of[batch[place]])
                    needed.add((shard, int(place) * streams // batch_size))
                    opened += shard not in kept
                    kept[shard] = None
                    kept.move_to_end(shard)
                    while len(kept) > 2 * count_streams_per_rank(streams, ranks, parts):
                        kept.popitem(last=False)
        assert opened <= len(needed)


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]), min_size=6, max_size=6),
)
def test_weights_are_passes_over_the_data_an_epoch(counts, weights) -> None:
    """With a weight of 1/4 four epochs go through all samples once; with 3 each epoch goes through them three times."""
    weights = weights[: len(counts)]
    order = order_of(counts, weights=weights)
    seen: Counter[int] = Counter()
    for epoch in range(4):
        batches = list(order.batches(epoch, 8))
        assert sum(map(len, batches)) == len(order)
        seen.update(np.concatenate(batches).tolist() if batches else [])
    for weight in set(weights):
        chosen = [shard for shard, its in enumerate(weights) if its == weight]
        total = sum(counts[shard] for shard in chosen)
        starts = np.cumsum([0, *counts])
        visits = sum(seen[sample] for shard in chosen for sample in range(starts[shard], starts[shard + 1]))
        assert abs(visits - 4 * weight * total) <= 2  # half a sample an epoch
        if weight >= 1:
            assert all(seen[int(starts[s]) + k] == 4 * weight for s in chosen for k in range(counts[s]))


def test_the_order_of_shards_is_fixed_for_ever() -> None:
    """A change here changes every result; the figures are what this code gave when it was first released."""
    order = order_of([3, 4, 5], streams=2, validation=0.2, seed=1)
    assert [batch.tolist() for batch in order.batches(1, 4)] == [[5, 3, 9, 7], [4, 6, 8, 2], [11, 0]]


def test_slices_of_the_order_of_evaluations_may_be_open() -> None:
    order = order_of([3, 0, 4], validation=0.5, split="validation")
    listed = order.samples_at(slice(0, len(order))).tolist()
    assert len(listed) > 2
    for place in (slice(None), slice(1, None), slice(2), slice(1, 100)):
        assert order.samples_at(place).tolist() == listed[place]
