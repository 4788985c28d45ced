"""How gradients are synchronised: torch's DistributedDataParallel, adding up what the ranks computed."""

# No "from __future__ import annotations" here: DDP checks a communication hook's annotations, and wants real types.
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # what torch.distributed re-exports as GradBucket
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.distributed import world_size


class GradientSync:
    """A model whose gradients, after ``backward``, are those of the whole global batch on every rank.

    Losses are divided by the global batch's sample count before ``backward``, so the ranks' gradients are added, not
    averaged: a ragged batch is exact. ``exposed_seconds`` is the time spent waiting for communication that no
    computation hid: from the start of the last bucket's reduction to the end of ``backward``.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.exposed_seconds = 0.0
        self.last_bucket_started = 0.0
        self.model = model
        self.parallel: DistributedDataParallel | None = None
        if world_size() > 1:
            # A kernel for one channel has two equally good memory orders, of which DDP expects the other one.
            warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
            self.parallel = DistributedDataParallel(
                model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
            )
            self.parallel.register_comm_hook(self, add_over_ranks)

    def __call__(self, images: Tensor) -> Tensor:
        """The model's output for this rank's share of a batch."""
        output: Tensor = (self.parallel or self.model)(images)
        return output

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """For forward and backward of one micro-batch: all but the last only accumulate, without communication."""
        return nullcontext() if last or self.parallel is None else self.parallel.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Computes gradients, and waits for their sum over the ranks unless accumulating."""
        self.last_bucket_started = 0.0
        loss.backward()  # type: ignore[no-untyped-call]
        if self.last_bucket_started:
            self.exposed_seconds += time.perf_counter() - self.last_bucket_started


def add_over_ranks(sync: GradientSync, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: the sum of one bucket of gradients over the ranks."""
    sync.last_bucket_started = time.perf_counter()
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])
