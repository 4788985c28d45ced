"""Open the splits of data sets of any leaves, and of pictures that the user's own code reads on demand."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.on_demand_set import OnDemandSet
from flyte_ddp.datasets.prepared import PlainSet, has_pictures, order_test_split
from flyte_ddp.datasets.sample_arrays import Ragged, SampleArrays, require_identifiers
from flyte_ddp.errors import UserError
from flyte_ddp.leaves import Leaves, form_of, name_leaves
from flyte_ddp.loading.collate import PADDED, STACKED
from flyte_ddp.loading.own_images import ItemImages
from flyte_ddp.loading.own_items import ArrayItems, ItemLoader, Items, OnDemandItems
from flyte_ddp.loading.own_samples import import_own_loading, kind_of_targets
from flyte_ddp.loading.sample_arrays import open_array_batches
from flyte_ddp.loading.seeding import keep_random_state
from flyte_ddp.loading.split import ImageSource, Split, Splits, TargetKind
from flyte_ddp.loading.worker_sources import ItemBatches, WorkerImages
from flyte_ddp.loading.workers import make_pool
from flyte_ddp.models.images import InputSpec
from flyte_ddp.models.inputs import LeafSpec, LeavesSpec, ModelInput
from flyte_ddp.order.sampling import Order
from flyte_ddp.torchvision_weights import IMAGENET

LOOKED_AT = 16
OTHER = LeafSpec((), "other")


class PlainFacts(NamedTuple):
    """What the samples of a data set have in common."""

    inputs: LeavesSpec
    targets: TargetKind | None  # None: they are several leaves, or none
    masked: str | None = None  # name of the input whose mask the model also gets, if ``collate`` is "padded"


def open_plain_splits(
    data: PlainSet, orders: Mapping[str, Order], hp: Hyperparameters, device: torch.device, workers: int
) -> Splits:
    """Return the splits of samples of any leaves.

    Of pictures on demand see :func:`open_picture_splits`. Arrays are stacked or padded by the rank, and copied to the
    device if it is a GPU. ``workers`` processes load what needs the user's own code: items on demand, and batches with
    an own ``augment`` or ``collate``. Of items on demand, and with an own ``collate``, reads up to 16 training samples
    here. Raises UserError if samples have different lengths and ``collate`` is "stacked", for names of inputs that are
    no identifiers, and for ``mixup`` of inputs that are not all floats of one shape.
    """
    if has_pictures(data):
        return open_picture_splits(data, orders, hp, device, workers)
    _, augment = import_own_loading(hp)
    items = open_items(data)
    facts = describe_plain_set(data, "train", orders["training"], hp.collate, hp.seed)
    mixed = all(leaf.dtype == "float" and None not in leaf.shape for _, leaf in facts.inputs.leaves)
    if hp.mixup and (hp.collate == PADDED or not mixed):
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


def open_picture_splits(
    data: OnDemandSet, orders: Mapping[str, Order], hp: Hyperparameters, device: torch.device, workers: int
) -> Splits:
    """Return the splits of pictures that ``workers`` processes read; reads the first training sample here.

    Raises the errors of :meth:`flyte_ddp.loading.own_images.ItemImages.load_sample`.
    """
    _, augment = import_own_loading(hp)
    inputs, targets = describe_pictures(data, "train", orders["training"], hp.seed, hp.num_classes)
    own_augment = {"train": augment, "test": None}
    loaders = {
        side: make_picture_loader(data, side, inputs, targets, hp.seed, augment=own, image_size=hp.image_size)
        for side, own in own_augment.items()
    }
    pool = make_pool([*loaders.values()], workers)
    crop = "none" if augment else hp.augment
    train, test = (WorkerImages(loader, pool, device, crop, hp.seed) for loader in loaders.values())
    return Splits(
        Split(train, orders["training"]),
        Split(train, orders["validation"]),
        Split(test, orders["test"]),
        inputs,
        targets,
    )


def make_picture_loader(
    data: OnDemandSet, side: str, inputs: InputSpec, targets: TargetKind, seed: int, **augmentation: Any
) -> ItemImages:
    """Return the loader of one side, "train" or "test", of pictures on demand."""
    size = inputs.height, inputs.width, inputs.channels
    name = f"dataset={data.name!r}: {side}"
    return ItemImages(open_items(data)[side], name, size=size, targets=targets, seed=seed, **augmentation)


def describe_pictures(
    data: OnDemandSet, side: str, order: Order, seed: int, num_classes: int
) -> tuple[InputSpec, TargetKind]:
    """Return size and normalisation of pictures on demand, and the kind of their targets, given the first of an order.

    Mean and deviation are ImageNet's, for other than three channels the mean of its channels', because those of the
    data set would need all pictures. Raises the errors of reading.
    """
    first = int(order.samples(slice(0, 1))[0])
    with keep_random_state():
        pixels, target = open_items(data)[side].read_item(first, seed, None)
    height, width, channels = pixels.shape
    mean, std = (each if channels == 3 else (round(fmean(each), 3),) * channels for each in IMAGENET)
    kind = kind_of_targets(f"dataset={data.name!r}", target, len(data.classes) or num_classes, f"{side} sample {first}")
    return InputSpec(channels, height, width, mean, std), kind


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
) -> tuple[Split, ModelInput, TargetKind | None]:
    """Open the test split alone; return it, what its inputs are, and the kind of its targets if they are one leaf.

    ``collate`` and ``seed`` are the hyperparameters of the model that gets the samples. Raises the errors of
    :func:`open_plain_splits`.
    """
    items, order = open_items(data)["test"], order_test_split(data)
    if has_pictures(data):
        inputs, targets = describe_pictures(data, "test", order, seed, 0)
        loader = make_picture_loader(data, "test", inputs, targets, seed)
        return Split(WorkerImages(loader, make_pool([loader], workers), device), order), inputs, targets
    facts = describe_plain_set(data, "test", order, collate, seed)
    if isinstance(data, SampleArrays) and ":" not in collate:
        arrays = open_array_batches(device, data.test_inputs, data.test_targets, facts.masked)
        return Split(arrays, order), facts.inputs, facts.targets
    own = ItemLoader(items, "test", collate, seed, masked=facts.masked)
    return Split(ItemBatches(own, make_pool([own], workers), device), order), facts.inputs, facts.targets


def describe_plain_set(data: PlainSet, side: str, order: Order, collate: str, seed: int) -> PlainFacts:
    """Return the facts of a data set.

    Of arrays they are known. Of a set on demand, and with a ``collate`` of the user's own, they are of LOOKED_AT (16)
    samples of ``order``, which are of the ``side`` "train" or "test". Raises the errors of loading these samples, and
    UserError for samples of different lengths if ``collate`` is "stacked", and names of inputs that are no identifiers.
    """
    if isinstance(data, SampleArrays) and ":" not in collate:
        inputs, targets = describe_arrays(data.train_inputs), describe_arrays(data.train_targets)
    else:
        loader = ItemLoader(open_items(data)[side], side, collate if ":" in collate else STACKED, seed)
        places = np.unique(np.linspace(0, len(order) - 1, LOOKED_AT, dtype=np.int64)).tolist()
        samples = [int(order.samples(slice(place, place + 1))[0]) for place in places]
        with keep_random_state():
            alone = [loader.load_items([sample], None) for sample in samples]
        require_identifiers(f"dataset={data.name!r}: inputs", alone[0][0])
        inputs, targets = (join_specs([describe_batch(batch[part]) for batch in alone]) for part in (0, 1))
    for kind, spec in (("inputs", inputs), ("targets", targets)):
        if collate == STACKED and any(None in leaf.shape for _, leaf in spec.leaves):
            raise UserError(
                f"collate='stacked': the {kind} of dataset={data.name!r} have different lengths; set 'padded', or a "
                "function of your own"
            )
    with_lengths = [name for name, leaf in inputs.leaves if leaf.shape]
    ragged = (name for name, leaf in inputs.leaves if leaf.shape[:1] == (None,))
    masked = next(ragged, next(iter(with_lengths), None))
    return PlainFacts(inputs, describe_target(targets), masked if collate == PADDED else None)


def describe_arrays(leaves: Leaves) -> LeavesSpec:
    """Return the spec of a sample of arrays and ragged leaves."""
    named = {
        name: LeafSpec(
            (None, *leaf.values.shape[1:]) if isinstance(leaf, Ragged) else leaf.shape[1:],
            {"f": "float", "b": "bool"}.get(leaf.dtype.kind, "int64"),
        )
        for name, leaf in name_leaves(leaves).items()
    }
    return LeavesSpec(form_of(leaves), (*named.items(),))


def describe_batch(leaves: Leaves) -> LeavesSpec:
    """Return the spec of the samples of a batch; a leaf that is no tensor is of type "other"."""
    named = {
        name: LeafSpec(
            tuple(leaf.shape[1:]),
            "float" if leaf.is_floating_point() else "bool" if leaf.dtype == torch.bool else "int64",
        )
        if isinstance(leaf, Tensor)
        else OTHER
        for name, leaf in name_leaves(leaves).items()
    }
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


def describe_target(targets: LeavesSpec) -> TargetKind | None:
    """Return the kind of all targets; None unless they are a single leaf of numbers."""
    [(_, leaf)] = targets.leaves if targets.form == "leaf" else [("", OTHER)]
    if leaf.dtype == OTHER.dtype:
        return None
    dtype = np.dtype({"float": np.float32, "bool": np.bool_}.get(leaf.dtype, np.int64))
    return TargetKind(dtype, tuple(1 if size is None else size for size in leaf.shape), varies=None in leaf.shape)
