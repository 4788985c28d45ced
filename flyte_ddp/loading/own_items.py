"""Load a data set's items, from arrays or by the user's code: batches of any leaves, or single images."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flyte_ddp.datasets.custom import convert_sample
from flyte_ddp.datasets.on_demand_set import OnDemandSet, split_item
from flyte_ddp.datasets.prepared import ItemSet
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.errors import UserError
from flyte_ddp.loading.collate import PADDED, Samples, batch_samples
from flyte_ddp.loading.own_samples import (
    OwnCodeError,
    OwnFunction,
    Sample,
    SampleLoader,
    augment_sample,
    convert_target,
    find_seeded_transforms,
    seed_for,
)
from flyte_ddp.loading.split import TargetSpec
from flyte_ddp.samples.leaves import Leaves, map_leaves


@dataclass(eq=False)
class Items:
    """The items of one side, "train" or "test", of arrays, or of a set that the user's own code reads."""

    data: ItemSet
    side: str

    def __reduce__(self) -> tuple[Any, ...]:  # without what is opened, which each process opens for itself
        return Items, (self.data, self.side)

    @cached_property
    def opened(self) -> tuple[Any, list[Any]]:
        """The user's map-style data set, and its transforms that must be seeded; made at the first use."""
        assert isinstance(self.data, OnDemandSet)
        samples = getattr(self.data.sets, self.side)
        wrapped, seeded = samples, list[Any]()
        while wrapped is not None:
            seeded += find_seeded_transforms(wrapped, "__getitem__")
            wrapped = getattr(wrapped, "dataset", None)  # of torch's Subset
        return samples, seeded

    def read_item(self, sample: int, seed: int, epoch: int | None) -> tuple[Leaves, Leaves]:
        """Return inputs and targets of an item; own code's picture as uint8 [H, W, C], its generators seeded."""
        if isinstance(self.data, SampleArrays):
            sides = (getattr(self.data, f"{self.side}_{kind}") for kind in ("inputs", "targets"))
            inputs, targets = (map_leaves(lambda leaf: leaf[sample], leaves) for leaves in sides)
            return inputs, targets
        samples, transforms = self.opened
        where = f"dataset={self.data.name!r}: {self.side} sample {sample}"
        seed_for("dataset", seed, epoch or 0, sample, transforms)
        try:
            item = samples[sample]
        except Exception as error:
            raise OwnCodeError(f"{where}: {type(error).__name__}: {error}") from error
        try:
            pair = split_item(item)
        except ValueError as error:
            raise UserError(f"{where} {error}") from None
        return convert_sample(where, pair) if self.data.pictures else pair

    def name_samples(self, samples: Sequence[int]) -> list[str]:
        ids = getattr(self.data, f"{self.side}_ids", None)
        return [] if ids is None else ids[samples].tolist()


@dataclass(eq=False)
class ItemLoader:
    """Loads whole batches in one process. It can be pickled before it is first used."""

    items: Items
    collate: str  # the hyperparameter
    seed: int
    _: KW_ONLY
    augment: OwnFunction | None = None
    masked: str | None = None  # name of the input whose mask a padded batch has

    def __post_init__(self) -> None:
        self.own_collate = OwnFunction("collate", self.collate) if ":" in self.collate else None

    def load_items(self, samples: Sequence[int], epoch: int | None) -> tuple[Leaves, Leaves]:
        names = [f"{self.items.side} sample {sample}" for sample in self.items.name_samples(samples) or samples]
        loaded = [self.load_item(sample, epoch, name) for sample, name in zip(samples, names, strict=True)]
        if self.own_collate is not None:
            return self.call_own_collate(self.own_collate, loaded, samples, epoch, f"{names[0]} to {names[-1]}")
        return batch_samples(loaded, names, padded=self.collate == PADDED, masked=self.masked)

    def call_own_collate(
        self, own: OwnFunction, loaded: Samples, samples: Sequence[int], epoch: int | None, where: str
    ) -> tuple[Leaves, Leaves]:
        own.seed(self.seed, epoch or 0, samples[0])
        # A mapping of another kind, such as a tokenizer's, becomes a dict, in which tensors are found, a list a tuple.
        returned = (tuple(side) if isinstance(side, list) else side for side in own.call_pair(where, loaded))
        inputs, targets = (map_leaves(lambda leaf: leaf, side) for side in returned)
        if not any(isinstance(value, Tensor) for value in tree_leaves(inputs)):
            raise UserError(f"{own} returned inputs without a tensor for {where}; return what the model gets")
        if isinstance(targets, Tensor) and targets.shape[:1] != (len(samples),):
            raise UserError(
                f"{own} returned targets {list(targets.shape)} for {where}: must have a row for each of the "
                f"{len(samples)} samples; leave none out"
            )
        return inputs, targets

    def load_item(self, sample: int, epoch: int | None, name: str) -> tuple[Leaves, Leaves]:
        inputs, targets = self.items.read_item(sample, self.seed, epoch)
        augment = self.augment if epoch is not None else None
        if augment is not None or self.own_collate is not None:
            # What the user's code changes in place would stay changed in a set that holds its samples in memory.
            inputs, targets = (map_leaves(copy_leaf, side) for side in (inputs, targets))
        if augment is None or epoch is None:
            return inputs, targets
        augment.seed(self.seed, epoch, sample)
        return augment.call_pair(name, inputs, targets)


@dataclass(eq=False)
class ItemImages(SampleLoader):
    """Images of one side, "train" or "test", of a data set, whose items are pairs of pixels and a target."""

    items: Items
    name: str  # for errors
    _: KW_ONLY
    size: tuple[int, ...]  # [H, W, C] of all images as the data set has them
    targets: TargetSpec
    seed: int
    augment: OwnFunction | None = None  # may return images of ``size``, or of ``image_size`` unless that is 0
    image_size: int = 0

    def __post_init__(self) -> None:
        own = (self.image_size, self.image_size, self.size[2])
        self.sizes = (self.size, own) if self.image_size else (self.size,)

    def start_loads(self, samples: Sequence[int], epoch: int | None) -> list[Callable[[], Sample]]:
        return [partial(self.load_sample, sample, epoch) for sample in samples]

    def load_sample(self, sample: int, epoch: int | None) -> Sample:
        own, where = self.name, f"sample {sample}"
        image, target = self.items.read_item(sample, self.seed, epoch)
        loaded = Sample(image, np.asarray(target), "")
        if self.augment is not None and epoch is not None:
            own = str(self.augment)
            loaded = augment_sample(self.augment, loaded, (self.seed, epoch, sample), where)
        if loaded.image.shape not in self.sizes:
            sizes = " or ".join(str(list(size)) for size in self.sizes)
            raise UserError(
                f"{own} returned {list(loaded.image.shape)} as the image of {where}: must be {sizes}; give all "
                "images one size and one mode, such as by resize and convert('RGB')"
            )
        return Sample(loaded.image, convert_target(own, loaded.target, self.targets, where), "")


def copy_leaf(leaf: Any) -> Any:
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf.clone() if isinstance(leaf, Tensor) else leaf
