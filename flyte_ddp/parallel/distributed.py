"""Collectives over torch's process group, which all ranks must call; exceptions for failed ranks and devices.

A process without a group is rank 0 of 1, and waits for nobody. If another rank has ended, gloo raises a plain
RuntimeError, as user code may. So a RuntimeError is a collective's only if raised while the rank waits for one.
"""

import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flyte_ddp.errors import CollectiveError, CollectiveTimeoutError, MachineError
from flyte_ddp.parallel.hang_watch import in_collective

Value = TypeVar("Value")
TIMEOUT_SHARE = 0.9  # of the time limit; not 1, because gloo's clock starts a little earlier than ours
GROUP_TIMEOUT = timedelta()  # means "the process group's limit", and is the default of Work.wait
TORCH_WAIT = dist.Work.wait
NCCL_GRACE_SECONDS = 60.0
# What CUDA says of hardware and drivers, in torch's errors or NCCL's; of wrong code it says other things.
FAILED_DEVICE = re.compile(
    "(?:CUDA error|Cuda failure).*(?:unspecified launch failure|launch timed out|uncorrectable|hardware|unknown error"
    "|busy or unavailable|no CUDA-capable device).*"
    "|CUDA unknown error.*|CUDA driver initialization failed.*|No CUDA GPUs are available|system not yet initialized"
)
timeout_seconds = 600.0  # limit of this process for waits for other ranks; torch has a limit of its own


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def group_timeout(limit: float, *, on_gpu: bool) -> timedelta:
    """Return a group's time limit; NCCL's is longer, so that the hang watch reports before NCCL aborts the process."""
    return timedelta(seconds=limit + (NCCL_GRACE_SECONDS if on_gpu else 0.0))


def wait_for_all_ranks() -> None:
    if dist.is_initialized():
        with in_collective():
            dist.barrier()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Add up a tensor over all ranks, in place (CPU for gloo, GPU for NCCL); return it."""
    if dist.is_initialized():
        with in_collective():
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def gather_numbers(numbers: Tensor) -> Tensor:
    """Return all ranks' ``numbers``, [n], as [ranks, n]; n must be equal on all ranks."""
    of_ranks = numbers.new_zeros(world_size(), numbers.numel())
    of_ranks[rank()] = numbers
    return sum_over_ranks(of_ranks)


def copy_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Broadcast rank 0's tensors into those of all ranks, except sparse and expanded ones."""
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
    """Return rank 0's value. All ranks' values are pickled and sent: they should be small."""
    return gather_objects(value)[0]


def gather_objects(value: Value) -> list[Value]:
    if not dist.is_initialized():
        return [value]
    values = [value] * world_size()
    with in_collective():
        dist.all_gather_object(values, value)
    return values


@contextmanager
def hide_process_group() -> Iterator[None]:
    """Make torch.distributed look uninitialised in the block, so that torchmetrics on one rank waits for no other."""
    group, dist.group.WORLD = dist.group.WORLD, None
    try:
        yield
    finally:
        dist.group.WORLD = group


def patch_collective_wait() -> None:
    """Replace ``torch.distributed.Work.wait`` in this process by a wait that raises CollectiveError, not RuntimeError.

    torch's blocking functions call it, also in user code. Waits in C++, as in DistributedDataParallel, do not.
    """

    def wait(work: dist.Work, timeout: timedelta = GROUP_TIMEOUT) -> bool:
        with translate_collective_errors():
            return TORCH_WAIT(work, timeout)

    dist.Work.wait = wait  # type: ignore[assignment,method-assign]


@contextmanager
def translate_collective_errors(since: float | None = None) -> Iterator[None]:
    """Turn a RuntimeError of the block, which must only wait for other ranks, into a CollectiveError.

    After 90 % of ``timeout_seconds`` since the time ``since`` (monotonic; None: now) it is a CollectiveTimeoutError.
    """
    begin = time.monotonic() if since is None else since
    try:
        yield
    except (CollectiveError, torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # the last two are of this rank's own device
    except RuntimeError as error:
        if time.monotonic() - begin >= TIMEOUT_SHARE * timeout_seconds:
            raise CollectiveTimeoutError(f"other ranks did not come within {timeout_seconds:g} s: {error}") from error
        raise CollectiveError(str(error)) from error


@contextmanager
def explain_failed_device(device: str) -> Iterator[None]:
    """Raise MachineError, which names device and host, for a RuntimeError in the block that says the device failed."""
    try:
        yield
    except RuntimeError as error:
        if (found := FAILED_DEVICE.search(str(error))) is None:
            raise
        raise MachineError(
            f"{device} of host {socket.gethostname()} failed: {found[0]}; a process cannot use it again, so start the "
            "run again, on another host if the error returns (the kernel's log there has NVIDIA's number, Xid)"
        ) from error


@contextmanager
def explain_full_device(fix: str) -> Iterator[None]:
    """Add the ``fix`` to torch's error for a lack of device memory in the block, in place of torch's advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        figures = str(error).partition(". If reserved")[0]
        raise torch.OutOfMemoryError(f"{figures}; {fix}") from error
