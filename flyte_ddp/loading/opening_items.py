"""Open the splits of images in arrays, of any leaves, and of what the user's own code reads on demand."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.images import ImageArrays
from flyte_ddp.datasets.on_demand_set import OnDemandSet
from flyte_ddp.datasets.prepared import ItemSet, has_pictures, order_test_split
from flyte_ddp.datasets.sample_arrays import SampleArrays, require_identifiers
from flyte_ddp.errors import UserError
from flyte_ddp.leaves import Leaves, form_of, name_leaves
from flyte_ddp.loading.arrays import open_array_batches, open_array_images
from flyte_ddp.loading.collate import PADDED, STACKED
from flyte_ddp.loading.own_images import ItemImages
from flyte_ddp.loading.own_items import ArrayItems, ItemLoader, Items, OnDemandItems
from flyte_ddp.loading.own_samples import import_own_loading, target_spec
from flyte_ddp.loading.split import BatchSource, Split, Splits, TargetSpec, make_splits
from flyte_ddp.loading.worker_sources import ItemBatches, WorkerImages
from flyte_ddp.loading.workers import make_pool
from flyte_ddp.models.images import InputSpec
from flyte_ddp.models.inputs import LeafSpec, LeavesSpec, ModelInput
from flyte_ddp.order.random_state import keep_random_state
from flyte_ddp.order.sampling import Order
from flyte_ddp.torchvision_weights import IMAGENET

LOOKED_AT = 16
OTHER = LeafSpec((), "other")
TYPES = {"float": "float", "bool": "bool", "int": "int64"}  # of a LeafSpec, by a part of torch's or NumPy's name


class ItemFacts(NamedTuple):
    """What the samples of a data set of any leaves have in common."""

    inputs: LeavesSpec
    targets: TargetSpec | None  # None: they are several leaves, or none
    masked: str | None = None  # name of the input whose mask the model also gets, if ``collate`` is "padded"


def open_image_splits(
    data: ImageArrays | OnDemandSet,
    orders: Mapping[str, Order],
    hp: Hyperparameters,
    device: torch.device,
    workers: int,
) -> Splits:
    """Return the splits of images in arrays, or of pictures on demand; ``workers`` processes run the user's code."""
    _, augment = import_own_loading(hp)
    crop = "none" if augment else hp.augment
    inputs, targets = describe_images(data, "train", orders["training"], hp.seed, hp.num_classes)
    direct: dict[str, BatchSource] = {}
    if isinstance(data, ImageArrays):
        direct["train"] = open_array_images(device, data.train_images, data.train_labels, crop, hp.seed)
        direct["test"] = open_array_images(device, data.test_images, data.test_labels)
    own_augment = {"train": augment, "test": None}
    loaders = {
        side: make_image_loader(data, side, inputs, targets, hp.seed, augment=own, image_size=hp.image_size)
        for side, own in own_augment.items()
        if own or not direct
    }
    pool = make_pool([*loaders.values()], workers)
    by_processes = {side: WorkerImages(loader, pool, device, crop, hp.seed) for side, loader in loaders.items()}
    return make_splits(orders, direct, by_processes, inputs, targets)


def open_leaf_splits(
    data: ItemSet, orders: Mapping[str, Order], hp: Hyperparameters, device: torch.device, workers: int
) -> Splits:
    """Return the splits of samples of any leaves; ``workers`` processes load what needs the user's own code."""
    _, augment = import_own_loading(hp)
    items = open_items(data)
    facts = describe_items(data, "train", orders["training"], hp.collate, hp.seed)
    mixed = all(leaf.dtype == "float" and None not in leaf.shape for _, leaf in facts.inputs.leaves)
    if hp.mixup and (hp.collate == PADDED or not mixed):
        inputs = facts.inputs.describe() + (", padded" if hp.collate == PADDED else "")
        raise UserError(
            f"mixup={hp.mixup:g}: the inputs are {inputs}, and only floats of one shape can be mixed; set mixup=0"
        )
    direct = {
        side: open_array_batches(device, each.inputs, each.targets, facts.masked, each.ids)
        for side, each in items.items()
        if isinstance(each, ArrayItems) and ":" not in hp.collate
    }
    own_augment = {"train": augment, "test": None}
    loaders = {
        side: ItemLoader(items[side], side, hp.collate, hp.seed, augment=own, masked=facts.masked)
        for side, own in own_augment.items()
        if own or not direct
    }
    pool = make_pool([*loaders.values()], workers)
    by_processes = {side: ItemBatches(loader, pool, device) for side, loader in loaders.items()}
    return make_splits(orders, direct, by_processes, facts.inputs, facts.targets)


