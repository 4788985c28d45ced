"""Average gradients over the ranks: by shared memory, DistributedDataParallel, or an all-reduce per parameter.

Each rank's loss is a sum, times the number of ranks and divided by the global batch's sample count. Therefore a smaller
last batch is exact. Gradients that a model adds beside the loss (by a hook) count once, not once for each rank.
"""

# No "from __future__ import annotations" here: DDP checks a communication hook's annotations, and wants real types.
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.core.errors import CollectiveError, UserError
from flyte_ddp.core.machine.clock import Clock
from flyte_ddp.core.machine.device_copy import copy_to_device
from flyte_ddp.core.parallel import distributed
from flyte_ddp.core.parallel.batch_norm import is_synchronised
from flyte_ddp.core.parallel.distributed import copy_from_rank_0, rank, sum_over_ranks, world_size
from flyte_ddp.core.parallel.hang_watch import in_collective, watch_async_collective
from flyte_ddp.core.parallel.node_memory import NodeMemory, Piece, compute_aligned_sizes, split_memory
from flyte_ddp.core.samples.leaves import Leaves, call_with_leaves

BUCKET_BYTES = 16 << 20  # of one rank's gradients
WAITED = "waited"  # clock key: seconds of gradient communication that did not overlap with the backward pass


class GradientSync:
    """A model whose gradients :meth:`average_gradients` averages over the ranks. This class is for one rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, inputs: Leaves) -> Any:
        return call_with_leaves(self.model, inputs)

    def prepare_backward(self, outputs: Any, loss: Tensor) -> None:
        """Prepare the exchange of gradients in the backward pass of ``loss``. The default does nothing.

        ``loss`` may depend on only some of ``outputs``. Call this method between forward and backward pass.
        """

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context manager for the forward and backward pass of a micro-batch of this step.

        ``last`` is True for the last micro-batch of the step, in which gradients may be exchanged.
        """
        return nullcontext()

    def average_gradients(self, sums: Tensor) -> Tensor:
        """Average the gradients over the ranks in place, and add up ``sums`` over the ranks. Collective.

        Call this method after the step's last backward pass. If a parameter has no gradient on any rank, its ``grad``
        is None afterwards.

        Args:
            sums: One or two numbers, such as the loss (fp64 [1 or 2]). May be overwritten.

        Returns:
            The sums over all ranks, in the shape of ``sums``.
        """
        return sum_over_ranks(sums)


class SharedBucket(NamedTuple):
    """Views of shared memory for the gradients of some parameters on all ranks."""

    sums: Tensor  # fp64 [2, ranks]: the numbers that are added up beside the gradients
    has_gradient: Tensor  # bool [ranks, parameters]
    gradients: list[Tensor]  # for each parameter [ranks, *its shape]


class SharedMemorySync(GradientSync):
    """Averages gradients through shared memory, for CPU ranks of one machine.

    Unlike gloo, shared memory needs no TCP, and takes no cores from the computation. The memory grows with the largest
    parameter, not with the model.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Give all ranks rank 0's weights and buffers, and map the shared memory. Collective.

        A bucket has gradients of at most ``bucket_bytes`` of a rank, or of a single larger parameter.
        """
        super().__init__(model)
        copy_from_rank_0([*model.parameters(), *model.buffers()])
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.numel()]
        self.groups = group_parameters_by_size(trained, bucket_bytes) or [[]]  # at least one, for the sums
        self.memory = NodeMemory(max(sum(compute_aligned_sizes(list_bucket_pieces(group))) for group in self.groups))
        self.buckets = [[make_bucket_views(group, half) for group in self.groups] for half in self.memory.halves]

    @torch.no_grad()
    def average_gradients(self, sums: Tensor) -> Tensor:
        """Average the gradients over the ranks in place, and return ``sums`` added up over the ranks. Collective.

        On a rank where a parameter has no gradient, the gradient counts as 0.
        """
        this_rank = rank()
        for number, parameters in enumerate(self.groups):
            bucket = self.buckets[self.memory.turn][number]
            bucket.sums[: len(sums), this_rank] = sums
            for index, (parameter, by_rank) in enumerate(zip(parameters, bucket.gradients, strict=True)):
                bucket.has_gradient[this_rank, index] = parameter.grad is not None
                by_rank[this_rank] = 0.0 if parameter.grad is None else parameter.grad
            # Behind the barrier all ranks have written this half of the memory. Each barrier changes ``turn``: a fast
            # rank continues in the other half, and returns after the next barrier, when all ranks have read this half.
            self.memory.wait_at_barrier()
            exists = bucket.has_gradient.any(dim=0).tolist()
            for parameter, by_rank, has_gradient in zip(parameters, bucket.gradients, exists, strict=True):
                if has_gradient:
                    # Added in the order of the ranks, so that all ranks get the same bits.
                    parameter.grad = torch.add(by_rank[0], by_rank[1], out=parameter.grad)
                    for gradient in by_rank[2:]:
                        parameter.grad += gradient
                    parameter.grad /= len(by_rank)
        return bucket.sums[: len(sums)].sum(dim=1)  # of the last bucket; all buckets have the same sums


