"""Collectives over the ranks of torch's process group.

A process without a group is rank 0 of 1, and waits for nobody.
"""

from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flyte_ddp.parallel.hang_watch import in_collective

Value = TypeVar("Value")
_timeout = 600.0


def set_collective_timeout(limit: float) -> None:
    """Set, for this process, the time limit in seconds that :func:`collective_timeout` returns.

    torch's own limit is not changed.
    """
    global _timeout  # noqa: PLW0603 (a property of the process, as the process group is)
    _timeout = limit


def collective_timeout() -> float:
    """Return the time limit in seconds for waits for other ranks in this process; 600 if none was set."""
    return _timeout


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def wait_for_all_ranks() -> None:
    """Wait until all ranks have called this function. Returns at once without a process group."""
    if dist.is_initialized():
        with in_collective():
            dist.barrier()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Add up a tensor over all ranks, in place, and return the tensor. All ranks must call it.

    The tensor's device must suit the backend: CPU for gloo, GPU for NCCL.
    """
    if dist.is_initialized():
        with in_collective():
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def gather_numbers(numbers: Tensor) -> Tensor:
    """Return the [n] of all ranks as [ranks, n]; n must be equal on all ranks. All ranks must call it."""
    of_ranks = numbers.new_zeros(world_size(), numbers.numel())
    of_ranks[rank()] = numbers
    return sum_over_ranks(of_ranks)


def copy_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors in place by rank 0's; sparse and expanded tensors stay as they are. All ranks must call it.

    Sends one broadcast for each tensor. Needs a process group.
    """
    for tensor in filter(has_own_elements, tensors):
        # Sent as the bytes of a dense copy, because gloo ignores strides and does not know all types.
        value = tensor.detach().resolve_conj().resolve_neg().contiguous()
        with in_collective():
            dist.broadcast(value.view(-1).view(torch.uint8), src=0)
        if value.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(value)


def has_own_elements(tensor: Tensor) -> bool:
    """Return whether each element of the tensor has its own place in memory: False for sparse and expanded tensors."""
    return tensor.layout == torch.strided and all(
        stride > 0 or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def broadcast_object(value: Value) -> Value:
    """Return rank 0's value on all ranks. All ranks must call it. The value is pickled, so it should be small."""
    if not dist.is_initialized():
        return value
    values = [value]
    with in_collective():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def gather_objects(value: Value) -> list[Value]:
    """Return the values of all ranks, by rank. All ranks must call it.

    The values are pickled, so they should be small.
    """
    if not dist.is_initialized():
        return [value]
    values = [value] * world_size()
    with in_collective():
        dist.all_gather_object(values, value)
    return values
