"""Open a prepared data set of any kind, divide its samples into splits, and check the data before ranks start."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.catalog import IGNORED, OF_CLASSES, check_positives, check_select_by, check_two_classes, encoded_kind
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import prepared_folder
from flyte_ddp.datasets.encoded_set import EncodedSet, open_encoded_set
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.datasets.on_demand_set import ON_DEMAND, OnDemandSet, open_on_demand
from flyte_ddp.datasets.prepared_folder import FORMAT, read_description
from flyte_ddp.datasets.sample_arrays import LEAVES, SampleArrays, open_arrays
from flyte_ddp.errors import UserError
from flyte_ddp.order.sampling import TEST, ListedOrder, Order, split_indices
from flyte_ddp.order.shard_order import TEST_FRACTION, ShardOrder, ShardSplits, WholeShardSplits
from flyte_ddp.order.weighted import draw_by_weights, inverse_class_counts, make_custom_order
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.text.formatting import join_first
from flyte_ddp.user_code.callables import load_callable, require_parameters

ItemSet: TypeAlias = SampleArrays | OnDemandSet  # samples are any leaves, or pictures
PreparedSet: TypeAlias = ItemSet | EncodedSet
SampleOrder = ListedOrder | ShardOrder  # not StreamOrder, because samples of a stream have no numbers


def open_prepared(folder: Path) -> PreparedSet:
    """Open a folder that :func:`flyte_ddp.datasets.fetch` has written.

    Arrays and file lists are memory-mapped. Files that changed since the last check are hashed, and the result is kept
    in the folder's ``verified.json``.

    Raises:
        UserError: The folder is no prepared data set or is damaged, a file has changed since the preparation, or
            another release prepared the folder.
    """
    description = read_description(folder)
    if not FORMAT.items() <= description.items():
        raise UserError(f"{folder}: was prepared by another release; delete the folder and fetch it again")
    prepared_folder.verify_files(folder, description.get(prepared_folder.FILES, {}))
    if LEAVES in description:
        return open_arrays(folder)
    return open_on_demand(folder) if ON_DEMAND in description else open_encoded_set(folder)


def order_test_split(data: PreparedSet) -> SampleOrder:
    """Return the order of the test split. The order is the same in each call.

    If encoded images have no test set, the split is a tenth of the images. In a stream, whole shards are held out.
    """
    if not isinstance(data, EncodedSet):
        return ListedOrder(np.arange(data.test_samples, dtype=np.int32))
    source = data.test_source
    if isinstance(source, ImageList):
        samples = np.arange(len(source.names), dtype=np.int64)
        return ListedOrder(samples if data.test else split_indices(len(samples), TEST_FRACTION, 0, TEST)[1])
    if data.test is not None:
        return ShardOrder(ShardSplits(source.counts, 0.0, 0.0, 0), "training")
    return ShardOrder(divide_shards(data, source.counts, 0.0, 0), "test")


def divide_shards(data: EncodedSet, counts: NDArray[np.int64], validation_fraction: float, seed: int) -> ShardSplits:
    kind = WholeShardSplits if data.is_stream else ShardSplits
    return kind(counts, validation_fraction, TEST_FRACTION if data.test is None else 0.0, seed)


def order_splits(data: PreparedSet, hp: Hyperparameters) -> dict[str, SampleOrder]:
    """Return the orders of "training", "validation" and "test" by these names. Splits of a stream have whole shards.

    The hyperparameters ``validation_fraction``, ``seed`` and ``shuffle_shards`` decide.
    """
    tests = order_test_split(data)
    if not isinstance(data, EncodedSet):
        samples = np.arange(data.train_samples, dtype=np.int32)
    elif isinstance(data.train, ShardIndex):
        splits = divide_shards(data, data.train.counts, hp.validation_fraction, hp.seed)
        weighted = ShardOrder(splits, "training", data.train.weights, hp.shuffle_shards)
        return {"training": weighted, "validation": ShardOrder(splits, "validation"), "test": tests}
    else:
        samples = np.arange(len(data.train.names), dtype=np.int32)
        if data.test is None:
            samples = np.delete(samples, tests.samples(slice(0, len(tests))))
    rest, held_out = split_indices(len(samples), hp.validation_fraction, hp.seed)
    training, validation = ListedOrder(samples[rest], hp.seed), ListedOrder(samples[held_out])
    return {"training": training, "validation": validation, "test": tests}


def order_training(data: PreparedSet, order: SampleOrder, sampling: str) -> SampleOrder:
    """Return ``order`` changed as the hyperparameter ``sampling`` says. "shuffled" returns ``order`` unchanged.

    A user-defined function is called twice here, to check that both calls choose the same samples. Later, the returned
    order calls the function.

    Args:
        data: The data set.
        order: The order of the training split, a ListedOrder unless ``sampling`` is "shuffled".
        sampling: "shuffled", "balanced", "weighted" or a ``package.module:callable``.

    Raises:
        UserError: The data lack the weights or classes that ``sampling`` needs, all weights are 0, or the user's
            function is unfit.
    """
    if sampling == "shuffled":
        return order
    assert isinstance(order, ListedOrder)  # Hyperparameters rejects shards and streams
    if ":" in sampling:
        function = load_callable(sampling)
        require_parameters(f"sampling={sampling!r}", function, "samples", "seed", "epoch")
        return make_custom_order(order, sampling, function)
    if sampling == "weighted":
        weights = getattr(data, "sample_weights", None)
        if weights is None:
            fix = "pass them to arrays(...) or image_arrays(...), or set them as an attribute of the training set"
            problem = f"dataset={data.name!r} has no sample_weights"
            raise UserError(f"sampling='weighted': {problem}; {fix}, or set sampling='balanced'")
        return draw_by_weights(order, weights[order.listed])
    labels = find_training_targets(data)
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu":
        fix = "pass sample_weights, and set sampling='weighted'"
        raise UserError(f"sampling='balanced': dataset={data.name!r} does not have one class per sample; {fix}")
    return draw_by_weights(order, inverse_class_counts(labels[order.listed]))


def check_prepared_set(folder: Path, hp: Hyperparameters) -> list[str]:
    """Check that a prepared data set can be trained on, and return notes for the user.

    User-defined ``sample`` and ``sampling`` functions are not called.

    Raises:
        UserError: The folder is damaged, a split for training or testing is empty, or the data do not fit the
            hyperparameters.
    """
    data = open_prepared(folder)
    targets = find_training_targets(data)
    of_numbers = targets is not None and targets.dtype.kind == "f"  # numbers to predict, or several labels
    refuse_unfit_settings(data, hp)
    if not isinstance(data, EncodedSet):
        of_numbers = of_numbers or hp.objective not in OF_CLASSES
    # Only ranks call a user-defined ``sample`` function, so its results are unknown here.
    classes = resolve_class_names(data.classes, hp, of_numbers=of_numbers or bool(hp.sample))
    check_select_by(hp.select_by, hp.objective, len(classes))
    if hp.threshold:
        check_two_classes(hp.threshold, len(classes))
    notes = describe_missing_classes(targets, classes) if hp.objective == "segmentation" else []
    orders = order_splits(data, hp)
    if not len(orders["training"]) and len(orders["validation"]):
        problem = f"holds out all {len(orders['validation']):,} training samples of dataset={hp.dataset!r}"
        fix = "lower it, or add samples"
        raise UserError(f"validation_fraction={hp.validation_fraction:g}: {problem}; {fix}")
    for split, purpose in (("training", "training"), ("test", "testing")):
        if not len(orders[split]):
            raise no_samples_error(hp.dataset, purpose)
    if hp.threshold and not hp.sample:
        counts = count_training_classes(data, orders["validation"], len(classes))
        if counts or not len(orders["validation"]):
            check_positives(hp.threshold, classes[1], counts[1] if counts else 0)
    if ":" not in hp.sampling:  # a user-defined function runs in ranks only
        order_training(data, orders["training"], hp.sampling)
    lists = (data.train, data.test) if isinstance(data, EncodedSet) else ()
    return notes + [note for each in lists if isinstance(each, ImageList) for note in each.describe_images()]


def refuse_too_few_shards(data: PreparedSet, hp: Hyperparameters, *, ranks: int, workers: int) -> None:
    """Raise UserError if a stream has fewer training shards than ``ranks`` x ``workers``. Other data are accepted.

    ``workers`` is the number of each rank's loader processes. The value 0 counts as 1.
    """
    if not isinstance(data, EncodedSet) or not isinstance(data.train, ShardIndex) or not data.is_stream:
        return
    splits = divide_shards(data, data.train.counts, hp.validation_fraction, hp.seed)
    shards, workers = int(np.count_nonzero(splits.sizes["training"])), max(1, workers)
    if shards < ranks * workers:
        problem = f"has {shards} training shards for {ranks} ranks x {workers} workers: each worker needs one"
        fix = "make more shards, or lower num_ranks or FLYTE_DDP_LOADERS"
        raise UserError(f"dataset={hp.dataset!r}: {problem}; {fix}")


def describe_missing_classes(masks: NDArray[Any] | None, classes: Sequence[str]) -> list[str]:
    """Return a list with one warning that names the classes without any pixel in the training masks.

    If no class is missing, or if ``masks`` is None or no array [N, H, W], return [].
    """
    if masks is None or masks.ndim != 3:
        return []
    missing = dict(enumerate(classes))
    for mask in masks:
        missing = {number: name for number, name in missing.items() if not (mask == number).any()}
        if not missing:
            return []
    text = f"warning: no pixel of the training masks has the class {join_first(map(repr, missing.values()))}"
    if len(missing) >= len(classes) - 1 and any((mask == IGNORED).any() for mask in masks):
        text += f", and pixels of value {IGNORED} are ignored; if masks are painted 0 and 255, use masks // 255"
    return [text]


def no_samples_error(dataset: str, purpose: str) -> UserError:
    stream = encoded_kind(dataset) == "stream"
    more = "pack more shards (a stream holds out whole shards)" if stream else "add samples"
    return UserError(f"dataset={dataset!r}: has no samples for {purpose}; {more}, hold out less, or set test_dataset")


def find_training_targets(data: PreparedSet) -> NDArray[Any] | None:
    """Return the labels or targets of all training samples as one array, or None if unknown.

    Targets are unknown in shards and in sets on demand, and if targets have several leaves. The samples of the
    validation split are included.
    """
    if isinstance(data, EncodedSet):
        return data.train.labels if isinstance(data.train, ImageList) else None
    targets = getattr(data, "train_targets", None)
    return targets if isinstance(targets, np.ndarray) else None


def refuse_unusable_stream(index: ShardIndex, dataset: str) -> None:
    """Raise UserError if webdataset is not installed, or a data set in the index has a weight other than 1."""
    if importlib.util.find_spec("webdataset") is None:
        raise UserError(f"dataset={dataset!r}: streams need webdataset, which is not installed; pip install webdataset")
    for part in index.parts:
        if part.weight != 1:
            problem = f"its part {part.name!r} has weight {part.weight:g}, but a stream reads all parts equally often"
            raise UserError(f"dataset={dataset!r}: {problem}; use shards:ADDRESS, or an index without weights")


def refuse_unfit_settings(data: PreparedSet, hp: Hyperparameters) -> None:
    """Raise UserError if hyperparameters do not fit the kind of data, such as ``image_size`` for texts.

    Also raises UserError if the data are a stream that cannot be read.
    """
    if isinstance(data, EncodedSet) and data.is_stream and isinstance(data.train, ShardIndex):
        refuse_unusable_stream(data.train, hp.dataset)
    if isinstance(data, ItemSet) and hp.bad_samples:
        what = f"dataset={data.name!r} reads its samples itself"
        raise UserError(f"bad_samples={hp.bad_samples}: {what}; set bad_samples=0, and skip unreadable samples there")
    if data.pictures:
        if hp.collate != "stacked":
            what = f"dataset={data.name!r} has images, which all have one size"
            raise UserError(f"collate={hp.collate!r}: {what}; omit collate")
        return
    what = f"dataset={data.name!r} has samples that are not images"
    if ":" not in hp.model:
        images = "return PIL images or uint8 arrays, without ToTensor and Normalize"
        raise UserError(f"model={hp.model!r}: needs images, but {what}; use a user-defined model, or {images}")
    if hp.image_size:
        raise UserError(f"image_size={hp.image_size}: {what}; set image_size=0")
    if hp.augment != "none" and ":" not in hp.augment:
        raise UserError(f"augment={hp.augment!r}: {what}; set augment=none, or use a user-defined function")


def count_training_classes(data: PreparedSet, training: Order, classes: int) -> tuple[int, ...]:
    """Return the number of samples, labels or mask pixels of each class in the order ``training``.

    ``classes`` is the number of classes. Samples that an epoch repeats or skips make no difference. If the counts
    cannot be known from the data, return ().
    """
    labels = find_training_targets(data)
    if labels is None:
        return ()
    samples = np.sort(training.samples(slice(None)))  # not one epoch, which a user-defined ``sampling`` may change
    if labels.dtype.kind == "f":
        return tuple(np.nansum(labels[samples], axis=0).astype(np.int64).tolist()) if labels.ndim == 2 else ()
    counts = np.zeros(classes, np.int64)
    for rows in np.array_split(samples, len(samples) if labels.ndim > 1 else 1):  # masks may be large: one by one
        chosen = labels[rows]
        counts += np.bincount(chosen[(chosen >= 0) & (chosen < classes)], minlength=classes)
    return tuple(counts.tolist())


def resolve_class_names(classes: Sequence[str], hp: Hyperparameters, *, of_numbers: bool = False) -> tuple[str, ...]:
    """Return the data set's class names, or "0" to num_classes-1 if the data set has none.

    ``of_numbers`` is True if targets may be without classes. Then the result may be ().

    Raises:
        UserError: The numbers of classes differ, or no number is known and ``of_numbers`` is False.
    """
    if classes and hp.num_classes not in (0, len(classes)):
        raise UserError(f"num_classes={hp.num_classes}: the data set has {len(classes)} classes; set that number or 0")
    names = tuple(classes) or tuple(map(str, range(hp.num_classes)))
    if not names and not of_numbers:
        what = "has an unknown number of classes; set num_classes, or add class names to the data set or its index"
        raise UserError(f"dataset={hp.dataset!r}: {what}")
    return names
