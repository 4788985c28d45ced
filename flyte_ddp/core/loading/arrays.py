"""Load batches from arrays: memory-mapped on the host, or copied to a GPU with enough room."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.core.loading.padding import add_mask, choose_padding_value, widen_type
from flyte_ddp.core.loading.split import Batch, BatchSource, CheckTargets
from flyte_ddp.core.loading.user_functions import NO_AUGMENTATION, Augmentation
from flyte_ddp.core.machine.device_copy import copy_to_device
from flyte_ddp.core.order.sampling import Indices
from flyte_ddp.core.samples.leaves import Leaves, Ragged, map_leaves, name_leaves

MOST_OF_GPU = 0.25  # largest share of the free memory for the arrays of one side; model and outputs need the rest


def select_rows(values: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Return ``rows`` of ``values`` as a new tensor on ``device``. ``rows`` must be on the device of ``values``."""
    taken = values.index_select(0, rows)  # much faster than ``values[rows]`` on a CPU
    return taken if values.device == device else copy_to_device(taken, device)


@dataclass(frozen=True)
class LoadedLeaf:
    """A leaf of all samples, on the device or on the CPU.

    A ragged leaf also has the end of each sample, on the host.
    """

    values: Tensor  # [N, ...]; of a ragged leaf [sum of the lengths, ...]
    device: torch.device  # where batches go
    ends: NDArray[np.int64] | None = None  # [N]
    widened: bool = True  # whether whole numbers become int64, and floats fp32

    def take_samples(self, samples: Indices, rows: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
        """Return the leaf of these samples on the device and, for a ragged leaf, a mask of the values.

        The samples of a ragged leaf are padded to the longest sample. Whole numbers become int64, and floats fp32. If
        ``widened`` is False, a leaf keeps the type unless ragged.

        Args:
            samples: Numbers of the samples [n].
            rows: ``samples`` as a tensor on the device of ``self.values``. Not used for a ragged leaf.
            kind: "inputs" or "targets", which decides the padding of a ragged leaf.

        Returns:
            Values [n, ...], and the mask [n, longest] of a ragged leaf, which is True at values. The mask is None for
            other leaves.
        """
        if self.ends is None:
            taken = select_rows(self.values, rows, self.device)
            return widen_type(taken) if self.widened else taken, None
        numbers = samples.astype(np.int64)
        ends = self.ends[numbers]
        starts = np.where(numbers > 0, self.ends[numbers - 1], 0)
        places = np.arange(int((ends - starts).max(initial=0)))
        filled = places < (ends - starts)[:, None]
        mask = copy_to_device(torch.from_numpy(filled), self.device)
        positions = torch.from_numpy(np.where(filled, starts[:, None] + places, 0))
        positions = copy_to_device(positions, self.values.device)
        taken = select_rows(self.values, positions.flatten(), self.device)
        taken = widen_type(taken.view(*positions.shape, *self.values.shape[1:]))
        hidden = ~mask.view(*mask.shape, *[1] * (taken.dim() - 2))
        dtype_kind = "f" if taken.is_floating_point() else "b" if taken.dtype == torch.bool else "i"
        return taken.masked_fill(hidden, choose_padding_value(dtype_kind, kind)), mask


@dataclass(frozen=True)
class ArrayBatches(BatchSource):
    """Source of batches from arrays on the device or on the CPU. Images may be augmented."""

    inputs: Leaves  # of LoadedLeaf
    targets: Leaves
    store: torch.device  # where the values are
    masked: str | None = None  # name of the input whose mask the model also gets
    ids: NDArray[np.str_] | None = None  # [N]
    augmentation: Augmentation = NO_AUGMENTATION  # of pictures

    def load_batch(
        self,
        samples: Indices,
        epoch: int | None = None,
        check_targets: CheckTargets | None = None,  # noqa: ARG002  # the objective has checked stored targets
    ) -> Batch:
        """Return samples as a batch on the device. Images are augmented unless ``epoch`` is None.

        If ``masked`` names an input, a mask is added to the inputs, which is True at the values of this input.
        ``check_targets`` is ignored, because the objective has checked the stored targets.
        """
        rows = copy_to_device(torch.from_numpy(samples), self.store)  # once for all leaves
        masks: list[Tensor | None] = []  # of the inputs' leaves, in their order

        def take(leaf: LoadedLeaf) -> Tensor:
            values, mask = leaf.take_samples(samples, rows, "inputs")
            masks.append(mask)
            return values

        inputs = map_leaves(take, self.inputs)
        if self.masked is not None:
            named = name_leaves(inputs)
            values, mask = named[self.masked], masks[[*named].index(self.masked)]
            all_there = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
            inputs = add_mask(inputs, all_there if mask is None else mask)
        targets = map_leaves(lambda leaf: leaf.take_samples(samples, rows, "targets")[0], self.targets)
        if self.augmentation.kind != "none":  # other inputs than pictures are not augmented
            inputs, targets = self.augmentation.augment_batch(inputs, targets, samples, epoch)
        return Batch(inputs, targets, () if self.ids is None else self.ids[samples].tolist())


def open_array_batches(
    device: torch.device,
    inputs: Leaves,
    targets: Leaves,
    ids: NDArray[np.str_] | None = None,
    *,
    keep_types: bool = False,
    masked: str | None = None,
    augmentation: Augmentation = NO_AUGMENTATION,
) -> ArrayBatches:
    """Return a source of batches from stored arrays.

    If ``device`` is a GPU, and the arrays need at most a quarter of its free memory, copies the arrays to the GPU.
    Otherwise the arrays stay in the CPU's memory, and each batch is copied to ``device``.

    Args:
        inputs: Arrays [N, ...] or Ragged, as one leaf, a tuple or a dict.
        targets: Arrays, in one of the same forms, or None.
        ids: The names of the samples [N], or None.
        keep_types: Whether inputs and targets keep their types. Otherwise whole numbers become int64, and floats fp32.
        masked: Name of the input whose mask is added to the inputs of each batch. None adds no mask.
        augmentation: The augmentation of training images.
    """
    leaves = [*name_leaves(inputs).values(), *name_leaves(targets).values()]
    store = choose_device_of_arrays(device, sum(leaf.nbytes for leaf in leaves))

    def load_leaf(leaf: Any) -> LoadedLeaf:
        if isinstance(leaf, Ragged):
            return LoadedLeaf(to_device(leaf.values, store), device, np.asarray(leaf.ends))
        return LoadedLeaf(to_device(leaf, store), device, widened=not keep_types)

    inputs, targets = (map_leaves(load_leaf, leaves) for leaves in (inputs, targets))
    return ArrayBatches(inputs, targets, store, masked, ids, augmentation)


def choose_device_of_arrays(device: torch.device, needed: int) -> torch.device:
    if device.type != "cuda" or needed <= torch.cuda.mem_get_info(device)[0] * MOST_OF_GPU:
        return device
    return torch.device("cpu")


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that mapped memory is read-only; nothing writes to it
        return torch.from_numpy(array).to(device)
