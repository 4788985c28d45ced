"""Opening a prepared data set, of whatever kind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from flyte_ddp import sampling
from flyte_ddp.catalog import encoded_kind
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.arrays import ImageArrays, open_arrays, read_description
from flyte_ddp.datasets.encoded_set import EncodedSet, open_encoded_set
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.errors import UserError
from flyte_ddp.shard_order import TEST_FRACTION, ShardSplits, WholeShardSplits
from flyte_ddp.shards.epoch_plan import cache_wanted
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.shards.stream_readers import Gang

PreparedSet = ImageArrays | EncodedSet


def open_prepared(folder: Path) -> PreparedSet:
    """The data set in a folder that :func:`flyte_ddp.datasets.fetch` has made.

    Raises:
        UserError: it is no such folder, or damaged.
    """
    return open_encoded_set(folder) if read_description(folder).get("kind") else open_arrays(folder)


def check_prepared(
    folder: Path, hp: Hyperparameters, *, ranks: int, workers: int, cache_bytes: int | None = None
) -> list[str]:
    """Refuses, before a rank starts, what ranks would not know what to do with.

    Returns:
        What the user should know: what a folder of images holds, and what is likely not meant.

    Raises:
        UserError: the number of classes is not known, no samples are left for training or testing, or a stream has too
            few shards.
    """
    data = open_prepared(folder)
    class_names(data, hp)
    check_samples(data, hp)
    if not isinstance(data, EncodedSet):
        return []
    if not isinstance(data.train, ShardIndex):
        lists = (source for source in (data.train, data.test) if isinstance(source, ImageList))
        return [line for source in lists for line in source.describe()]
    if encoded_kind(hp.dataset) == "stream":
        check_stream(data.train, hp, own_test=data.test is not None, ranks=ranks, workers=workers)
        return []
    return cautions(data.train, hp, Gang(nodes=1, ranks_per_node=ranks), cache_bytes)


def cautions(index: ShardIndex, hp: Hyperparameters, gang: Gang, cache_bytes: int | None) -> list[str]:
    """That the cache is too small, if it is, for shards that are far away."""
    sizes = index.sizes
    if cache_bytes is None or not index.remote.any() or (sizes < 0).any() or cache_bytes >= sizes.sum():
        return []
    wanted = cache_wanted(sizes, gang, min(hp.shuffle_shards, len(sizes)), min(hp.accumulation_steps, hp.batch_size))
    limit, all_of_it = f"FLYTE_DDP_CACHE_BYTES={cache_bytes}", int(sizes.sum())
    if cache_bytes < min(wanted, all_of_it):
        what = f"{limit}: less than the {min(wanted, all_of_it)} that training wants, so that it may fetch shards"
        return [f"{what} more than once an epoch; raise it, or lower shuffle_shards (now {hp.shuffle_shards})"]
    if hp.validation_fraction or not hp.test_dataset:
        what = f"{limit}: less than the {all_of_it} of all shards, which evaluations therefore fetch again"
        return [f"{what}; raise it or eval_interval, or set test_dataset and validation_fraction 0"]
    return []


def check_stream(index: ShardIndex, hp: Hyperparameters, *, own_test: bool, ranks: int, workers: int) -> None:
    """Refuses, before a rank starts, a stream of which some worker would have nothing, or whose parts have weights.

    Raises:
        UserError: with the numbers.
    """
    if importlib.util.find_spec("webdataset") is None:
        raise UserError(f"dataset={hp.dataset!r}: streams need webdataset, which is not there; pip install webdataset")
    for part in index.parts:
        if part.weight != 1:
            raise UserError(
                f"dataset={hp.dataset!r}: its part {part.name!r} has weight {part.weight:g}, and a stream goes through "
                "all parts alike; take shards:ADDRESS, or an index without weights"
            )
    splits = WholeShardSplits(index.counts, hp.validation_fraction, 0.0 if own_test else TEST_FRACTION, hp.seed)
    training, readers = np.count_nonzero(splits.sizes["training"]), ranks * max(1, workers)
    if training < readers:
        raise UserError(
            f"dataset={hp.dataset!r}: has {training} shards for training, read by {ranks} ranks x {max(1, workers)} "
            "workers: each needs one; make more shards, or lower num_ranks or FLYTE_DDP_LOADER_THREADS"
        )


def check_samples(data: PreparedSet, hp: Hyperparameters) -> None:
    """Refuses, before a rank starts, hyperparameters that leave no samples to train on, or to test on.

    Raises:
        UserError: with the numbers.
    """
    training, held_out, test = split_sizes(data, hp)
    if not training and held_out:
        raise UserError(
            f"validation_fraction={hp.validation_fraction:g}: holds out all {held_out:,} samples that dataset="
            f"{hp.dataset!r} has for training; lower it, or give more samples"
        )
    for count, purpose in ((training, "training"), (test, "testing")):
        if not count:
            raise no_samples(hp.dataset, purpose)


def split_sizes(data: PreparedSet, hp: Hyperparameters) -> tuple[int, int, int]:
    """Samples for training, validation and testing."""
    if isinstance(data, ImageArrays):
        samples = len(data.train_labels)
        validation = sampling.held_out(samples, hp.validation_fraction)
        return samples - validation, validation, len(data.test_labels)
    test_fraction = TEST_FRACTION if data.test is None else 0.0
    if isinstance(data.train, ShardIndex):
        kind = WholeShardSplits if encoded_kind(hp.dataset) == "stream" else ShardSplits
        sizes = kind(data.train.counts, hp.validation_fraction, test_fraction, hp.seed).sizes
        training, validation, test = (int(sizes[split].sum()) for split in ("training", "validation", "test"))
    else:
        test = sampling.held_out(len(data.train.names), test_fraction)
        rest = len(data.train.names) - test
        validation = sampling.held_out(rest, hp.validation_fraction)
        training = rest - validation
    if data.test is not None:
        test = int(data.test.counts.sum()) if isinstance(data.test, ShardIndex) else len(data.test.names)
    return training, validation, test


def no_samples(dataset: str, purpose: str) -> UserError:
    """The error for a split that must have samples and has none."""
    return UserError(f"dataset={dataset!r}: has no samples for {purpose}; give more, or hold out less, or test_dataset")


def class_names(data: PreparedSet, hp: Hyperparameters) -> tuple[str, ...]:
    """The names of the classes; their numbers where the data set does not say and ``num_classes`` does.

    Raises:
        UserError: neither says, or they do not agree.
    """
    if data.classes and hp.num_classes not in (0, len(data.classes)):
        raise UserError(f"num_classes={hp.num_classes}: the data set has {len(data.classes)}; set that, or 0")
    names = data.classes or tuple(str(number) for number in range(hp.num_classes))
    if not names:
        raise UserError(
            f"dataset={hp.dataset!r}: its index does not say how many classes there are; set num_classes, or make an "
            "index that says with python -m flyte_ddp.shards create"
        )
    return names