def make_bucket_views(parameters: Sequence[nn.Parameter], memory: Tensor) -> SharedBucket:
    """Return views of the shared ``memory`` for all ranks' gradients of ``parameters``, in the parameters' layout."""
    ranks = world_size()
    sums, has_gradient, *flats = split_memory(memory, list_bucket_pieces(parameters))
    gradients = [
        # Each rank's gradient has the parameter's memory order, without gaps.
        flat.as_strided((ranks, *parameter.shape), (parameter.numel(), *torch.empty_like(parameter).stride()))
        for parameter, flat in zip(parameters, flats, strict=True)
    ]
    return SharedBucket(sums.view(2, ranks), has_gradient.view(ranks, len(parameters)), gradients)


def list_bucket_pieces(parameters: Sequence[nn.Parameter]) -> list[Piece]:
    """Return size and type of each tensor in a bucket for ``parameters``, in the order of a SharedBucket's fields."""
    ranks = world_size()
    gradients = [(ranks * parameter.numel(), parameter.dtype) for parameter in parameters]
    return [(2 * ranks, torch.float64), (ranks * len(parameters), torch.bool), *gradients]


def group_parameters_by_size(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Return the parameters, in order, in groups of at most ``most_bytes``.

    A larger parameter forms a group alone.
    """
    groups: list[list[nn.Parameter]] = []
    free = 0
    for parameter in parameters:
        if parameter.nbytes > free:
            groups.append([])
            free = most_bytes
        groups[-1].append(parameter)
        free -= parameter.nbytes
    return groups


class DDPSync(GradientSync):
    """Averages gradients by torch's DistributedDataParallel, on any backend and over machines."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        """Wrap the model in DistributedDataParallel, which gives all ranks rank 0's weights. Collective.

        Registers the hook that averages gradients. Ignores three of torch's warnings in this process from now on. Waits
        are added to ``clock``.
        """
        self.clock = clock
        device = next(model.parameters()).device
        self.last_bucket_started: Any = None
        self.failure: CollectiveError | None = None  # of a bucket's all-reduce
        # DDP's constructor waits for other ranks in C++, where a failure is a plain RuntimeError. So wait before.
        sum_over_ranks(torch.zeros(1, device=device))
        # Weights for one channel fit two memory orders. DDP warns, for no reason, about strides of the other order.
        texts = "Grad strides do not match|find_unused_parameters=True was|`broadcast_buffers` is deprecated"
        warnings.filterwarnings("ignore", message=texts)
        with in_collective():
            self.parallel = DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                # Otherwise a parameter that no output depends on fails the second step. And DDP would form new
                # buckets after the first step, which changes the rounding: a resumed run would get other bits.
                find_unused_parameters=True,
            )
        self.parallel.register_comm_hook(self, start_averaging_bucket)
        super().__init__(self.parallel)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Average gradients in the block's backward pass if ``last`` is True, else only accumulate gradients.

        After the block, adds the wait for the last all-reduce to the clock.

        Raises:
            CollectiveError: An all-reduce has failed.
        """
        self.last_bucket_started = None
        try:
            with nullcontext() if last else self.parallel.no_sync():
                yield
        except RuntimeError as error:
            if self.failure is not None:
                raise self.failure from error
            raise
        if self.last_bucket_started is not None:  # the backward pass waits for the last bucket's all-reduce
            self.clock.add_seconds_since(WAITED, self.last_bucket_started)

    def prepare_backward(self, outputs: Any, loss: Tensor) -> None:
        """Let DDP wait only for gradients of parameters that ``loss`` depends on.

        Call this method between forward and backward pass. Does nothing if ``outputs`` is a tensor, or if the backward
        pass exchanges no gradients.
        """
        # DDP expects gradients for all outputs, and would wait in vain for a head that the loss does not use.
        if not isinstance(outputs, Tensor) and self.parallel.require_backward_grad_sync:
            self.parallel.reducer.prepare_for_backward([loss])


def start_averaging_bucket(sync: DDPSync, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Start the all-reduce of a bucket of gradients in place. DDP calls this function as its communication hook.

    Stores the start time in ``sync.last_bucket_started``. If the all-reduce fails, stores the error in
    ``sync.failure``.

    Returns:
        The future of the gradients' mean over the ranks, in the memory of the bucket.
    """
    sync.last_bucket_started = sync.clock.start_timing(WAITED)
    begin = time.monotonic()
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    # The host may wait for this work in the backward pass, where DDP asks which parameters any rank has used.
    watch_async_collective(work)

    def divide_sum(done: torch.futures.Future[Any]) -> Tensor:
        """Divide the sum by the number of ranks in place. If the all-reduce has failed, stores and raises the error."""
        try:
            with distributed.translate_collective_errors(begin):
                total: Tensor = done.value()[0]
        except CollectiveError as error:  # torch's backward pass turns it into a RuntimeError
            sync.failure = error
            raise
        return total.div_(world_size())

    future: torch.futures.Future[Any] = work.get_future()
    return future.then(divide_sum)


class HooksSync(GradientSync):
    """Averages gradients by an all-reduce for each parameter, started during the backward pass.

    All ranks start all-reduces in one order, from the last parameter to the first, because ranks may use different
    parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        """Give all ranks rank 0's weights and buffers, and register a hook at each trainable parameter. Collective."""
        super().__init__(model)
        copy_from_rank_0([*model.parameters(), *model.buffers()])
        self.order = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
        self.started: list[dist.Work] = []  # all-reduces of the first parameters in the order
        self.ready: set[int] = set()  # places in the order
        self.last = False
        for place, parameter in enumerate(self.order):
            parameter.register_post_accumulate_grad_hook(partial(self.start_ready_all_reduces, place))  # type: ignore[no-untyped-call]

    def start_ready_all_reduces(self, place: int, _: Tensor) -> None:
        """Mark the gradient of ``order[place]`` as complete, and start all all-reduces whose turn has come.

        A gradient's all-reduce starts when the gradient and all earlier gradients of ``order`` are complete. Does
        nothing unless the micro-batch is the last of the step.

        Raises:
            UserError: The all-reduce of this gradient was started before.
        """
        if self.last:
            if place < len(self.started):
                raise UserError(
                    "strategy='hooks': the backward pass changed a gradient that was complete, as with "
                    "torch.utils.checkpoint(use_reentrant=True); compute each gradient once, with use_reentrant=False"
                )
            self.ready.add(place)
            while len(self.started) in self.ready:
                self.start_next_all_reduce()

    def start_next_all_reduce(self) -> None:
        """Start the all-reduce of the next gradient in order. A missing gradient becomes zeros."""
        parameter = self.order[len(self.started)]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self.started.append(dist.all_reduce(parameter.grad, async_op=True))

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Switch the all-reduces of the parameters' hooks on if ``last`` is True, else off.

        The call has this effect, and the returned context manager does nothing.
        """
        self.last = last
        return nullcontext()

    def average_gradients(self, sums: Tensor) -> Tensor:
        """Start the remaining all-reduces, wait for all, and average the gradients in place. Collective.

        A parameter that no rank has used gets no gradient.

        Returns:
            ``sums``, added up over the ranks in place.
        """
        # Read before missing gradients become zeros: a parameter that no rank has used must not be updated.
        has_gradient = torch.tensor([parameter.grad is not None for parameter in self.order], dtype=torch.int32)
        has_gradient = copy_to_device(has_gradient, sums.device)
        while len(self.started) < len(self.order):
            self.start_next_all_reduce()
        with in_collective():
            others = [dist.all_reduce(numbers, async_op=True) for numbers in (has_gradient, sums)]
            for work in (*self.started, *others):
                work.wait()
        for parameter, ranks_with_gradient in zip(self.order, has_gradient.tolist(), strict=True):
            if ranks_with_gradient:
                parameter.grad.div_(world_size())  # type: ignore[union-attr]
            else:
                parameter.grad = None
        self.started.clear()
        self.ready.clear()
        return sums


def create_gradient_sync(model: nn.Module, strategy: str, clock: Clock) -> GradientSync:
    """Wrap the model in the GradientSync of ``strategy``: "ddp", "shared_memory" or "hooks". Collective.

    Overwrites the model's weights and buffers with rank 0's. On one rank, returns a GradientSync that exchanges
    nothing. The strategy "ddp" adds its waits for other ranks to ``clock``. The other strategies do not use ``clock``.
    """
    if world_size() == 1:
        return GradientSync(model)
    if strategy == "ddp":
        return DDPSync(model, clock)
    return SharedMemorySync(model) if strategy == "shared_memory" else HooksSync(model)


def compile_model(model: nn.Module) -> nn.Module:
    """Return the model wrapped by torch.compile. The first call of the returned model compiles.

    Synchronised BatchNorm layers are not compiled. For this, the ``forward`` of these layers is replaced in ``model``.
    """
    for layer in filter(is_synchronised, model.modules()):
        function = cast("MethodType", layer.forward).__func__
        layer.forward = MethodType(torch.compiler.disable(function), layer)  # type: ignore[no-untyped-call,unused-ignore]
    return cast("nn.Module", torch.compile(model))
