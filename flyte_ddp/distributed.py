"""The process group as the rest of the library sees it; without one, the only process is rank 0 of 1."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVE_TIMEOUT = timedelta(minutes=10)

Value = TypeVar("Value")


def rank() -> int:
    """The rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """Adds up a tensor over all ranks, in place, and returns it. Its device must suit the backend."""
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def gather(numbers: Tensor) -> Tensor:
    """[n] of each rank to [ranks, n] on all; n is the same on all ranks."""
    of_ranks = numbers.new_zeros(world_size(), numbers.numel())
    of_ranks[rank()] = numbers
    return sum_over_ranks(of_ranks)


class StartedSum:
    """A sum over all ranks that goes on while the rank computes; the tensor is left as it is."""

    def __init__(self, values: Tensor) -> None:
        self._sum = values.clone()
        self._work = dist.all_reduce(self._sum, async_op=True) if dist.is_initialized() else None

    def arrived(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """The sum."""
        if self._work is not None:
            self._work.wait()
        return self._sum


def copy_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Overwrites tensors, in place, by those of rank 0; expanded ones, which cannot be written to, stay as they are."""
    for tensor in tensors:
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            continue
        # gloo takes memory for dense, whatever the strides say, and does not know all types: bytes it is.
        value = tensor.detach().contiguous()
        dist.broadcast(value.view(-1).view(torch.uint8), src=0)
        if value.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(value)


def from_rank_0(value: Value) -> Value:
    """What rank 0 calls this with; small, as it is pickled."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
