"""How gradients are synchronised: in memory that a machine's ranks share, or by torch's DistributedDataParallel.

Losses are divided by the global batch's sample count before ``backward``, so the ranks' gradients are added, not
averaged: a ragged batch is exact.
"""

# No "from __future__ import annotations" here: DDP checks a communication hook's annotations, and wants real types.
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # what torch.distributed re-exports as GradBucket
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.distributed import copy_from_rank_0, rank, world_size
from flyte_ddp.node_memory import NodeMemory


class GradientSync:
    """A model whose gradients, after the last micro-batch of a step, are those of the global batch on every rank.

    This one is for a single rank, which has nothing to do for that. ``exposed_seconds`` is the time spent on
    communication that no computation hid.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.exposed_seconds = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        """The model's output for this rank's share of a batch."""
        output: Tensor = self.model(images)
        return output

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        """Goes around forward and backward of one micro-batch; all but the last of a step only accumulate."""
        yield


class SharedMemorySync(GradientSync):
    """For CPU ranks of one machine: each puts its gradients where all can read them, and adds up those of all.

    gloo goes through TCP even on one machine, and its threads need the cores that compute. All ranks add in the same
    order, and so get the same bits.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        copy_from_rank_0([*model.parameters(), *model.buffers()])
        self.parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad and parameter.numel()
        ]
        # Two sets of places, used in turn: who is ahead fills one while others still read the other. Before it comes
        # back to that one it has passed a barrier that they reach only after reading.
        ranks, sets = world_size(), 2
        flags = [(ranks * len(self.parameters), torch.bool)] * sets
        gradients = [(ranks * parameter.numel(), parameter.dtype) for parameter in self.parameters] * sets
        self.memory = NodeMemory(flags + gradients)
        self.has_gradient = [flat.view(ranks, -1) for flat in self.memory.tensors[:sets]]
        views = [
            # Each rank's gradient in the same order of memory as the parameter, without its gaps, if it has any.
            flat.as_strided((ranks, *parameter.shape), (parameter.numel(), *torch.empty_like(parameter).stride()))
            for parameter, flat in zip(self.parameters * sets, self.memory.tensors[sets:], strict=True)
        ]
        self.gradients = [views[: len(self.parameters)], views[len(self.parameters) :]]
        self.turn = 0

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """See :class:`GradientSync`."""
        yield
        if last:
            begin = time.perf_counter()
            self.add_up()
            self.exposed_seconds += time.perf_counter() - begin

    @torch.no_grad()
    def add_up(self) -> None:
        """Makes each gradient its sum over the ranks; one that no rank has stays None, as on a single rank."""
        has_gradient, gradients = self.has_gradient[self.turn], self.gradients[self.turn]
        self.turn = 1 - self.turn
        own = rank()
        for index, (parameter, of_ranks) in enumerate(zip(self.parameters, gradients, strict=True)):
            has_gradient[own, index] = parameter.grad is not None
            of_ranks[own] = 0.0 if parameter.grad is None else parameter.grad
        self.memory.barrier()
        for parameter, of_ranks, any_has in zip(
            self.parameters, gradients, has_gradient.any(dim=0).tolist(), strict=True
        ):
            if any_has:
                parameter.grad = torch.add(of_ranks[0], of_ranks[1], out=parameter.grad)
                for gradient in of_ranks[2:]:
                    parameter.grad += gradient


class DDPSync(GradientSync):
    """torch's DistributedDataParallel, on any backend and over machines."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model)
        self.last_bucket_started = 0.0
        # A kernel for one channel has two equally good memory orders, of which DDP expects the other one.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        self.parallel = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            # Otherwise a model with a parameter that no output depends on fails in its second step, or, if there is
            # none, ends with gradients that were never added up.
            find_unused_parameters=True,
        )
        self.parallel.register_comm_hook(self, add_over_ranks)

    def __call__(self, images: Tensor) -> Tensor:
        """See :class:`GradientSync`."""
        output: Tensor = self.parallel(images)
        return output

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """See :class:`GradientSync`."""
        self.last_bucket_started = 0.0
        with nullcontext() if last else self.parallel.no_sync():
            yield
        if self.last_bucket_started:  # ``backward`` has ended when the last bucket's sum was there
            self.exposed_seconds += time.perf_counter() - self.last_bucket_started


def add_over_ranks(sync: DDPSync, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: the sum of one bucket of gradients over the ranks."""
    sync.last_bucket_started = time.perf_counter()
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])


def synchronised(model: nn.Module, strategy: str, device: torch.device) -> GradientSync:
    """The model with the strategy of that name; a single rank needs none."""
    if world_size() == 1:
        return GradientSync(model)
    return SharedMemorySync(model) if strategy == "shared_memory" else DDPSync(model, device)