def open_item_test_split(
    data: ImageArrays | ItemSet,
    collate: str,
    seed: int,
    device: torch.device,
    workers: int,
    *,
    like: LeavesSpec | None = None,
) -> tuple[Split, ModelInput]:
    """Open the test split alone; return it, and what its inputs are.

    Reads up to LOOKED_AT (16) samples here if the user's own code reads or collates them. ``collate`` and ``seed`` are
    the hyperparameters of the model that gets the samples, ``like`` its inputs, whose order a dict of inputs gets.
    """
    items, order = open_items(data)["test"], order_test_split(data)
    if isinstance(data, ImageArrays) or has_pictures(data):
        inputs, targets = describe_images(data, "test", order, seed, 0)
        if isinstance(data, ImageArrays):
            return Split(open_array_images(device, data.test_images, data.test_labels), order), inputs
        images = make_image_loader(data, "test", inputs, targets, seed)
        return Split(WorkerImages(images, make_pool([images], workers), device), order), inputs
    facts = describe_items(data, "test", order, collate, seed, like=like)
    if isinstance(items, ArrayItems) and ":" not in collate:
        arrays = open_array_batches(device, items.inputs, items.targets, facts.masked, items.ids)
        return Split(arrays, order), facts.inputs
    loader = ItemLoader(items, "test", collate, seed, masked=facts.masked)
    return Split(ItemBatches(loader, make_pool([loader], workers), device), order), facts.inputs


def open_items(data: ImageArrays | ItemSet) -> dict[str, Items]:
    if isinstance(data, OnDemandSet):
        return {side: OnDemandItems(data, side) for side in ("train", "test")}
    if isinstance(data, ImageArrays):
        train, test = (data.train_images, data.train_labels), (data.test_images, data.test_labels)
        return {"train": ArrayItems(*train), "test": ArrayItems(*test)}
    return {
        "train": ArrayItems(data.train_inputs, data.train_targets, data.train_ids),
        "test": ArrayItems(data.test_inputs, data.test_targets, data.test_ids),
    }


def make_image_loader(
    data: ImageArrays | OnDemandSet, side: str, inputs: InputSpec, targets: TargetSpec, seed: int, **augmentation: Any
) -> ItemImages:
    size = inputs.height, inputs.width, inputs.channels
    name = f"dataset={data.name!r}: {side}"
    return ItemImages(open_items(data)[side], name, size=size, targets=targets, seed=seed, **augmentation)


def describe_images(
    data: ImageArrays | OnDemandSet, side: str, order: Order, seed: int, num_classes: int
) -> tuple[InputSpec, TargetSpec]:
    """Return size and normalisation of images, and what their targets are; read the first of pictures on demand.

    Pictures on demand are normalised as ImageNet, because their own mean and deviation would need all of them.
    """
    if isinstance(data, ImageArrays):
        _, height, width, channels = data.train_images.shape
        targets = TargetSpec(data.train_labels.dtype, data.train_labels.shape[1:], len(data.classes))
        return InputSpec(channels, height, width, data.mean, data.std), targets
    first = int(order.samples(slice(0, 1))[0])
    with keep_random_state():
        pixels, target = open_items(data)[side].read_item(first, seed, None)
    height, width, channels = pixels.shape
    mean, std = (each if channels == 3 else (round(fmean(each), 3),) * channels for each in IMAGENET)
    classes = len(data.classes) or num_classes
    targets = target_spec(f"dataset={data.name!r}", target, classes, f"{side} sample {first}")
    return InputSpec(channels, height, width, mean, std), targets


