"""Open the splits of images in arrays, of any leaves, and of what the user's own code reads on demand."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from flyte_ddp.catalog import IMAGENET
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.prepared import ItemSet, order_test_split
from flyte_ddp.datasets.sample_arrays import SampleArrays, require_identifiers
from flyte_ddp.errors import UserError
from flyte_ddp.loading.arrays import open_array_batches
from flyte_ddp.loading.collate import PADDED, STACKED
from flyte_ddp.loading.own_items import ItemImages, ItemLoader, Items
from flyte_ddp.loading.own_samples import OwnFunction, import_own_loading, target_spec
from flyte_ddp.loading.split import BatchSource, Split, Splits, TargetSpec
from flyte_ddp.loading.worker_sources import ItemBatches, WorkerImages
from flyte_ddp.loading.workers import make_pool
from flyte_ddp.models.images import InputSpec
from flyte_ddp.models.inputs import LeafSpec, LeavesSpec, ModelInput
from flyte_ddp.order.random_state import keep_random_state
from flyte_ddp.order.sampling import Order
from flyte_ddp.samples.leaves import Leaves, form_of, name_leaves

LOOKED_AT = 16
OTHER = LeafSpec((), "other")
TYPES = {"float": "float", "bool": "bool", "int": "int64"}  # of a LeafSpec, by a part of torch's or NumPy's name


class ItemFacts(NamedTuple):
    """What the samples of a data set have in common."""

    inputs: ModelInput
    targets: TargetSpec | None  # None: they are several leaves, or none
    masked: str | None = None  # name of the input whose mask the model also gets, if ``collate`` is "padded"


def open_item_splits(
    data: ItemSet, orders: Mapping[str, Order], hp: Hyperparameters, device: torch.device, workers: int
) -> Splits:
    """Return the splits of arrays, or of a set on demand; ``workers`` processes load what needs the user's own code."""
    _, augment = import_own_loading(hp)
    facts = describe_items(data, "train", orders["training"], hp.collate, hp.seed, num_classes=hp.num_classes)
    if hp.mixup and isinstance(facts.inputs, LeavesSpec):
        mixed = all(leaf.dtype == "float" and None not in leaf.shape for _, leaf in facts.inputs.leaves)
        if hp.collate == PADDED or not mixed:
            inputs = facts.inputs.describe() + (", padded" if hp.collate == PADDED else "")
            raise UserError(
                f"mixup={hp.mixup:g}: the inputs are {inputs}, and only floats of one shape can be mixed; set mixup=0"
            )
    crop = "none" if augment else hp.augment
    options: dict[str, Any] = {"collate": hp.collate, "seed": hp.seed, "crop": crop, "image_size": hp.image_size}
    direct, by_processes = open_sources(data, {"train": augment, "test": None}, facts, device, workers, **options)
    sources = {**by_processes, **direct}  # evaluations do without the user's code, if they can
    training = Split(by_processes.get("train", sources["train"]), orders["training"])
    validation, test = Split(sources["train"], orders["validation"]), Split(sources["test"], orders["test"])
    return Splits(training, validation, test, facts.inputs, facts.targets)


def open_item_test_split(
    data: ItemSet, collate: str, seed: int, device: torch.device, workers: int, *, like: LeavesSpec | None = None
) -> tuple[Split, ModelInput]:
    """Open the test split, reading up to 16 samples by own code; return it, and what its inputs are."""
    order = order_test_split(data)
    facts = describe_items(data, "test", order, collate, seed, like=like)
    direct, by_processes = open_sources(data, {"test": None}, facts, device, workers, collate=collate, seed=seed)
    return Split((direct or by_processes)["test"], order), facts.inputs


