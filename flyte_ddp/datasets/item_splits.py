"""Describe the properties that all items of a data set share, and open the splits of items."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from flyte_ddp.catalog import IMAGENET
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.arrays import open_array_batches
from flyte_ddp.core.loading.split import BatchSource, Split, Splits, TargetSpec
from flyte_ddp.core.loading.user_functions import NO_AUGMENTATION, Augmentation
from flyte_ddp.core.loading.workers import start_loader_pool
from flyte_ddp.core.machine.resources import count_cores
from flyte_ddp.core.models.inputs import InputSpec, LeafSpec, LeavesSpec, ModelInput
from flyte_ddp.core.order.random_state import keep_random_state
from flyte_ddp.core.order.sampling import Order
from flyte_ddp.core.order.shard_order import Orders
from flyte_ddp.core.samples.leaves import Leaves, get_leaves_form, name_leaves
from flyte_ddp.core.samples.pictures import Pixels
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets.collate import PADDED, STACKED, Types
from flyte_ddp.datasets.item_set import ItemSet
from flyte_ddp.datasets.items import ItemImages, ItemLoader, Items
from flyte_ddp.datasets.leaf_conversion import require_identifiers
from flyte_ddp.datasets.prepared_set import Opening
from flyte_ddp.datasets.user_targets import derive_target_spec

LOOKED_AT = 16
OTHER = LeafSpec((), "other")
BATCH_TYPES: dict[str, np.dtype[Any]] = {
    "float": np.dtype(np.float32),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}  # widest first
TYPES = {"float": "float", "bool": "bool", "int": "int64"}  # of a LeafSpec, by a part of torch's or NumPy's name


class ItemFacts(NamedTuple):
    """Properties that all samples of a data set share."""

    inputs: ModelInput
    targets: TargetSpec | None  # None: targets have several leaves, or none
    masked: str | None = None  # name of the input whose mask the model also gets, if ``collate`` is "padded"
    types: Types = MappingProxyType({})  # of leaves that are numbers


def get_item_facts(
    data: ItemSet,
    side: str,
    order: Order,
    collate: str,
    seed: int,
    *,
    trained_spec: ModelInput | None = None,
    classes: int = 0,
) -> ItemFacts:
    """Return the properties that all samples of a side share.

    If user code makes the samples, reads and collates up to 16 samples of ``order``, at equal distances. Of images on
    demand, reads only the first. Restores the global random generators.

    Args:
        side: "train" or "test".
        order: The order of the samples that may be read.
        collate: The hyperparameter: "stacked", "padded" or the name of a user's function.
        trained_spec: The inputs of the trained model. They decide the order of the inputs, the types in batches, and
            ``masked``.
        classes: Number of classes for images without class names, or 0.

    Raises:
        UserError: Samples have different lengths with ``collate`` "stacked", or a name of an input is no identifier.
        UserCodeError: User code fails.
    """
    if data.pictures:
        return get_image_facts(data, side, order, seed, classes)
    stored = data.stored_leaves("train")
    if stored is not None and ":" not in collate:
        inputs, targets = map(make_leaves_spec, stored)
    else:
        loader = ItemLoader(Items(data, side), collate if ":" in collate else STACKED, seed)
        places = np.unique(np.linspace(0, len(order) - 1, LOOKED_AT, dtype=np.int64)).tolist()
        samples = [int(order.samples_at(slice(place, place + 1))[0]) for place in places]
        with keep_random_state():
            alone = [loader.load_items([sample], None) for sample in samples]
        require_identifiers(f"dataset={data.name!r}: inputs", alone[0][0])
        inputs, targets = (join_specs([make_leaves_spec(batch[part]) for batch in alone]) for part in (0, 1))
    for kind, spec in (("inputs", inputs), ("targets", targets)):
        if collate == STACKED and any(None in leaf.shape for _, leaf in spec.leaves):
            problem = f"the {kind} of dataset={data.name!r} have different lengths"
            raise UserError(f"collate='stacked': {problem}; set 'padded', or a user-defined function")
    inputs = inputs if trained_spec is None else inputs.reorder_leaves_like(trained_spec)
    trained = dict(trained_spec.leaves) if trained_spec else {}  # used first: new samples may have one length by chance
    shapes = {name: trained.get(name, leaf).shape for name, leaf in inputs.leaves}
    with_lengths = [name for name, shape in shapes.items() if shape]
    ragged = (name for name, shape in shapes.items() if shape[:1] == (None,))
    masked = next(ragged, next(iter(with_lengths), None))
    dtypes = {("inputs", name): trained.get(name, leaf).dtype for name, leaf in inputs.leaves}
    dtypes |= {("targets", name): leaf.dtype for name, leaf in targets.leaves}
    types: Types = {place: BATCH_TYPES[dtype] for place, dtype in dtypes.items() if dtype in BATCH_TYPES}
    return ItemFacts(inputs, spec_of_single_target(targets), masked if collate == PADDED else None, types)


def get_image_facts(data: ItemSet, side: str, order: Order, seed: int, num_classes: int) -> ItemFacts:
    """Return size and normalisation of the images, and the properties of their targets.

    Of a set on demand, reads the first picture of ``order`` by user code. If such a set has no class names,
    ``num_classes`` is the number of classes.
    """
    if (stored := data.stored_leaves("train")) is not None:
        inputs, labels = stored
        _, height, width, channels = inputs.shape
        targets = TargetSpec(labels.dtype, labels.shape[1:], len(data.classes))
        return ItemFacts(InputSpec(channels, height, width, data.mean, data.std), targets)
    first = int(order.samples_at(slice(0, 1))[0])
    with keep_random_state():
        pixels, target = Items(data, side).read_item(first, seed, None)
    height, width, channels = pixels.shape
    mean, std = (each if channels == 3 else (round(fmean(each), 3),) * channels for each in IMAGENET)
    classes = len(data.classes) or num_classes
    targets = derive_target_spec(f"dataset={data.name!r}", target, classes, f"{side} sample {first}")
    return ItemFacts(InputSpec(channels, height, width, mean, std), targets)


def make_leaves_spec(leaves: Leaves) -> LeavesSpec:
    """Return the form of a batch, and the type and shape of each leaf without the samples' dimension.

    The type is the family "float", "bool" or "int64". For example, uint8 gives "int64". A leaf that is no array or
    tensor of numbers has the type "other" and the shape ().
    """

    def describe(leaf: Any) -> LeafSpec:
        dtype = next((TYPES[part] for part in TYPES if part in str(getattr(leaf, "dtype", ""))), None)
        return LeafSpec(tuple(leaf.shape[1:]), dtype) if dtype else OTHER

    named = {name: describe(leaf) for name, leaf in name_leaves(leaves).items()}
    return LeavesSpec(get_leaves_form(leaves), (*named.items(),))


def join_specs(specs: Sequence[LeavesSpec]) -> LeavesSpec:
    """Return a common spec of several batches, in the form of the first batch.

    A size in which batches differ becomes None. A dtype becomes the widest of the batches' dtypes: float, int64, bool.
    """
    joined = dict[str, LeafSpec]()
    for name, first in specs[0].leaves:
        found = [leaf for spec in specs for other, leaf in spec.leaves if other == name]
        sizes = [{*each} for each in zip(*(leaf.shape for leaf in found), strict=False)]
        dtypes = {leaf.dtype for leaf in found}
        dtype = next((each for each in BATCH_TYPES if each in dtypes), first.dtype)
        joined[name] = LeafSpec(tuple(next(iter(each)) if len(each) == 1 else None for each in sizes), dtype)
    return LeavesSpec(specs[0].form, (*joined.items(),))


def spec_of_single_target(targets: LeavesSpec) -> TargetSpec | None:
    """Return the properties of targets with a single array of numbers, else None.

    Sizes that differ between samples become 1, and ``varies`` is then True.
    """
    [(_, leaf)] = targets.leaves if targets.form == "leaf" else [("", OTHER)]
    if leaf.dtype == OTHER.dtype:
        return None
    dtype = np.dtype({"float": np.float32, "bool": np.bool_}.get(leaf.dtype, np.int64))
    return TargetSpec(dtype, tuple(1 if size is None else size for size in leaf.shape), varies=None in leaf.shape)


def open_splits(data: ItemSet, orders: Orders, hp: Hyperparameters, device: torch.device, settings: Settings) -> Splits:
    """Open this rank's splits of a set of items.

    If items, augmentation or collate are user-defined, starts ``settings.loaders`` processes (on Linux). Without user
    code, starts no process. If items or collate are user-defined, first reads up to 16 samples in this process.

    Raises:
        UserError: ``mixup`` cannot mix the inputs, samples do not fit together, or user code cannot be imported.
        UserCodeError: User code fails on a sample that is read here.
    """
    augmentations = {"train": Augmentation.from_augment_setting(hp.augment, hp.seed), "test": NO_AUGMENTATION}
    facts = get_item_facts(data, "train", orders["training"], hp.collate, hp.seed, classes=hp.num_classes)
    if hp.mixup:
        check_mixup(hp, facts.inputs)
    called = data, augmentations, facts, device, settings.loaders
    sources = open_sources(*called, collate=hp.collate, seed=hp.seed, image_size=hp.image_size)
    training = Split(sources.training["train"], orders["training"])
    validation, test = (
        Split(sources.evaluation[side], orders[split]) for side, split in (("train", "validation"), ("test", "test"))
    )
    return Splits(training, validation, test, facts.inputs, facts.targets)


def check_mixup(hp: Hyperparameters, inputs: ModelInput) -> None:
    """Raise UserError if the inputs cannot be mixed."""
    if hp.collate == PADDED or not inputs.can_be_mixed():
        described = inputs.describe() + (", padded" if hp.collate == PADDED else "")
        rule = "only floats of one shape can be mixed"
        raise UserError(f"mixup={hp.mixup:g}: the inputs are {described}, and {rule}; set mixup=0")


def open_test_split(data: ItemSet, opening: Opening) -> tuple[Split, ModelInput]:
    """Open the test split of a set of items, and return the split and the specification of its inputs.

    If items or collate are user-defined, starts processes (on Linux), and first reads up to 16 samples in this process.

    Raises:
        UserError: Samples do not fit together.
        UserCodeError: User code fails on a sample that is read here.
    """
    order, workers = data.make_test_order(), opening.settings.loaders or count_cores()
    facts = get_item_facts(data, "test", order, opening.collate, opening.seed, trained_spec=opening.spec)
    called = data, {"test": NO_AUGMENTATION}, facts, opening.device, workers
    sources = open_sources(*called, collate=opening.collate, seed=opening.seed)
    return Split(sources.evaluation["test"], order), facts.inputs


def iterate_test_images(data: ItemSet, opening: Opening) -> Iterator[Pixels]:
    """Yield the test split's images. Restores the global random generators."""
    for sample in range(data.test_samples):
        with keep_random_state():
            pixels, _ = data.read_item("test", sample, opening.seed, None)
        yield pixels