def describe_items(
    data: ItemSet, side: str, order: Order, collate: str, seed: int, *, like: LeavesSpec | None = None
) -> ItemFacts:
    """Return the facts of a data set, the inputs in the order of ``like``.

    On demand, or with a ``collate`` of the user's own, they are of up to 16 samples (LOOKED_AT), which are read here.
    """
    if isinstance(data, SampleArrays) and ":" not in collate:
        inputs, targets = describe_leaves(data.train_inputs), describe_leaves(data.train_targets)
    else:
        loader = ItemLoader(open_items(data)[side], side, collate if ":" in collate else STACKED, seed)
        places = np.unique(np.linspace(0, len(order) - 1, LOOKED_AT, dtype=np.int64)).tolist()
        samples = [int(order.samples(slice(place, place + 1))[0]) for place in places]
        with keep_random_state():
            alone = [loader.load_items([sample], None) for sample in samples]
        require_identifiers(f"dataset={data.name!r}: inputs", alone[0][0])
        inputs, targets = (join_specs([describe_leaves(batch[part]) for batch in alone]) for part in (0, 1))
    for kind, spec in (("inputs", inputs), ("targets", targets)):
        if collate == STACKED and any(None in leaf.shape for _, leaf in spec.leaves):
            raise UserError(
                f"collate='stacked': the {kind} of dataset={data.name!r} have different lengths; set 'padded', or a "
                "function of your own"
            )
    inputs = inputs if like is None else inputs.in_order_of(like)
    trained = {} if like is None else dict(like.leaves)  # a few new samples may happen to have one length
    shapes = {name: trained.get(name, leaf).shape for name, leaf in inputs.leaves}
    with_lengths = [name for name, shape in shapes.items() if shape]
    ragged = (name for name, shape in shapes.items() if shape[:1] == (None,))
    masked = next(ragged, next(iter(with_lengths), None))
    return ItemFacts(inputs, single_target_spec(targets), masked if collate == PADDED else None)


def describe_leaves(leaves: Leaves) -> LeavesSpec:
    """Return the spec of a sample, given leaves of several: arrays, ragged ones or tensors; others are "other"."""

    def describe(leaf: Any) -> LeafSpec:
        dtype = next((TYPES[part] for part in TYPES if part in str(getattr(leaf, "dtype", ""))), None)
        return LeafSpec(tuple(leaf.shape[1:]), dtype) if dtype else OTHER

    named = {name: describe(leaf) for name, leaf in name_leaves(leaves).items()}
    return LeavesSpec(form_of(leaves), (*named.items(),))


def join_specs(specs: Sequence[LeavesSpec]) -> LeavesSpec:
    """Return the spec of all samples, given those of some: a size that differs is None."""
    joined = dict[str, LeafSpec]()
    for name, first in specs[0].leaves:
        found = [leaf for spec in specs for other, leaf in spec.leaves if other == name]
        sizes = [{*each} for each in zip(*(leaf.shape for leaf in found), strict=False)]
        dtype = "float" if any(leaf.dtype == "float" for leaf in found) else first.dtype
        joined[name] = LeafSpec(tuple(next(iter(each)) if len(each) == 1 else None for each in sizes), dtype)
    return LeavesSpec(specs[0].form, (*joined.items(),))


def single_target_spec(targets: LeavesSpec) -> TargetSpec | None:
    """Return what all targets are; None unless they are a single leaf of numbers."""
    [(_, leaf)] = targets.leaves if targets.form == "leaf" else [("", OTHER)]
    if leaf.dtype == OTHER.dtype:
        return None
    dtype = np.dtype({"float": np.float32, "bool": np.bool_}.get(leaf.dtype, np.int64))
    return TargetSpec(dtype, tuple(1 if size is None else size for size in leaf.shape), varies=None in leaf.shape)
