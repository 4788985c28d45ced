"""Open a prepared data set of any kind, choose its training samples, and check the data before ranks start."""

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.catalog import KINDS, check_positives_for_threshold, check_select_by, check_two_classes, find_kind
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.order.sampling import ListedOrder, Order
from flyte_ddp.core.order.shard_order import SampleOrder
from flyte_ddp.core.order.weighted import compute_inverse_class_counts, make_custom_order, make_weighted_order
from flyte_ddp.core.samples.leaves import IGNORED
from flyte_ddp.core.text.formatting import join_first
from flyte_ddp.core.user_code.callables import check_positional_arguments, load_callable
from flyte_ddp.datasets.prepared_folder import (
    FORMAT,
    damaged_set_error,
    read_description,
    translate_damage_to_user_error,
    verify_files,
)
from flyte_ddp.datasets.prepared_set import PreparedSet


def open_prepared(folder: Path) -> PreparedSet:
    """Open a folder that :func:`flyte_ddp.datasets.fetch` has written.

    Arrays and file lists are memory-mapped. Files that changed since the last check are hashed, and the result is kept
    in the folder's ``verified.json``.

    Raises:
        UserError: The folder is no prepared data set or is damaged, a file has changed since the preparation, or
            another release prepared the folder.
    """
    description = read_description(folder)
    if description.format != FORMAT:
        raise UserError(f"{folder}: was prepared by another release; delete the folder and fetch it again")
    verify_files(folder, description.files)
    kinds = [find_kind(description.name), *(kind for kind in KINDS if kind.key in description.content)]
    set_class = next((kind.set_class for kind in kinds if kind.set_class), "")
    if not set_class:
        raise damaged_set_error(folder, "the kind of the data set is unknown")
    with translate_damage_to_user_error(folder):
        opened: PreparedSet = resolve_name(set_class).open(folder, description)
    return opened


def apply_sampling(data: PreparedSet, order: SampleOrder, sampling: str) -> SampleOrder:
    """Return the order of the training samples for the hyperparameter ``sampling``.

    A user-defined function is imported, and called twice for epoch 0, to check that both calls choose the same samples.
    Exceptions of the function pass through. Later, the returned order calls the function.

    Args:
        data: The data set.
        order: The order of the training split, a ListedOrder unless ``sampling`` is "shuffled".
        sampling: "shuffled" (returns ``order``), "balanced", "weighted" or a ``package.module:callable``.

    Raises:
        UserError: The data lack the weights or classes that ``sampling`` needs, all weights are 0, or the user's
            function is unfit.
    """
    if sampling == "shuffled":
        return order
    assert isinstance(order, ListedOrder)  # Hyperparameters rejects shards and streams
    if ":" in sampling:
        function = load_callable(sampling)
        check_positional_arguments(f"sampling={sampling!r}", function, "samples", "seed", "epoch")
        return make_custom_order(order, sampling, function)
    if sampling == "weighted":
        if data.sample_weights is None:
            fix = "pass them to arrays(...) or image_arrays(...), or set them as an attribute of the training set"
            problem = f"dataset={data.name!r} has no sample_weights"
            raise UserError(f"sampling='weighted': {problem}; {fix}, or set sampling='balanced'")
        return make_weighted_order(order, data.sample_weights[order.listed])
    labels = data.training_targets()
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu":
        fix = "pass sample_weights, and set sampling='weighted'"
        raise UserError(f"sampling='balanced': dataset={data.name!r} does not have one class per sample; {fix}")
    return make_weighted_order(order, compute_inverse_class_counts(labels[order.listed]))


def check_prepared_set(folder: Path, hp: Hyperparameters) -> list[str]:
    """Check that a prepared data set can be trained on, and return notes for the user.

    User-defined ``sample`` and ``sampling`` functions are not called.

    Raises:
        UserError: The folder is damaged, a split for training or testing is empty, or the data do not fit the
            hyperparameters.
    """
    data = open_prepared(folder)
    targets = data.training_targets()
    data.check_settings(hp)
    classes = resolve_class_names(data.classes, hp, may_be_empty=not data.needs_classes(hp))
    check_select_by(hp.select_by, hp.objective, len(classes))
    if hp.threshold:
        check_two_classes(hp.threshold, len(classes))
    notes = describe_missing_classes(targets, classes) if hp.objective == "segmentation" else []
    orders = data.make_split_orders(hp.validation_fraction, hp.seed, hp.shuffle_shards)
    if not len(orders["training"]) and len(orders["validation"]):
        problem = f"holds out all {len(orders['validation']):,} training samples of dataset={hp.dataset!r}"
        fix = "lower it, or add samples"
        raise UserError(f"validation_fraction={hp.validation_fraction:g}: {problem}; {fix}")
    for split, purpose in (("training", "training"), ("test", "testing")):
        if not len(orders[split]):
            raise data.no_samples_error(purpose)
    if hp.threshold and not hp.sample:
        counts = count_training_classes(data, orders["validation"], len(classes))
        if counts or not len(orders["validation"]):
            check_positives_for_threshold(hp.threshold, classes[1], counts[1] if counts else 0)
    if ":" not in hp.sampling:  # a user-defined function runs in ranks only
        apply_sampling(data, orders["training"], hp.sampling)
    return [*notes, *data.notes()]


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


def count_training_classes(data: PreparedSet, training: Order, classes: int) -> tuple[int, ...]:
    """Return the number of samples, labels or mask pixels of each class in the order ``training``.

    ``classes`` is the number of classes. Samples that an epoch repeats or skips make no difference. If the counts
    cannot be known from the data, return ().
    """
    labels = data.training_targets()
    if labels is None:
        return ()
    samples = np.sort(training.samples_at(slice(None)))  # not one epoch, which a user-defined ``sampling`` may change
    if labels.dtype.kind == "f":
        return tuple(np.nansum(labels[samples], axis=0).astype(np.int64).tolist()) if labels.ndim == 2 else ()
    counts = np.zeros(classes, np.int64)
    for rows in np.array_split(samples, len(samples) if labels.ndim > 1 else 1):  # masks may be large: one by one
        chosen = labels[rows]
        counts += np.bincount(chosen[(chosen >= 0) & (chosen < classes)], minlength=classes)
    return tuple(counts.tolist())


def resolve_class_names(classes: Sequence[str], hp: Hyperparameters, *, may_be_empty: bool = False) -> tuple[str, ...]:
    """Return the data set's class names, or "0" to num_classes-1 if the data set has none.

    Args:
        classes: The names of the data set, or empty.
        hp: The hyperparameters, of which ``num_classes`` is read. 0 accepts any number of classes.
        may_be_empty: Whether () is returned if no number of classes is known.

    Raises:
        UserError: The data set has names, and ``num_classes`` is another number. No number of classes is known, and
            ``may_be_empty`` is False.
    """
    if classes and hp.num_classes not in (0, len(classes)):
        raise UserError(f"num_classes={hp.num_classes}: the data set has {len(classes)} classes; set that number or 0")
    names = tuple(classes) or tuple(map(str, range(hp.num_classes)))
    if not names and not may_be_empty:
        what = "has an unknown number of classes; set num_classes, or add class names to the data set or its index"
        raise UserError(f"dataset={hp.dataset!r}: {what}")
    return names
