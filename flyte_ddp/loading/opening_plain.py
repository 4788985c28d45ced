"""Open the splits of data sets whose samples are no images."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.on_demand_set import OnDemandSet
from flyte_ddp.datasets.prepared import PlainSet, order_test_split
from flyte_ddp.datasets.sample_arrays import Ragged, SampleArrays, read_sample
from flyte_ddp.errors import UserError
from flyte_ddp.leaves import Leaves, map_leaves, name_leaves
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


def open_plain_splits(
    data: PlainSet, orders: Mapping[str, Order], hp: Hyperparameters, device: torch.device, workers: int
) -> Splits:
    """Return the splits of samples that are no images.

    Arrays are stacked or padded by the rank, and copied to the device if it is a GPU. ``workers`` processes load what
    needs the user's own code: items on demand, and batches with an ``augment`` or a ``collate`` of his. Of items on
    demand reads the first training sample here. Raises UserError if samples have different lengths and ``collate`` is
    "stacked", and for ``mixup`` of inputs that are not all floats.
    """
    _, augment = import_own_loading(hp)
    items = open_items(data)
    first = int(orders["training"].samples(slice(0, 1))[0])
    facts = describe_plain_set(data, items["train"], first, hp.collate, hp.seed)
    if hp.mixup and any(leaf.dtype != "float" for _, leaf in facts.inputs.leaves):
        inputs = facts.inputs.describe()
        raise UserError(f"mixup={hp.mixup:g}: the inputs are {inputs}, and only floats can be mixed; set mixup=0")
    sources: dict[str, ImageSource] = {}
    if isinstance(data, SampleArrays) and ":" not in hp.collate:
        sources["train"] = open_array_batches(device, data.train_inputs, data.train_targets)
        sources["test"] = open_array_batches(device, data.test_inputs, data.test_targets)
    training = sources.get("train")
    if augment or training is None:
        own_augment = {"train": augment, "test": None}
        loaders = [ItemLoader(items[side], side, hp.collate, own_augment[side], hp.seed) for side in items]
        pool = make_pool(loaders, workers)
        own = {loader.side: ItemBatches(loader, pool, device) for loader in loaders}
        training = own["train"]
        sources = sources or {**own}
    return Splits(
        Split(training, orders["training"]),
        Split(sources["train"], orders["validation"]),
        Split(sources["test"], orders["test"]),
        *facts,
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
    facts = describe_plain_set(data, items, int(order.samples(slice(0, 1))[0]), collate, seed)
    if isinstance(data, SampleArrays) and ":" not in collate:
        return Split(open_array_batches(device, data.test_inputs, data.test_targets), order), facts
    loader = ItemLoader(items, "test", collate, None, seed)
    return Split(ItemBatches(loader, make_pool([loader], workers), device), order), facts


def describe_plain_set(data: PlainSet, items: Items, first: int, collate: str, seed: int) -> PlainFacts:
    """Return the facts of a data set; of one on demand by reading the sample ``first`` of ``items``.

    Raises UserError for arrays of samples of different lengths if ``collate`` is "stacked".
    """
    if isinstance(data, SampleArrays):
        inputs, targets = read_sample(data.train_inputs, data.train_targets, 0)
        ragged_inputs, ragged_targets = (
            {name: isinstance(leaf, Ragged) for name, leaf in name_leaves(leaves).items()}
            for leaves in (data.train_inputs, data.train_targets)
        )
        for kind, ragged in (("inputs", ragged_inputs), ("targets", ragged_targets)):
            if collate == STACKED and any(ragged.values()):
                raise UserError(
                    f"collate='stacked': the {kind} of dataset={data.name!r} have different lengths; set 'padded', or "
                    "a function of your own"
                )
    else:
        with keep_random_state():
            inputs, targets = (map_leaves(np.asarray, leaves) for leaves in items.read_item(first, seed, None))
        ragged_inputs, ragged_targets = (
            {name: collate == PADDED and leaf.ndim > 0 for name, leaf in name_leaves(leaves).items()}
            for leaves in (inputs, targets)
        )
    return PlainFacts(describe_leaves(inputs, ragged_inputs), describe_target(targets, ragged_targets))


def describe_target(targets: Leaves, ragged: Mapping[str, bool]) -> TargetKind | None:
    """Return the kind of all targets, given one sample's; None unless it is a single leaf.

    Of targets of different lengths the kind has the shape of one.
    """
    if not isinstance(targets, np.ndarray):
        return None
    whole = targets.dtype.kind in "iu"
    dtype = np.dtype(np.int64 if whole else np.bool_ if targets.dtype.kind == "b" else np.float32)
    return TargetKind(dtype, targets.shape, varies=any(ragged.values()))
