"""Sources of batches that loader processes load: images sample by sample, other items batch by batch."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.batch_memory import Layout
from flyte_ddp.core.loading.loader_threads import ImagePool
from flyte_ddp.core.loading.sample_loader import SampleLoader, load_into_memory, require_common_shape
from flyte_ddp.core.loading.split import Batch, BatchSource, CheckTargets
from flyte_ddp.core.machine.device_copy import copy_to_device
from flyte_ddp.core.order.random_state import keep_random_state
from flyte_ddp.core.order.sampling import Indices


class WorkerSource(BatchSource):
    """Base class of sources whose samples are loaded by processes or threads.

    Without a pool, the rank loads the samples itself.
    """

    def __init__(self, pool: Any, device: torch.device) -> None:
        self.pool, self.device, self.loaders = pool, device, pool.number if pool else 0
        # For each batch that the pool is loading, by epoch and samples: the handle from :meth:`start_loading_batch`.
        self.pending: dict[tuple[int | None, bytes], Any] = {}

    def start_loading_batch(self, pool: Any, samples: Indices, epoch: int | None) -> Any:
        """Start loading a batch in ``pool`` without waiting, and return a handle that :meth:`load_batch` waits for."""
        raise NotImplementedError

    def begin_batch(self, samples: Indices, epoch: int | None) -> None:
        key = (epoch, samples.tobytes())
        if self.pool is not None and key not in self.pending:
            self.pending[key] = self.start_loading_batch(self.pool, samples, epoch)

    def take_started_batch(self, samples: Indices, epoch: int | None) -> Any:
        """Remove a started batch from ``pending``, and return the handle. Starts loading the batch if needed."""
        self.begin_batch(samples, epoch)  # no effect if done before
        return self.pending.pop((epoch, samples.tobytes()))

    def close(self) -> None:
        """End the pool, also for other sources that share the pool."""
        self.pending = {}
        if self.pool is not None:
            self.pool.close()


class WorkerImages(WorkerSource):
    """Source of batches of images. Each process or thread loads a part of each batch."""

    batches_ahead = 2  # enough to keep the pool busy while load_batch() waits for a batch

    def __init__(self, loader: SampleLoader, pool: ImagePool | None, device: torch.device) -> None:
        super().__init__(pool, device)
        self.loader = loader

    def load_batch(self, samples: Indices, epoch: int | None, check_targets: CheckTargets | None = None) -> Batch:
        """Return samples as a batch on the device.

        Waits for the pool that loads the samples. Without a pool, loads the samples in this process.

        Images are augmented unless ``epoch`` is None. Records the samples that the pool could not decode.

        Raises:
            UserError: A sample or its target is unfit, image sizes differ, or more samples are bad than allowed.
        """
        layout = self.make_layout(samples)
        if self.pool is None:
            memory = np.empty(layout.size, np.uint8)
            with keep_random_state():
                loaded = [load_into_memory(memory, layout, 0, self.loader.make_load_functions(samples.tolist(), epoch))]
        else:
            memory, tasks = self.take_started_batch(samples, epoch)
            loaded = self.pool.wait_for_loaded_images(tasks)
            for each in loaded:
                if each.report is not None:
                    self.loader.add_report(each.report)
        images = layout.view_images(
            memory, require_common_shape([each.shape for each in loaded] or self.loader.sizes[:1])
        )
        targets = layout.view_targets(memory)
        if check_targets is not None:
            names = [name for each in loaded for name in each.names]
            named = [name or str(sample) for sample, name in zip(samples.tolist(), names, strict=True)]
            check_targets_and_name_sample(check_targets, targets, named)
        inputs, labels = (copy_to_device(torch.from_numpy(values), self.device) for values in (images, targets))
        inputs, labels = self.loader.augmentation.augment_batch(inputs, labels, samples, epoch)
        return Batch(inputs, labels, [name for each in loaded for name in each.names if name])

    def make_layout(self, samples: Indices) -> Layout:
        kind = self.loader.targets
        return Layout(len(samples), max(map(math.prod, self.loader.sizes)), kind.dtype.str, kind.shape)

    def start_loading_batch(self, pool: ImagePool, samples: Indices, epoch: int | None) -> Any:
        return pool.start_loading_images(self.loader, samples, epoch, self.make_layout(samples))

    def bad_samples(self) -> frozenset[str]:
        return self.loader.bad_samples()

    def replaced_samples(self) -> frozenset[int]:
        return self.loader.replaced_samples()

    def read_label(self, sample: int) -> int | None:
        return self.loader.read_label(sample)

    def close(self) -> None:
        super().close()
        self.loader.close()


def check_targets_and_name_sample(check: CheckTargets, targets: NDArray[Any], names: Sequence[str]) -> None:
    """Call ``check`` with all targets [n, ...] of a batch, and name the sample in the error.

    Args:
        names: Names of the samples.

    Raises:
        UserError: ``check`` rejects a target. If ``check`` also rejects the target alone, the error names the sample.
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
