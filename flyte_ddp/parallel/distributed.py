"""The process group as the rest of the library sees it; without one, the only process is rank 0 of 1."""

from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flyte_ddp.parallel.hang_watch import in_collective

Value = TypeVar("Value")
_timeout = 600.0


def set_timeout(limit: float) -> None:
    """Set, for this process, how many seconds the rank waits for others outside torch's own collectives."""
    global _timeout  # noqa: PLW0603 (a property of the process, as the process group is)
    _timeout = limit


def timeout() -> float:
    """Return how many seconds this rank waits for others."""
    return _timeout


def seconds(number: float) -> timedelta:
    """Return so many seconds as a timedelta, which torch takes."""
    return timedelta(seconds=number)


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def wait_for_all_ranks() -> None:
    """Return when all ranks have called it; without a process group, at once."""
    if dist.is_initialized():
        with in_collective():
            dist.barrier()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Add up a tensor over all ranks, in place, and return it. Its device must suit the backend."""
    if dist.is_initialized():
        with in_collective():
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def gather(numbers: Tensor) -> Tensor:
    """Return the [n] of all ranks as [ranks, n]; n is the same on all ranks."""
    of_ranks = numbers.new_zeros(world_size(), numbers.numel())
    of_ranks[rank()] = numbers
    return sum_over_ranks(of_ranks)


def copy_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors in place by those of rank 0, but for sparse and expanded ones; all ranks call it together."""
    for tensor in filter(has_own_elements, tensors):
        # As bytes in a dense copy: gloo ignores strides, and does not know all types.
        value = tensor.detach().resolve_conj().resolve_neg().contiguous()
        with in_collective():
            dist.broadcast(value.view(-1).view(torch.uint8), src=0)
        if value.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(value)


def has_own_elements(tensor: Tensor) -> bool:
    """Return whether each element of the tensor has a place of its own in memory: not so if sparse or expanded."""
    return tensor.layout == torch.strided and all(
        stride > 0 or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def from_rank_0(value: Value) -> Value:
    """Return rank 0's value, pickled and so small, on all ranks; they call it together."""
    if not dist.is_initialized():
        return value
    values = [value]
    with in_collective():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def objects_of_all_ranks(value: Value) -> list[Value]:
    """Return each rank's value, pickled and so small, in the order of the ranks; they call it together."""
    if not dist.is_initialized():
        return [value]
    values = [value] * world_size()
    with in_collective():
        dist.all_gather_object(values, value)
    return values
