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


class StartedSum:
    """A sum over all ranks that goes on while the rank computes; the tensor is left as it is."""

    def __init__(self, values: Tensor) -> None:
        self._sum = values.clone()
        self._work = dist.all_reduce(self._sum, async_op=True) if dist.is_initialized() else None

    def wait(self) -> Tensor:
        """The sum."""
        if self._work is not None:
            self._work.wait()
        return self._sum


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank; every rank gets the same answer."""
    return bool(sum_over_ranks(torch.tensor([int(flag)], device=device)).item())


def copy_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Overwrites tensors, in place, by those of rank 0."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


def average_over_ranks(tensors: Iterable[Tensor]) -> None:
    """Replaces floating-point tensors, in place, by their mean over the ranks."""
    for tensor in tensors:
        if tensor.is_floating_point():
            sum_over_ranks(tensor.detach()).div_(world_size())


def from_rank_0(value: Value) -> Value:
    """What rank 0 calls this with; small, as it is pickled."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
