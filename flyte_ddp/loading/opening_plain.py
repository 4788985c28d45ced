"""Open the splits of data sets whose samples are no images."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.on_demand_set import OnDemandSet
from flyte_ddp.datasets.prepared import PlainSet, order_test_split
from flyte_ddp.datasets.sample_arrays import Ragged, SampleArrays, read_sample, require_identifiers
from flyte_ddp.errors import UserError
from flyte_ddp.leaves import Leaves, form_of, map_leaves, name_leaves, restore_leaves
from flyte_ddp.loading.collate import PADDED, STACKED
from flyte_ddp.loading.own_items import ArrayItems, ItemLoader, Items, OnDemandItems
from flyte_ddp.loading.own_samples import import_own_loading
from flyte_ddp.loading.sample_arrays import open_array_batches
from flyte_ddp.loading.seeding import keep_random_state
from flyte_ddp.loading.split import ImageSource, Split, Splits, TargetKind
from flyte_ddp.loading.workers import ItemBatches, make_pool
from flyte_ddp.models.inputs import LeavesSpec, describe_leaves
from flyte_ddp.order.sampling import Order


class PlainFacts(NamedTuple):
    """What the samples of a data set have in common."""

    inputs: LeavesSpec
    targets: TargetKind | None  # None: they are several leaves, or none
    masked: str | None = None  # name of the input whose mask the model also gets, if ``collate`` is "padded"


def open_plain_splits(
    data: PlainSet, orders: Mapping[str, Order], hp: Hyperparameters, device: torch.device, workers: int
) -> Splits:
    """Return the splits of samples that are no images.

    Arrays are stacked or padded by the rank, and copied to the device if it is a GPU. ``workers`` processes load what
    needs the user's own code: items on demand, and batches with an ``augment`` or a ``collate`` of his. Of items on
    demand, and with his ``collate``, reads one or two training samples here. Raises UserError if samples have different
    lengths and ``collate`` is "stacked", for names of inputs that are no identifiers, and for ``mixup`` of inputs that
    are not all floats of one shape.
    """
    _, augment = import_own_loading(hp)
    items = open_items(data)
    facts = describe_plain_set(data, "train", orders["training"], hp.collate, hp.seed)
    if hp.mixup and (hp.collate == PADDED or any(leaf.dtype != "float" for _, leaf in facts.inputs.leaves)):
        inputs = facts.inputs.describe() + (", padded" if hp.collate == PADDED else "")
        raise UserError(
            f"mixup={hp.mixup:g}: the inputs are {inputs}, and only floats of one shape can be mixed; set mixup=0"
        )
    sources: dict[str, ImageSource] = {}
    if isinstance(data, SampleArrays) and ":" not in hp.collate:
        sources["train"] = open_array_batches(device, data.train_inputs, data.train_targets, facts.masked)
        sources["test"] = open_array_batches(device, data.test_inputs, data.test_targets, facts.masked)
    training = sources.get("train")
    if augment or training is None:
        own_augment = {"train": augment, "test": None}
        loaders = [
            ItemLoader(items[side], side, hp.collate, hp.seed, augment=own_augment[side], masked=facts.masked)
            for side in items
        ]
        pool = make_pool(loaders, workers)
        own = {loader.side: ItemBatches(loader, pool, device) for loader in loaders}
        training = own["train"]
        sources = sources or {**own}
    return Splits(
        Split(training, orders["training"]),
        Split(sources["train"], orders["validation"]),
        Split(sources["test"], orders["test"]),
        facts.inputs,
        facts.targets,
    )


def open_items(data: PlainSet) -> dict[str, Items]:
    """Return the items of the two sides of a data set, "train" and "test"."""
    if isinstance(data, OnDemandSet):
        return {side: OnDemandItems(data, side) for side in ("train", "test")}
    return {
        "train": ArrayItems(data.train_inputs, data.train_targets),
        "test": ArrayItems(data.test_inputs, data.test_targets),
    }


def open_plain_test_split(
    data: PlainSet, collate: str, seed: int, device: torch.device, workers: int
) -> tuple[Split, PlainFacts]:
    """Open the test split alone; return it, and the facts of its samples.

    ``collate`` and ``seed`` are the hyperparameters of the model that gets the samples. Raises the errors of
    :func:`open_plain_splits`.
    """
    items, order = open_items(data)["test"], order_test_split(data)
    facts = describe_plain_set(data, "test", order, collate, seed)
    if isinstance(data, SampleArrays) and ":" not in collate:
        return Split(open_array_batches(device, data.test_inputs, data.test_targets, facts.masked), order), facts
    loader = ItemLoader(items, "test", collate, seed, masked=facts.masked)
    return Split(ItemBatches(loader, make_pool([loader], workers), device), order), facts


def describe_plain_set(data: PlainSet, side: str, order: Order, collate: str, seed: int) -> PlainFacts:
    """Return the facts of a data set.

    With a ``collate`` of the user's own they are of the batch that it makes of the first one or two samples of
    ``order``, which are of the ``side`` "train" or "test"; of a set on demand they are of the first sample. Raises the
    errors of loading these samples, UserError for arrays of samples of different lengths if ``collate`` is "stacked",
    and for names of inputs that are no identifiers.
    """
    if isinstance(data, SampleArrays) and ":" not in collate:
        sample = read_sample(data.train_inputs, data.train_targets, 0)
        inputs, targets = (map_leaves(np.asarray, leaves) for leaves in sample)
        ragged = find_ragged_leaves(data.train_inputs), find_ragged_leaves(data.train_targets)
        for kind, leaves in zip(("inputs", "targets"), ragged, strict=True):
            if collate == STACKED and any(leaves.values()):
                raise UserError(
                    f"collate='stacked': the {kind} of dataset={data.name!r} have different lengths; set 'padded', or "
                    "a function of your own"
                )
    else:
        first, used = (order.samples(slice(0, 2)), collate) if ":" in collate else (order.samples(slice(0, 1)), STACKED)
        loader = ItemLoader(open_items(data)[side], side, used, seed)
        with keep_random_state():
            batch = loader.load_items(first.tolist(), None)
        require_identifiers(f"dataset={data.name!r}: inputs", batch[0])
        inputs, targets = (
            restore_leaves(
                form_of(leaves), {name: leave_out_samples(leaf) for name, leaf in name_leaves(leaves).items()}
            )
            for leaves in batch
        )
        # Floats that the user's own collate returns as targets are taken for as many numbers in each sample.
        ragged = (
            {name: collate != STACKED and leaf.ndim > 0 for name, leaf in name_leaves(inputs).items()},
            {
                name: leaf.ndim > 0 and (collate == PADDED or (":" in collate and leaf.dtype.kind == "i"))
                for name, leaf in name_leaves(targets).items()
            },
        )
    with_lengths = [name for name, leaf in name_leaves(inputs).items() if leaf.ndim]
    masked = next((name for name in with_lengths if ragged[0][name]), next(iter(with_lengths), None))
    spec = describe_leaves(inputs, ragged[0])
    return PlainFacts(spec, describe_target(targets, ragged[1]), masked if collate == PADDED else None)


def find_ragged_leaves(leaves: Leaves) -> dict[str, bool]:
    """Return whether each leaf of a data set of arrays is ragged, by its name."""
    return {name: isinstance(leaf, Ragged) for name, leaf in name_leaves(leaves).items()}


def leave_out_samples(leaf: Any) -> NDArray[Any]:
    """Return an array, of any values, of type and shape of one sample of a batch's leaf; of an object for no tensor."""
    if not isinstance(leaf, Tensor):
        return np.empty((), np.object_)
    kind = np.float32 if leaf.is_floating_point() else np.bool_ if leaf.dtype == torch.bool else np.int64
    return np.empty(tuple(leaf.shape[1:]), kind)


def describe_target(targets: Leaves, ragged: Mapping[str, bool]) -> TargetKind | None:
    """Return the kind of all targets, given one sample's; None unless it is a single leaf of numbers.

    Of targets of different lengths the kind has the shape of one.
    """
    if not isinstance(targets, np.ndarray) or targets.dtype.kind == "O":
        return None
    whole = targets.dtype.kind in "iu"
    dtype = np.dtype(np.int64 if whole else np.bool_ if targets.dtype.kind == "b" else np.float32)
    return TargetKind(dtype, targets.shape, varies=any(ragged.values()))