def open_sources(
    data: ItemSet,
    sides: Mapping[str, OwnFunction | None],
    facts: ItemFacts,
    device: torch.device,
    workers: int,
    *,
    collate: str,
    seed: int,
    crop: str = "none",
    image_size: int = 0,
) -> tuple[dict[str, BatchSource], dict[str, BatchSource]]:
    """Return the sources of arrays, and those that processes load by the user's code, such as a side's augmentation."""
    direct, loaders = dict[str, BatchSource](), dict[str, ItemImages | ItemLoader]()
    for side, augment in sides.items():
        if isinstance(data, SampleArrays) and ":" not in collate:
            direct[side] = open_array_batches(device, data, side, masked=facts.masked, augment=crop, seed=seed)
        if augment is None and side in direct:
            continue
        items, name = Items(data, side), f"dataset={data.name!r}: {side}"
        if isinstance(facts.inputs, InputSpec):
            assert facts.targets is not None
            size = facts.inputs.height, facts.inputs.width, facts.inputs.channels
            targets = facts.targets
            loaders[side] = ItemImages(
                items, name, size=size, targets=targets, seed=seed, augment=augment, image_size=image_size
            )
        else:
            loaders[side] = ItemLoader(items, collate, seed, augment=augment, masked=facts.masked)
    pool = make_pool([*loaders.values()], workers)
    by_processes = dict[str, BatchSource]()
    for side, loader in loaders.items():
        if isinstance(loader, ItemImages):
            by_processes[side] = WorkerImages(loader, pool, device, crop, seed)
        else:
            by_processes[side] = ItemBatches(loader, pool, device)
    return direct, by_processes


def describe_items(
    data: ItemSet,
    side: str,
    order: Order,
    collate: str,
    seed: int,
    *,
    like: LeavesSpec | None = None,
    num_classes: int = 0,
) -> ItemFacts:
    """Return a data set's facts, inputs ordered ``like``; read up to 16 samples if own code makes them."""
    if data.pictures:
        return describe_images(data, side, order, seed, num_classes)
    if isinstance(data, SampleArrays) and ":" not in collate:
        inputs, targets = describe_leaves(data.train_inputs), describe_leaves(data.train_targets)
    else:
        loader = ItemLoader(Items(data, side), collate if ":" in collate else STACKED, seed)
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


def describe_images(data: ItemSet, side: str, order: Order, seed: int, num_classes: int) -> ItemFacts:
    """Return size and normalisation of images, and what their targets are; read the first of pictures on demand."""
    if isinstance(data, SampleArrays):
        _, height, width, channels = data.train_inputs.shape
        targets = TargetSpec(data.train_targets.dtype, data.train_targets.shape[1:], len(data.classes))
        return ItemFacts(InputSpec(channels, height, width, data.mean, data.std), targets)
    first = int(order.samples(slice(0, 1))[0])
    with keep_random_state():
        pixels, target = Items(data, side).read_item(first, seed, None)
    height, width, channels = pixels.shape
    mean, std = (each if channels == 3 else (round(fmean(each), 3),) * channels for each in IMAGENET)
    classes = len(data.classes) or num_classes
    targets = target_spec(f"dataset={data.name!r}", target, classes, f"{side} sample {first}")
    return ItemFacts(InputSpec(channels, height, width, mean, std), targets)


def describe_leaves(leaves: Leaves) -> LeavesSpec:
    def describe(leaf: Any) -> LeafSpec:
        dtype = next((TYPES[part] for part in TYPES if part in str(getattr(leaf, "dtype", ""))), None)
        return LeafSpec(tuple(leaf.shape[1:]), dtype) if dtype else OTHER

    named = {name: describe(leaf) for name, leaf in name_leaves(leaves).items()}
    return LeavesSpec(form_of(leaves), (*named.items(),))


def join_specs(specs: Sequence[LeavesSpec]) -> LeavesSpec:
    joined = dict[str, LeafSpec]()
    for name, first in specs[0].leaves:
        found = [leaf for spec in specs for other, leaf in spec.leaves if other == name]
        sizes = [{*each} for each in zip(*(leaf.shape for leaf in found), strict=False)]
        dtype = "float" if any(leaf.dtype == "float" for leaf in found) else first.dtype
        joined[name] = LeafSpec(tuple(next(iter(each)) if len(each) == 1 else None for each in sizes), dtype)
    return LeavesSpec(specs[0].form, (*joined.items(),))


def single_target_spec(targets: LeavesSpec) -> TargetSpec | None:
    [(_, leaf)] = targets.leaves if targets.form == "leaf" else [("", OTHER)]
    if leaf.dtype == OTHER.dtype:
        return None
    dtype = np.dtype({"float": np.float32, "bool": np.bool_}.get(leaf.dtype, np.int64))
    return TargetSpec(dtype, tuple(1 if size is None else size for size in leaf.shape), varies=None in leaf.shape)
