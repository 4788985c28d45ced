"""Load a data set's items, from arrays or by user code, as batches or single images."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.batch_memory import BatchMemory
from flyte_ddp.core.loading.sample_loader import SampleLoader
from flyte_ddp.core.loading.split import Batch, BatchSource, CheckTargets, TargetSpec
from flyte_ddp.core.loading.user_functions import NO_AUGMENTATION, Augmentation, Sample, UserFunction
from flyte_ddp.core.loading.worker_sources import WorkerImages, WorkerSource, check_targets_and_name_sample
from flyte_ddp.core.loading.workers import LoaderPool
from flyte_ddp.core.machine.device_copy import copy_to_device
from flyte_ddp.core.machine.waiting import limit_wait
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.order.random_state import keep_random_state
from flyte_ddp.core.order.sampling import Indices
from flyte_ddp.core.samples.leaves import Leaves, map_leaves
from flyte_ddp.datasets.collate import PADDED, Samples, Types, collate_samples
from flyte_ddp.datasets.item_set import ItemSet
from flyte_ddp.datasets.user_targets import require_target


@dataclass(frozen=True, eq=False)
class Items:
    """The items of a side ("train" or "test") of a data set."""

    data: ItemSet
    side: str

    def read_item(self, sample: int, seed: int, epoch: int | None) -> tuple[Leaves, Leaves]:
        return self.data.read_item(self.side, sample, seed, epoch)

    def name_samples(self, samples: Sequence[int]) -> list[str]:
        """Return the ids of the samples, or [] if the data set has no ids."""
        ids = self.data.ids(self.side)
        return [] if ids is None else ids[[*samples]].tolist()


@dataclass(eq=False)
class ItemLoader:
    """Loads whole batches in a single process. A loader can be pickled before its first use."""

    items: Items
    collate: str  # the hyperparameter
    seed: int
    _: KW_ONLY
    augmentation: Augmentation = NO_AUGMENTATION
    masked: str | None = None  # name of the input whose mask a padded batch has
    types: Types | None = None  # of leaves in all batches

    def __post_init__(self) -> None:
        self.own_collate = UserFunction("collate", self.collate) if ":" in self.collate else None

    def load_items(self, samples: Sequence[int], epoch: int | None) -> tuple[Leaves, Leaves]:
        """Return samples as one collated batch.

        If ``epoch`` is the number of an epoch of training, the user's augmentation is called. User code runs after the
        global random generators are seeded. They are not restored.

        Raises:
            UserError: Samples do not fit together, or user code returns something unfit.
            UserCodeError: User code fails.
            MachineError: The batch is not loaded within FLYTE_DDP_TIMEOUT.
        """
        names = [f"{self.items.side} sample {sample}" for sample in self.items.name_samples(samples) or samples]
        with limit_wait(f"a batch of {self.items.side} samples"):
            loaded = [self.load_item(sample, epoch, name) for sample, name in zip(samples, names, strict=True)]
            if self.own_collate is not None:
                return self.call_own_collate(self.own_collate, loaded, samples, epoch, f"{names[0]} to {names[-1]}")
            return collate_samples(loaded, names, padded=self.collate == PADDED, masked=self.masked, types=self.types)

    def call_own_collate(
        self, own: UserFunction, loaded: Samples, samples: Sequence[int], epoch: int | None, where: str
    ) -> tuple[Leaves, Leaves]:
        """Return the batch that the user's function ``own`` makes of the samples.

        Seeds the global random generators by the first sample. Returned lists become tuples, and mappings become dicts.

        Args:
            own: The user's function, which gets a list of pairs of inputs and targets.
            epoch: Epoch of training. None counts as 0.
            where: Names the samples in errors.

        Raises:
            UserError: The function returns no pair, inputs without a tensor, or a target tensor without a row for each
                sample.
            UserCodeError: The function fails.
        """
        own.seed(self.seed, epoch or 0, samples[0])
        # Lists become tuples. Mappings, such as a tokenizer's, become dicts, in which tree_leaves() finds tensors.
        returned = (tuple(side) if isinstance(side, list) else side for side in own.call_pair(where, loaded))
        inputs, targets = (map_leaves(lambda leaf: leaf, side) for side in returned)
        if not any(hasattr(value, "to") for value in tree_leaves(inputs)):  # tensors, or torch-geometric's batches
            raise UserError(f"{own} returned inputs without a tensor for {where}; return the inputs of the model")
        if isinstance(targets, Tensor) and targets.shape[:1] != (len(samples),):
            rule = f"must have a row for each of the {len(samples)} samples; return all samples"
            raise UserError(f"{own} returned targets {list(targets.shape)} for {where}: {rule}")
        return inputs, targets

    def open_source(self, pool: LoaderPool | None, device: torch.device) -> BatchSource:
        return ItemBatches(self, pool, device)

    def load_item(self, sample: int, epoch: int | None, name: str) -> tuple[Leaves, Leaves]:
        """Return inputs and targets of a sample. Unless ``epoch`` is None, the user's augmentation changes them.

        User code gets copies, so the data set is not changed. ``name`` names the sample in errors.
        """
        inputs, targets = self.items.read_item(sample, self.seed, epoch)
        augment = self.augmentation.function if epoch is not None else None
        if augment is not None or self.own_collate is not None:
            # Copied, because user code may change samples in place, and a data set may hold its samples in memory.
            inputs, targets = (map_leaves(copy_leaf, side) for side in (inputs, targets))
        if augment is None or epoch is None:
            return inputs, targets
        augment.seed(self.seed, epoch, sample)
        return augment.call_pair(name, inputs, targets)


class ItemBatches(WorkerSource):
    """Source of batches of items. Each batch is loaded and collated by a single loader process."""

    def __init__(self, loader: ItemLoader, pool: LoaderPool | None, device: torch.device) -> None:
        super().__init__(pool, device)
        self.loader = loader
        self.batches_ahead = 2 * pool.number if pool else 0  # each process then has a next task waiting

    def start_loading_batch(self, pool: LoaderPool, samples: Indices, epoch: int | None) -> tuple[BatchMemory, int]:
        return pool.submit_call(self.loader.load_items, samples.tolist(), epoch)

    def load_batch(self, samples: Indices, epoch: int | None, check_targets: CheckTargets | None = None) -> Batch:
        """Wait for samples as a collated batch on the device, or load them here without a pool.

        A leaf without numbers stays unchanged, unless the leaf has a method ``to``.

        Raises:
            UserError: A sample or its target is unfit.
        """
        if self.pool is None:
            with keep_random_state():
                inputs, targets = self.loader.load_items(samples.tolist(), epoch)
        else:
            inputs, targets = self.pool.wait_for_result(self.take_started_batch(samples, epoch))
        ids = self.loader.items.name_samples(samples.tolist())
        if check_targets is not None and isinstance(targets, (np.ndarray, Tensor)):
            names = [f"{self.loader.items.side} {sample}" for sample in ids or samples.tolist()]
            check_targets_and_name_sample(check_targets, np.asarray(targets), names)
        inputs, targets = tree_map(self.put_on_device, (inputs, targets))
        return Batch(inputs, targets, ids)

    def put_on_device(self, value: Any) -> Any:
        """Return an array of numbers, a tensor, or an object with ``to`` on the device. Other values are unchanged."""
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = torch.from_numpy(value)
        if isinstance(value, Tensor):
            return copy_to_device(value, self.device)
        return value.to(self.device) if hasattr(value, "to") else value  # such as torch-geometric's batches


@dataclass(eq=False)
class ItemImages(SampleLoader):
    """Images of a side ("train" or "test") of a data set whose items are pairs of pixels and target."""

    items: Items
    spec: InputSpec  # of all images before augmentation
    targets: TargetSpec
    seed: int
    _: KW_ONLY
    augmentation: Augmentation = NO_AUGMENTATION  # a function may return images of ``image_size`` unless that is 0
    image_size: int = 0

    def __post_init__(self) -> None:
        size = (self.spec.height, self.spec.width, self.spec.channels)
        own = (self.image_size, self.image_size, self.spec.channels)
        self.sizes = (size, own) if self.image_size else (size,)

    def open_source(self, pool: LoaderPool | None, device: torch.device) -> BatchSource:
        return WorkerImages(self, pool, device)

    def make_load_functions(self, samples: Sequence[int], epoch: int | None) -> list[Callable[[], Sample]]:
        return [partial(self.load_sample, sample, epoch) for sample in samples]

    def load_sample(self, sample: int, epoch: int | None) -> Sample:
        """Return an item as a sample. Unless ``epoch`` is None, the user's augmentation changes the item.

        Raises:
            UserError: The image has none of the sizes in ``sizes``, or the target does not fit ``targets``.
        """
        own, where = f"dataset={self.items.data.name!r}: {self.items.side}", f"sample {sample}"
        image, target = self.items.read_item(sample, self.seed, epoch)
        loaded = Sample(image, np.asarray(target), "")
        if self.augmentation.function is not None and epoch is not None:
            own = str(self.augmentation.function)
            loaded = self.augmentation.augment_sample(loaded, sample, epoch, where)
        if loaded.image.shape not in self.sizes:
            sizes = " or ".join(str(list(size)) for size in self.sizes)
            found = f"{own} returned {list(loaded.image.shape)} as the image of {where}"
            fix = "give all images one size and one mode, for example by resize and convert('RGB')"
            raise UserError(f"{found}: must be {sizes}; {fix}")
        return Sample(loaded.image, require_target(own, loaded.target, self.targets, where), "")


def copy_leaf(leaf: Any) -> Any:
    """Return a copy of an array or a tensor. Other values are returned as they are."""
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf.clone() if isinstance(leaf, Tensor) else leaf
