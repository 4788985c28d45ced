"""Measures samples of arrays and of items on demand: each leaf of the inputs, and the targets.

Numbers are counted by ranges between powers of two. A single pass over the data is then enough, whatever the scale.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.workers import map_in_loader_pool, start_loader_pool
from flyte_ddp.core.machine.resources import count_cores
from flyte_ddp.core.order.random_state import keep_random_state
from flyte_ddp.core.samples.leaves import Leaves, Ragged, group_leaves, name_leaves
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets.item_set import ItemSet
from flyte_ddp.datasets.items import Items
from flyte_ddp.datasets.rows import normalize_columns
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.validation.leaf_statistics import (
    Values,
    apply_to_rows,
    compute_leaf_statistics,
    count_by_range,
    count_samples_by_target,
    digest_leaves,
    find_labels_out_of_range,
    has_numbers,
)
from flyte_ddp.validation.profile import CLASSES, LABELS, MASKS, NUMBERS, OTHERS, TOKENS, DataProfile, SplitProfile

ROWS, ROW_BYTES = 4096, 2**24  # of arrays that are measured at a time, at most
ITEMS = 64  # of one task of a loader process
LOOKED_TWICE = 8  # items of each split that are read twice
MOST_CATEGORIES = 100  # texts of a column with more different values, which differ in most rows, are not counted
FEW = 5  # examples of each problem, at most
NAMES = {"train": "training", "test": "test"}

# Whether rows hold values that training cannot use. In targets, NaN stands for an unknown number.
UNUSABLE = {"inputs": lambda rows: ~np.isfinite(rows).all(1), "targets": lambda rows: np.isinf(rows).any(1)}


class SampleDigests(NamedTuple):
    """The number, label and digest of each sample, by which equal samples are found, int64 [n] each."""

    numbers: NDArray[np.int64]
    labels: NDArray[np.int64]  # class numbers; of other targets digests, equal for equal targets
    digests: NDArray[np.int64]  # of the inputs, or pixels


@dataclass
class PartProfile:
    """The counts and problems of some samples of a split."""

    compared: SampleDigests
    targets: Counter[str]  # number of samples by target, as in SplitProfile.labels
    statistics: dict[str, NDArray[Any]]  # by name, the value of each sample: a number or a text
    labelled: dict[str, int]  # by class number or token outside the classes: a sample's number
    not_finite: dict[int, str] = field(default_factory=dict)  # by the sample's number: the leaf with NaN or infinity
    undecodable: dict[int, str] = field(default_factory=dict)  # by the sample's number: why; not among ``compared``


@dataclass(frozen=True, eq=False)
class ItemMeasurer:
    """Reads and measures items of a side, in this process or in a loader process."""

    items: Items
    kind: str  # the kind of targets, as in the profile
    classes: int  # number of classes that have names
    dimensions: list[dict[str, int]]  # number of dimensions by leaf, of inputs and of targets, in training sample 0

    def measure_items(self, samples: Sequence[int]) -> PartProfile:
        """Read the samples with the numbers ``samples``, without augmentation, and return counts and problems.

        Raises UserError if a sample's leaves have other names or dimensions than training sample 0.
        """
        read = [self.items.read_item(sample, 0, None) for sample in samples]
        names = [f"{NAMES[self.items.side]} sample {sample}" for sample in samples]
        inputs, targets = (
            {
                name: [leaf_to_array(leaf) for leaf in values]
                for name, values in group_leaves(kind, leaves, names).items()
            }
            for kind, leaves in zip(("inputs", "targets"), zip(*read, strict=True), strict=True)
        )
        for place, name in enumerate(names):
            found = [{leaf: values[place].ndim for leaf, values in side.items()} for side in (inputs, targets)]
            if found != self.dimensions:
                problem = f"has leaves of the dimensions {found}, and training sample 0 has {self.dimensions}"
                raise UserError(f"{name} {problem}; all samples must have the same")
        return measure_leaves(samples, inputs, targets, self.kind, self.classes)


def profile_item_set(
    data: ItemSet, profile: DataProfile, settings: Settings, name_of: Callable[[str, int], str]
) -> list[SampleDigests]:
    """Read all samples of both splits, and add the counts and problems to the profile.

    Also sets the profile's kind and shape of targets. Items on demand are read in loader processes, or in this process
    outside Linux. Eight items of each split are read twice.

    Args:
        data: Arrays, or a set on demand.
        profile: The profile to complete.
        settings: The setting ``loaders`` is the number of processes, by default one per core.
        name_of: Returns the name of a sample for messages, from "training" or "test" and the sample's number.

    Returns:
        The numbers, labels and digests of the training samples, and of the test samples.

    Raises:
        UserError: An item cannot be read, differs when read again, or has other leaves than training sample 0.
    """
    if isinstance(data, SampleArrays):
        if isinstance(data.train_targets, np.ndarray):
            profile.target_shape = [*data.train_targets.shape[1:]]
        profile.targets = detect_target_kind(data.train_targets, data.classes, of_pictures=data.pictures)
        return [
            add_split_to_profile(profile, NAMES[side], measure_arrays(data, side, profile), name_of) for side in NAMES
        ]
    items = {side: Items(data, side) for side in NAMES}
    with keep_random_state():
        first = items["train"].read_item(0, 0, None)
    named = [{name: leaf_to_array(leaf) for name, leaf in name_leaves(leaves).items()} for leaves in first]
    dimensions = [{name: leaf.ndim for name, leaf in leaves.items()} for leaves in named]
    batch_of_one = {name: leaf[np.newaxis] for name, leaf in named[1].items()}
    profile.target_shape = [*batch_of_one[""].shape[1:]] if "" in batch_of_one else []
    profile.targets = detect_target_kind(batch_of_one.get("", batch_of_one), data.classes, of_pictures=data.pictures)
    measurers = [ItemMeasurer(each, profile.targets, len(data.classes), dimensions) for each in items.values()]
    pool, compared = start_loader_pool(measurers, settings.loaders or count_cores()), list[SampleDigests]()
    with closing(pool) if pool else nullcontext():
        for measurer, samples in zip(measurers, (data.train_samples, data.test_samples), strict=True):
            parts = (range(start, min(start + ITEMS, samples)) for start in range(0, samples, ITEMS))
            measured = map_in_loader_pool(pool, measurer.measure_items, parts)
            found = add_split_to_profile(profile, NAMES[measurer.items.side], measured, name_of)
            compared.append(found)
            chosen = np.linspace(samples - 1, 0, min(samples, LOOKED_TWICE), dtype=np.int64).tolist()
            with keep_random_state():
                again = measurer.measure_items(chosen).compared
            changed = (again.labels != found.labels[chosen]) | (again.digests != found.digests[chosen])
            if changed.any():
                name = f"{NAMES[measurer.items.side]} sample {chosen[changed.argmax()]}"
                fix = "a sample must depend on its number alone"
                raise UserError(f"dataset={data.name!r}: {name} has other content when read again; {fix}")
    return compared


def measure_arrays(data: SampleArrays, side: str, profile: DataProfile) -> Iterator[PartProfile]:
    """Yield the counts and problems of a side, "train" or "test", in parts of up to 4,096 samples.

    ``profile`` gives the kind of targets and the classes, and is not changed. If the data set has the rows as they were
    read, the columns of the rows are counted instead of the inputs.
    """
    inputs, targets = (name_leaves(getattr(data, f"{side}_{kind}")) for kind in ("inputs", "targets"))
    samples: int = getattr(data, f"{side}_samples")
    read, names = read_row_columns(data, side), data.preprocessing.columns
    size = sum(leaf.nbytes for leaf in (*inputs.values(), *targets.values()))
    step = min(ROWS, max(1, ROW_BYTES * samples // max(1, size)))
    for start in range(0, samples, step):
        numbers, part = range(start, min(start + step, samples)), slice(start, start + step)
        rows, truths = ({name: leaf[part] for name, leaf in leaves.items()} for leaves in (inputs, targets))
        found = measure_leaves(
            numbers, rows, truths, profile.targets, len(profile.classes), columns=names, with_numbers=not read
        )
        found.statistics |= {f"column {name}": values[part] for name, values in read.items()}
        yield found


def read_row_columns(data: SampleArrays, side: str) -> dict[str, NDArray[Any]]:
    """Return the columns of a side's rows as they were read, or {} if the rows are not stored.

    Skips columns of texts that differ in most of the training rows.
    """
    rows = data.load_rows(side)
    if rows is None:
        return {}
    training = normalize_columns(data.load_rows("train"))
    most = max(MOST_CATEGORIES, len(next(iter(training.values()), ())) // 2)
    free = {name for name, values in training.items() if values.dtype.kind == "U" and len(np.unique(values)) > most}
    return {name: values for name, values in normalize_columns(rows).items() if name not in free}


def count_categories_or_ranges(values: NDArray[Any]) -> Counter[str]:
    """Return the number of samples by text, or by range if the values are numbers."""
    return Counter(values.tolist()) if values.dtype.kind == "U" else count_by_range(values)


def add_split_to_profile(
    profile: DataProfile, split: str, parts: Iterable[PartProfile], name_of: Callable[[str, int], str]
) -> SampleDigests:
    """Add the counts and problems of a split to the profile, and return the samples' numbers, labels and digests.

    ``split`` is "training" or "test". At least one part is needed. ``name_of(split, sample)`` names a sample in
    messages.
    """
    compared = list[SampleDigests]()
    counts: SplitProfile = getattr(profile, split)
    for part in parts:
        # Copies, because arrays from a loader process keep the memory of the whole batch in use.
        compared.append(SampleDigests._make(map(np.copy, part.compared)))
        counts.samples += len(part.compared.numbers) + len(part.undecodable)
        counts.undecodable += len(part.undecodable)
        statistics = {statistic: count_categories_or_ranges(values) for statistic, values in part.statistics.items()}
        for statistic, counted in {"": part.targets, **statistics}.items():
            total = counts.statistics.setdefault(statistic, {}) if statistic else counts.labels
            for value, number in counted.items():
                total[value] = total.get(value, 0) + number
        for label, sample in part.labelled.items():
            if label not in profile.labelled:
                profile.labelled[label] = name_of(split, sample)
        profile.not_finite += len(part.not_finite)
        for sample, reason in [*part.not_finite.items(), *part.undecodable.items()][: FEW - len(profile.bad)]:
            profile.bad.append(f"{name_of(split, sample)} ({reason})")
    return SampleDigests._make(map(np.concatenate, zip(*compared, strict=True)))


def leaf_to_array(leaf: Any) -> NDArray[Any]:
    """Return a leaf as an array of numbers or texts, or as an array that holds any other object (shape []).

    A leaf is a value in the nested inputs or targets of a sample.
    """
    try:
        found = np.asarray(leaf)
    except (TypeError, ValueError):
        found = np.array(None)
    if found.dtype.kind not in "biufUS":
        found = np.array(None, object)
        found[()] = leaf
    return found


def detect_target_kind(targets: Leaves, classes: Sequence[str], *, of_pictures: bool = False) -> str:
    """Return the kind of targets by dtype and shape, or OTHERS if the targets are not an array of numbers.

    Integers [n] are CLASSES. Floats [n, k] of 0 and 1 are LABELS, unless the number of named classes is neither k nor
    0. Other integers are TOKENS, and other floats are NUMBERS. With ``of_pictures``, arrays [n, h, w] are MASKS,
    and integers [n, k] are treated like floats.
    """
    if not isinstance(targets, (np.ndarray, Ragged)) or targets.dtype.kind not in "biuf":
        return OTHERS
    whole = targets.dtype.kind in "iu"
    if isinstance(targets, Ragged):
        return TOKENS if whole else NUMBERS
    if targets.ndim == 1:
        return CLASSES if whole else NUMBERS
    if of_pictures and targets.ndim > 2:
        return MASKS
    if whole and not of_pictures:  # with pictures, whole numbers in a row are labels
        return TOKENS
    labels = targets.ndim == 2 and np.isin(np.nan_to_num(targets), (0, 1)).all()
    return LABELS if labels and len(classes) in (0, targets.shape[1]) else NUMBERS


def measure_leaves(
    samples: Sequence[int],
    inputs: Mapping[str, Values],
    targets: Mapping[str, Values],
    kind: str,
    classes: int,
    *,
    columns: Mapping[str, Sequence[str]] | None = None,
    with_numbers: bool = True,
) -> PartProfile:
    """Return the counts and problems of n samples, from leaves of inputs and targets by name.

    Args:
        samples: The numbers of the samples [n].
        inputs: The leaves of the inputs by name: an array [n, ...], or a list of n arrays.
        targets: The leaves of the targets by name, in the same form.
        kind: The kind of targets. Every kind but OTHERS needs a single leaf.
        classes: The number of named classes.
        columns: The names of the inputs' columns by leaf.
        with_numbers: Whether the numbers of the inputs are counted.
    """
    by_leaf, not_finite = dict[str, NDArray[Any]](), dict[int, str]()
    for side, named in (("inputs", inputs), ("targets", targets)):
        for name, values in named.items():
            called, whether = f"{side} {name}".rstrip(), with_numbers if side == "inputs" else kind == OTHERS
            named_columns = (columns or {}).get(name, ()) if side == "inputs" else ()
            by_leaf |= compute_leaf_statistics(called, values, named_columns, with_numbers=whether)
            if not has_numbers(values):
                continue
            for place in np.flatnonzero(apply_to_rows(values, UNUSABLE[side])).tolist():
                not_finite[samples[place]] = called
    digests, labels = (digest_samples(len(samples), [*named.values()]) for named in (inputs, targets))
    counted, labelled = Counter[str](), dict[str, int]()
    if kind != OTHERS:
        [values] = targets.values()
        counted = count_samples_by_target(values, kind)
        if kind == CLASSES:
            labels = np.array(values, np.int64)
        if kind in (CLASSES, TOKENS):
            labelled = find_labels_out_of_range(samples, values, classes)
    return PartProfile(
        SampleDigests(np.array(samples, np.int64), labels, digests), counted, by_leaf, labelled, not_finite
    )


def digest_samples(samples: int, leaves: Sequence[Values]) -> NDArray[np.int64]:
    return np.array([digest_leaves([values[place] for values in leaves]) for place in range(samples)], np.int64)
