"""How gradients are synchronised: in memory that a machine's ranks share, or by torch's DistributedDataParallel.

Each rank's loss is a sum, times the number of ranks and divided by the global batch's sample count, and gradients are
averaged. So a ragged batch is exact, and what a model adds to its gradients beside the loss (a hook, or a loss of a
layer's own) counts once and not once for each rank.
"""

# No "from __future__ import annotations" here: DDP checks a communication hook's annotations, and wants real types.
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # what torch.distributed re-exports as GradBucket
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.clock import Clock
from flyte_ddp.device_copy import copy_to_device
from flyte_ddp.errors import CollectiveError, UserError
from flyte_ddp.parallel.batch_norm import GlobalBatchNorm
from flyte_ddp.parallel.collective_failures import waiting_for_ranks
from flyte_ddp.parallel.distributed import copy_from_rank_0, rank, sum_over_ranks, world_size
from flyte_ddp.parallel.dropout import SampleDropout
from flyte_ddp.parallel.hang_watch import in_collective, watch_work
from flyte_ddp.parallel.node_memory import NodeMemory, Piece, cut, sizes

BUCKET_BYTES = 16 << 20  # of one rank's gradients
WAITED = "waited"  # clock key: seconds of gradient communication that did not overlap with the backward pass


class GradientSync:
    """A model whose gradients, after :meth:`combine`, are those of the global batch on every rank.

    This class is for a single rank, whose gradients are these already.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, images: Tensor) -> Tensor:
        """Return the model's output for this rank's share of a batch."""
        output: Tensor = self.model(images)
        return output

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context for a micro-batch's passes; all but the ``last`` of a step only accumulate."""
        return nullcontext()

    def combine(self, loss_sum: Tensor) -> Tensor:
        """Average the gradients over the ranks, and return the sum of all ranks' losses, which are fp64 scalars."""
        return loss_sum


class SharedMemorySync(GradientSync):
    """For CPU ranks of one machine: each copies its gradients to shared memory, and averages those of all ranks.

    gloo goes through TCP even on one machine, and its threads need the cores that compute. All ranks add in the same
    order, and so get the same bits. The shared memory grows with the largest parameter, not with the model.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(model)
        copy_from_rank_0([*model.parameters(), *model.buffers()])
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.numel()]
        groups = split_into_buckets(trained, bucket_bytes) or [[]]
        self.memory = NodeMemory(max(sum(sizes(bucket_pieces(group))) for group in groups))
        self.buckets = [[SharedBucket(group, half) for half in self.memory.halves] for group in groups]

    @torch.no_grad()
    def combine(self, loss_sum: Tensor) -> Tensor:
        """Average and add up as in :class:`GradientSync`; a gradient that no rank has stays None, as on one rank."""
        for in_either_half in self.buckets:
            bucket = in_either_half[self.memory.turn]
            bucket.put(loss_sum)
            self.memory.barrier()
            bucket.average()
        return bucket.losses.sum()


class SharedBucket:
    """Some parameters, with places in shared memory for each rank's gradients of them, and for its loss."""

    def __init__(self, parameters: list[nn.Parameter], memory: Tensor) -> None:
        self.parameters = parameters
        ranks = world_size()
        self.losses, flags, *flats = cut(memory, bucket_pieces(parameters))
        self.has_gradient = flags.view(ranks, len(parameters))
        self.gradients = [
            # Each rank's gradient has the parameter's order of memory, but not its gaps.
            flat.as_strided((ranks, *parameter.shape), (parameter.numel(), *torch.empty_like(parameter).stride()))
            for parameter, flat in zip(parameters, flats, strict=True)
        ]

    def put(self, loss_sum: Tensor) -> None:
        """Copy this rank's loss and gradients into its places."""
        own = rank()
        self.losses[own] = loss_sum
        for index, (parameter, of_ranks) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            self.has_gradient[own, index] = parameter.grad is not None
            of_ranks[own] = 0.0 if parameter.grad is None else parameter.grad

    def average(self) -> None:
        """Overwrite the gradients by their means over all ranks."""
        any_has = self.has_gradient.any(dim=0).tolist()
        for parameter, of_ranks, has_gradient in zip(self.parameters, self.gradients, any_has, strict=True):
            if has_gradient:
                parameter.grad = torch.add(of_ranks[0], of_ranks[1], out=parameter.grad)
                for gradient in of_ranks[2:]:
                    parameter.grad += gradient
                parameter.grad /= len(of_ranks)


