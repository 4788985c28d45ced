"""Sources of batches that loader processes load: images sample by sample, other items batch by batch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from flyte_ddp.errors import UserError
from flyte_ddp.loading.arrays import augment_batch
from flyte_ddp.loading.batch_memory import BatchMemory, Layout
from flyte_ddp.loading.items import ItemLoader
from flyte_ddp.loading.samples import SampleLoader, common_shape, load_into
from flyte_ddp.loading.split import Batch, BatchSource
from flyte_ddp.loading.workers import ImagePool, LoaderPool
from flyte_ddp.machine.device_copy import copy_to_device
from flyte_ddp.order.random_state import keep_random_state
from flyte_ddp.order.sampling import Indices


class WorkerSource(BatchSource):
    """Base class of sources whose samples are loaded by processes or threads.

    Without a pool, the rank loads the samples itself.
    """

    # Raises UserError for targets [n, ...] that the objective does not accept; None: targets are not checked.
    check_targets: Callable[[NDArray[Any]], None] | None = None

    def __init__(self, pool: Any, device: torch.device) -> None:
        self.pool, self.device, self.loaders = pool, device, pool.number if pool else 0
        # For each batch that the pool is loading, by epoch and samples: the handle from :meth:`submit_batch`.
        self.pending: dict[tuple[int | None, bytes], Any] = {}

    def submit_batch(self, pool: Any, samples: Indices, epoch: int | None) -> Any:
        """Start loading a batch in ``pool``, and return a handle for :meth:`load_batch`."""
        raise NotImplementedError

    def prefetch_batch(self, samples: Indices, epoch: int | None) -> None:
        key = (epoch, samples.tobytes())
        if self.pool is not None and key not in self.pending:
            self.pending[key] = self.submit_batch(self.pool, samples, epoch)

    def take_pending(self, samples: Indices, epoch: int | None) -> Any:
        """Return the handle of a started batch, and forget the batch. Starts the batch if needed."""
        self.prefetch_batch(samples, epoch)  # no effect if done before
        return self.pending.pop((epoch, samples.tobytes()))

    def close(self) -> None:
        """End the pool, also for other sources that share the pool."""
        self.pending = {}
        if self.pool is not None:
            self.pool.close()


class WorkerImages(WorkerSource):
    """Source of batches of images. Each process or thread loads a part of each batch."""

    batches_ahead = 2  # enough to keep the pool busy while load_batch() waits for a batch

    def __init__(
        self, loader: SampleLoader, pool: ImagePool | None, device: torch.device, crop: str = "none", seed: int = 0
    ) -> None:
        """Create a source that augments batches of training by ``crop`` (none, crop or crop_flip).

        The random numbers of the augmentation depend on ``seed``.
        """
        super().__init__(pool, device)
        self.loader = loader
        self.crop, self.seed = crop, seed
        self.prefetch_files = loader.prefetch_files

    def load_batch(self, samples: Indices, epoch: int | None) -> Batch:
        """Wait for samples as a batch on the device, or load them here without a pool.

        Images are augmented unless ``epoch`` is None. Adds the samples that the pool could not decode to this rank's
        record.

        Raises:
            UserError: A sample or its target is unfit, image sizes differ, or more samples are bad than allowed.
        """
        layout = self.make_layout(samples)
        if self.pool is None:
            memory = np.empty(layout.size, np.uint8)
            with keep_random_state():
                loaded = [load_into(memory, layout, 0, self.loader.make_loads(samples.tolist(), epoch))]
        else:
            memory, tasks = self.take_pending(samples, epoch)
            loaded = self.pool.wait_for_images(tasks)
            for each in loaded:
                if each.report is not None:
                    self.loader.add_report(each.report)
            self.loader.skip_read(samples)
        images = layout.view_images(memory, common_shape([each.shape for each in loaded] or self.loader.sizes[:1]))
        targets = layout.view_targets(memory)
        if self.check_targets is not None:
            names = [name for each in loaded for name in each.names]
            named = [name or str(sample) for sample, name in zip(samples.tolist(), names, strict=True)]
            check_each_target(self.check_targets, targets, named)
        inputs, labels = (copy_to_device(torch.from_numpy(values), self.device) for values in (images, targets))
        if epoch is not None:
            inputs, labels = augment_batch(inputs, labels, samples, kind=self.crop, seed=self.seed, epoch=epoch)
        return Batch(inputs, labels, [name for each in loaded for name in each.names if name])

    def make_layout(self, samples: Indices) -> Layout:
        kind = self.loader.targets
        return Layout(len(samples), max(map(math.prod, self.loader.sizes)), kind.dtype.str, kind.shape)

    def submit_batch(self, pool: ImagePool, samples: Indices, epoch: int | None) -> Any:
        return pool.start_images(self.loader, samples, epoch, self.make_layout(samples))

    def bad_samples(self) -> frozenset[str]:
        return self.loader.bad_samples()

    def close(self) -> None:
        super().close()
        self.loader.close()


class ItemBatches(WorkerSource):
    """Source of batches of items. Each batch is loaded and collated by a single loader process."""

    def __init__(self, loader: ItemLoader, pool: LoaderPool | None, device: torch.device) -> None:
        super().__init__(pool, device)
        self.loader = loader
        self.batches_ahead = 2 * pool.number if pool else 0  # each process then has a next task waiting

    def submit_batch(self, pool: LoaderPool, samples: Indices, epoch: int | None) -> tuple[BatchMemory, int]:
        return pool.submit_call(self.loader.load_items, samples.tolist(), epoch)

    def load_batch(self, samples: Indices, epoch: int | None) -> Batch:
        """Wait for samples as a collated batch on the device, or load them here without a pool.

        A leaf without numbers stays unchanged, unless the leaf has a method ``to``.

        Raises:
            UserError: A sample or its target is unfit.
        """
        if self.pool is None:
            with keep_random_state():
                inputs, targets = self.loader.load_items(samples.tolist(), epoch)
        else:
            inputs, targets = self.pool.take_result(self.take_pending(samples, epoch))
        ids = self.loader.items.name_samples(samples.tolist())
        if self.check_targets is not None and isinstance(targets, (np.ndarray, Tensor)):
            names = [f"{self.loader.items.side} {sample}" for sample in ids or samples.tolist()]
            check_each_target(self.check_targets, np.asarray(targets), names)
        inputs, targets = tree_map(self.put_on_device, (inputs, targets))
        return Batch(inputs, targets, ids)

    def put_on_device(self, value: Any) -> Any:
        """Return an array of numbers, a tensor, or an object with ``to`` on the device. Other values are unchanged."""
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = torch.from_numpy(value)
        if isinstance(value, Tensor):
            return copy_to_device(value, self.device)
        return value.to(self.device) if hasattr(value, "to") else value  # such as torch-geometric's batches


def check_each_target(check: Callable[[NDArray[Any]], None], targets: NDArray[Any], names: Sequence[str]) -> None:
    """Call ``check`` with all targets [n, ...] of a batch. ``names`` are the names of the samples.

    Raises:
        UserError: ``check`` rejects a target. The error names the sample, if ``check`` also rejects its target alone.
    """
    try:
        check(targets)
    except UserError:
        for place, name in enumerate(names):
            try:
                check(targets[place : place + 1])
            except UserError as error:
                raise UserError(f"the target that user code made for sample {name!r}: {error}") from None
        raise
