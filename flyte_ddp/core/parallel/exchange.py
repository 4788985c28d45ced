"""Exchange values between ranks in a loss, for objectives that compare the samples of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.parallel import distributed
from flyte_ddp.core.parallel.distributed import rank, translate_collective_errors, world_size
from flyte_ddp.core.parallel.hang_watch import in_collective

_exchange: RankExchange | None = None  # of the training whose losses are being computed


class RankExchange:
    """State of :func:`across_ranks` for a training on this rank, with a process group for the exchanges."""

    def __init__(self, refusal: str = "") -> None:
        """Create the state. ``refusal`` is the reason why samples must not be compared, "" if allowed."""
        self.refusal = refusal
        self.has_samples = True
        self.group: Any = None  # a ProcessGroup

    @contextmanager
    def enable_across_ranks(self, *, has_samples: bool) -> Iterator[None]:
        """Let :func:`across_ranks` exchange values between ranks during the block.

        Sets a global variable of the process. Do not nest blocks, because the end of an inner block also ends the
        outer block's exchange. If ``has_samples`` is False, this rank takes part in each exchange, but adds no rows.
        """
        global _exchange  # noqa: PLW0603 (a user's function, which calls across_ranks, is not given the training)
        self.has_samples, _exchange = has_samples, self
        try:
            yield
        finally:
            _exchange = None

    def get_or_create_group(self, *, on_gpu: bool) -> Any:
        """Return the process group that is reserved for :func:`across_ranks`. The group contains all ranks.

        The first call creates the group, and is collective. ``on_gpu`` tells whether the values are on a GPU, which
        decides the time limit. Later calls ignore ``on_gpu``.

        Raises:
            CollectiveTimeoutError: Another rank did not make its first call within ``distributed.timeout_seconds``.
            CollectiveError: A rank failed during the first call.
        """
        if self.group is None:
            limit = distributed.choose_group_timeout(distributed.timeout_seconds, on_gpu=on_gpu)
            with translate_collective_errors(), in_collective():
                self.group = dist.new_group(timeout=limit)
        return self.group


def across_ranks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Gather a batch's rows from all ranks, for losses that compare the samples of a batch. Collective.

    Call this function in ``losses`` of an objective. All ranks must call this function equally often, and use the
    result in the losses. Ranks wait for each other. A rank without samples adds no row. The gradient of each row flows
    back to the row's rank. If ``losses`` returns an unscaled loss for each of this rank's samples, a step equals the
    step of a single process.

    On one rank, and in an evaluation, returns ``values`` and 0..n-1 without waiting. In an evaluation, each batch of
    ``test_batch_size`` is whole on one rank. To compare all samples of a split, use ``measure``.

    Args:
        values: This rank's rows [n, ...].

    Returns:
        All ranks' rows [N, ...] in the order of the batch, and the positions [n] of this rank's rows.

    Raises:
        UserError: The batch is in parts or mixed by mixup, or shapes differ beyond the first dimension. Also raised
            outside losses, as in a model or in a user-defined loop, while several ranks record gradients.
    """
    if _exchange is None and world_size() > 1 and torch.is_grad_enabled():
        raise UserError(
            "across_ranks: must be called in an objective's losses, because elsewhere other ranks may not call the "
            "function; in your own loop, use torch.distributed.nn.functional.all_gather"
        )
    if _exchange is not None and _exchange.refusal:
        raise UserError(_exchange.refusal)
    if _exchange is None or world_size() == 1:
        return values, torch.arange(len(values), device=values.device)
    group = _exchange.get_or_create_group(on_gpu=values.is_cuda)
    counted = len(values) if _exchange.has_samples else 0
    shapes = torch.stack(
        gather_equal_shapes(torch.tensor([counted, *values.shape[1:]], device=values.device), group)
    ).tolist()
    if any(shape[1:] != shapes[0][1:] for shape in shapes):
        raise UserError(
            f"across_ranks: the ranks' values have shapes {', '.join(map(str, shapes))}: must be equal except for the "
            "first dimension; pad the other dimensions to one length"
        )
    lengths = [shape[0] for shape in shapes]
    start = sum(lengths[: rank()]) if counted else 0  # a rank without samples runs the batch's first sample
    rows: Tensor = GatheredRows.apply(values, lengths, group)
    return rows, torch.arange(start, start + len(values), device=values.device)


class GatheredRows(torch.autograd.Function):
    """Gathers rows of all ranks. All ranks must run both passes, and wait for each other in both."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: list[int], group: Any) -> Tensor:
        """Return all ranks' rows [N, ...], in the order of the ranks. Collective. ``lengths`` has each rank's rows."""
        ctx.lengths, ctx.group, ctx.shape = lengths, group, values.shape
        padded = values.new_zeros(max(lengths), *values.shape[1:])
        padded[: lengths[rank()]] = values[: lengths[rank()]]
        parts = gather_equal_shapes(padded, group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    @staticmethod
    @once_differentiable  # the returned gradient is computed without a graph
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's values: the sum of all ranks' gradients of these rows. Collective.

        Rows that were not gathered get gradient 0.
        """
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        with in_collective():
            dist.all_reduce(total, group=ctx.group)
        gradient = total.new_zeros(ctx.shape)
        gradient[: ctx.lengths[rank()]] = torch.split(total, ctx.lengths)[rank()]
        return gradient, None, None


def gather_equal_shapes(values: Tensor, group: Any) -> list[Tensor]:
    """Return the list of all ranks' ``values``, in the order of the ranks. Collective.

    Shape and type must be equal on all ranks.
    """
    gathered = [*values.new_empty(world_size(), *values.shape)]
    with in_collective():
        dist.all_gather(gathered, values, group=group)
    return gathered