def split_into_buckets(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Split a sequence into groups of at most so many bytes; a larger parameter is a group of its own."""
    groups: list[list[nn.Parameter]] = []
    free = 0
    for parameter in parameters:
        if parameter.nbytes > free:
            groups.append([])
            free = most_bytes
        groups[-1].append(parameter)
        free -= parameter.nbytes
    return groups


def bucket_pieces(parameters: Sequence[nn.Parameter]) -> list[Piece]:
    """Return a bucket's layout: all ranks' losses, flags of the gradients that each has, and the gradients."""
    ranks = world_size()
    gradients = [(ranks * parameter.numel(), parameter.dtype) for parameter in parameters]
    return [(ranks, torch.float64), (ranks * len(parameters), torch.bool), *gradients]


class DDPSync(GradientSync):
    """torch's DistributedDataParallel, on any backend and over machines."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        super().__init__(model)
        self.clock = clock
        device = next(model.parameters()).device
        self.last_bucket_started: Any = None
        self.failure: CollectiveError | None = None  # of a bucket's all-reduce
        # DDP's constructor waits for other ranks in C++, whose failure has no type. So this waits for them before.
        sum_over_ranks(torch.zeros(1, device=device))
        # A kernel for one channel has two equally good memory orders, of which DDP expects the other one.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        with in_collective():
            self.model = self.parallel = DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                # Otherwise a parameter that no output depends on fails the second step, and buckets change after the
                # first one, and with them the rounding: a resumed run would end in other bits.
                find_unused_parameters=True,
            )
        self.parallel.register_comm_hook(self, average_over_ranks)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Return the context of :class:`GradientSync`, which adds to WAITED and gives errors of DDP their types."""
        self.last_bucket_started = None
        try:
            with nullcontext() if last else self.parallel.no_sync():
                yield
        except RuntimeError as error:
            if self.failure is not None:
                raise self.failure from error
            if "ready only once" not in str(error):
                raise
            raise repeated_gradient_error("ddp", "use_reentrant=False, or set strategy='hooks'") from None
        if self.last_bucket_started is not None:  # ``backward`` returns only after the last bucket's all-reduce
            self.clock.add(WAITED, self.last_bucket_started)

    def combine(self, loss_sum: Tensor) -> Tensor:
        """Return the sum of all ranks' losses; DDP has averaged the gradients in the backward pass."""
        return sum_over_ranks(loss_sum)


class HooksSync(GradientSync):
    """One all-reduce for each parameter, started during the backward pass: DDP's idea without its buckets.

    All ranks start the all-reduces in the same order, from the last parameter to the first, whatever the order in which
    gradients are computed. Otherwise ranks that use different parameters would average tensors of different ones.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        copy_from_rank_0([*model.parameters(), *model.buffers()])
        self.order = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
        self.position = {cast("Tensor", parameter): place for place, parameter in enumerate(self.order)}
        self.started: list[dist.Work] = []
        self.ready: set[Tensor] = set()
        self.last = False
        for parameter in self.order:
            parameter.register_post_accumulate_grad_hook(self.start_ready)  # type: ignore[no-untyped-call]

    def start_ready(self, parameter: Tensor) -> None:
        """Start the all-reduces that may start now that the parameter's gradient is complete; a hook of autograd."""
        if self.last:
            if self.position[parameter] < len(self.started):
                raise repeated_gradient_error("hooks", "use_reentrant=False")
            self.ready.add(parameter)
            while len(self.started) < len(self.order) and self.order[len(self.started)] in self.ready:
                self.start_next()

    def start_next(self) -> None:
        """Start the all-reduce of the next parameter in the order; one without a gradient adds zeros."""
        parameter = self.order[len(self.started)]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self.started.append(dist.all_reduce(parameter.grad, async_op=True))

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context that does nothing; note whether hooks may start all-reduces."""
        self.last = last
        return nullcontext()

    def combine(self, loss_sum: Tensor) -> Tensor:
        """Average and add up as in :class:`GradientSync`; a gradient that no rank has becomes None, as on one rank."""
        has_gradient = torch.tensor([parameter.grad is not None for parameter in self.order], dtype=torch.int32)
        has_gradient = copy_to_device(has_gradient, loss_sum.device)
        while len(self.started) < len(self.order):
            self.start_next()
        with in_collective():
            last = [dist.all_reduce(numbers, async_op=True) for numbers in (has_gradient, loss_sum)]
            for work in (*self.started, *last):
                work.wait()
        for parameter, ranks_with_gradient in zip(self.order, has_gradient.tolist(), strict=True):
            if ranks_with_gradient:
                parameter.grad.div_(world_size())  # type: ignore[union-attr]
            else:
                parameter.grad = None
        self.started.clear()
        self.ready.clear()
        return loss_sum


def repeated_gradient_error(strategy: str, fix: str) -> UserError:
    """Return the error for a gradient that grows while it is averaged over the ranks."""
    return UserError(
        f"strategy={strategy!r}: the backward pass came back to a parameter whose gradient was complete, as with "
        f"torch.utils.checkpoint(use_reentrant=True); use {fix}"
    )


def average_over_ranks(sync: DDPSync, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return the future mean of a bucket of gradients over the ranks; DDP's communication hook."""
    sync.last_bucket_started = sync.clock.mark(WAITED)
    begin = time.monotonic()
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    watch_work(work)  # the backward pass may wait for it: DDP looks whether a parameter was used on any rank

    def mean(done: torch.futures.Future[Any]) -> Tensor:
        try:
            with waiting_for_ranks(begin):
                total: Tensor = done.value()[0]
        except CollectiveError as error:  # ``backward`` turns it into a RuntimeError
            sync.failure = error
            raise
        return total.div_(world_size())

    future: torch.futures.Future[Any] = work.get_future()
    return future.then(mean)


def synchronise_gradients(model: nn.Module, strategy: str, clock: Clock) -> GradientSync:
    """Return the model with the strategy of that name; a single rank needs none. All ranks call it together."""
    if world_size() == 1:
        return GradientSync(model)
    if strategy == "ddp":
        return DDPSync(model, clock)
    return SharedMemorySync(model) if strategy == "shared_memory" else HooksSync(model)


def compile_model(model: nn.Module) -> nn.Module:
    """Return the model compiled by torch.compile; keeps out layers that exchange between ranks or depend on samples.

    Each such layer is a graph break. A dropout layer with p = 0, of which torchvision's models have many, is none.
    """
    for module in model.modules():
        if isinstance(module, GlobalBatchNorm) or (isinstance(module, SampleDropout) and module.p > 0):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign,no-untyped-call,unused-ignore]
    return cast("nn.Module", torch.compile(model))