class ItemSources(NamedTuple):
    """The sources of batches by side. Arrays with a user-defined augmentation have another source for training."""

    training: dict[str, BatchSource]
    evaluation: dict[str, BatchSource]


def open_sources(
    data: ItemSet,
    augmentations: Mapping[str, Augmentation],
    facts: ItemFacts,
    device: torch.device,
    workers: int,
    *,
    collate: str,
    seed: int,
    image_size: int = 0,
) -> ItemSources:
    """Open the sources of batches of each side, and start processes for user code.

    Args:
        augmentations: By side, "train" or "test".
        image_size: Side of the images that a user-defined augmentation may return, or 0.
    """
    direct, loaders = dict[str, BatchSource](), dict[str, ItemImages | ItemLoader]()
    for side, augmentation in augmentations.items():
        if (stored := data.stored_leaves(side)) is not None and ":" not in collate:
            direct[side] = open_array_batches(
                device,
                *stored,
                data.ids(side),
                keep_types=data.pictures,
                masked=facts.masked,
                augmentation=augmentation,
            )
            if augmentation.function is None:
                continue
        items, spec = Items(data, side), facts.inputs
        if isinstance(spec, InputSpec):
            assert facts.targets is not None
            loaders[side] = ItemImages(
                items, spec, facts.targets, seed, augmentation=augmentation, image_size=image_size
            )
        else:
            loaders[side] = ItemLoader(
                items, collate, seed, augmentation=augmentation, masked=facts.masked, types=facts.types
            )
    pool = start_loader_pool([*loaders.values()], workers)
    by_processes = {side: loader.open_source(pool, device) for side, loader in loaders.items()}
    return ItemSources({**direct, **by_processes}, {**by_processes, **direct})
