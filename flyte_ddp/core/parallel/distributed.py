"""Collectives over torch's process group, and exceptions for failed ranks and devices.

All ranks must call a collective. A process without a group is rank 0 of 1, and does not wait. If another rank has
ended, gloo raises a plain RuntimeError. User code may raise a RuntimeError, too. Therefore a RuntimeError counts as a
collective's error only if raised while the rank waits in a collective.
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

from flyte_ddp.core.errors import CollectiveError, CollectiveTimeoutError, MachineError
from flyte_ddp.core.parallel.hang_watch import in_collective

Value = TypeVar("Value")
TIMEOUT_SHARE = 0.9  # of the time limit; not 1, because gloo's clock starts a little earlier than ours
GROUP_TIMEOUT = timedelta()  # means "the process group's limit", and is the default of Work.wait
TORCH_WAIT = dist.Work.wait
NCCL_GRACE_SECONDS = 60.0
# CUDA's messages about hardware and drivers, in errors of torch or NCCL. Wrong code causes other messages.
FAILED_DEVICE = re.compile(
    "(?:CUDA error|Cuda failure).*(?:unspecified launch failure|launch timed out|uncorrectable|hardware|unknown error"
    "|busy or unavailable|no CUDA-capable device).*"
    "|CUDA unknown error.*|CUDA driver initialization failed.*|No CUDA GPUs are available|system not yet initialized"
)
timeout_seconds = 600.0  # limit of this process for waits for other ranks; torch has a separate limit


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def choose_group_timeout(limit: float, *, on_gpu: bool) -> timedelta:
    """Return the time limit for a process group: ``limit`` seconds on CPUs, and 60 s more on GPUs.

    Thus the hang watch reports before NCCL aborts the process.
    """
    return timedelta(seconds=limit + (NCCL_GRACE_SECONDS if on_gpu else 0.0))


def wait_for_all_ranks() -> None:
    """Wait until all ranks call this function. Collective. Returns at once without a process group."""
    if dist.is_initialized():
        with in_collective():
            dist.barrier()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Add up a tensor over all ranks, in place, and return the tensor. Collective.

    The tensor must be on the CPU for gloo, and on the GPU for NCCL. Without a process group, the tensor is unchanged.
    """
    if dist.is_initialized():
        with in_collective():
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def gather_numbers(numbers: Tensor) -> Tensor:
    """Return all ranks' ``numbers`` as a tensor [ranks, n]. Collective. All ranks must pass equally many."""
    of_ranks = numbers.new_zeros(world_size(), numbers.numel())
    of_ranks[rank()] = numbers
    return sum_over_ranks(of_ranks)


def copy_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Overwrite all ranks' tensors with rank 0's values. Collective.

    Number, shapes and types of the tensors must be equal on all ranks. Sparse and expanded tensors are skipped. A
    process group must exist.
    """
    for tensor in filter(has_separate_elements, tensors):
        # Sent as the bytes of a dense copy, because gloo ignores strides and does not know all types.
        value = tensor.detach().resolve_conj().resolve_neg().contiguous()
        with in_collective():
            dist.broadcast(value.view(-1).view(torch.uint8), src=0)
        if value.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(value)


def has_separate_elements(tensor: Tensor) -> bool:
    """Return whether a tensor is neither sparse nor expanded (stride 0). Other overlaps in memory are not detected."""
    return tensor.layout == torch.strided and all(
        stride > 0 or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def broadcast_object(value: Value) -> Value:
    """Return rank 0's value on all ranks. Collective.

    All ranks' values are pickled and sent, so values should be small. Without a process group, returns ``value``.
    """
    return gather_objects(value)[0]


def gather_objects(value: Value) -> list[Value]:
    """Return the list of all ranks' values, in the order of the ranks. Collective.

    Values are pickled. Without a process group, the list has only ``value``.
    """
    if not dist.is_initialized():
        return [value]
    values = [value] * world_size()
    with in_collective():
        dist.all_gather_object(values, value)
    return values


@contextmanager
def hide_process_group() -> Iterator[None]:
    """Make torch.distributed look uninitialised during the block, in all threads of this process.

    For example, torchmetrics then computes on one rank without waiting for other ranks. The block must call no
    collective.
    """
    group, dist.group.WORLD = dist.group.WORLD, None
    try:
        yield
    finally:
        dist.group.WORLD = group


def make_waits_raise_collective_errors() -> None:
    """Make ``torch.distributed.Work.wait`` in this process raise CollectiveError in place of RuntimeError, from now on.

    If the wait lasted ``distributed.timeout_seconds``, the error is a CollectiveTimeoutError. The change also affects
    torch's blocking collectives, and user code. Waits in C++, as in DistributedDataParallel, do not change.
    """

    def wait(work: dist.Work, timeout: timedelta = GROUP_TIMEOUT) -> bool:
        with translate_collective_errors():
            return TORCH_WAIT(work, timeout)

    dist.Work.wait = wait  # type: ignore[assignment,method-assign]


@contextmanager
def translate_collective_errors(since: float | None = None) -> Iterator[None]:
    """Turn a RuntimeError of the block into a CollectiveError. The block must only wait for other ranks.

    Errors of this rank's device (torch.AcceleratorError, torch.OutOfMemoryError) are raised unchanged.

    Args:
        since: The time when the wait began, of ``time.monotonic()``. None means the start of the block.

    Raises:
        CollectiveTimeoutError: The block failed after 90 % or more of ``timeout_seconds``.
        CollectiveError: The block failed earlier.
    """
    begin = time.monotonic() if since is None else since
    try:
        yield
    except (CollectiveError, torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # the last two are of this rank's own device
    except RuntimeError as error:
        if time.monotonic() - begin >= TIMEOUT_SHARE * timeout_seconds:
            raise CollectiveTimeoutError(
                f"other ranks did not reach the collective operation within {timeout_seconds:g} s: {error}"
            ) from error
        raise CollectiveError(str(error)) from error


@contextmanager
def translate_device_errors(device: str) -> Iterator[None]:
    """Turn a RuntimeError of the block into a MachineError, if CUDA's message says that the device has failed.

    The MachineError names ``device`` and the host. Other errors are raised unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        if (found := FAILED_DEVICE.search(str(error))) is None:
            raise
        raise MachineError(
            f"{device} of host {socket.gethostname()} failed: {found[0]}; the process cannot use the device again; "
            "restart the run, on another host if the error returns (the kernel log of this host has NVIDIA's error "
            "number, Xid)"
        ) from error


@contextmanager
def explain_out_of_memory(fix: str) -> Iterator[None]:
    """Replace torch's advice by ``fix`` in a torch.OutOfMemoryError of the block. Other errors are not changed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        figures = str(error).partition(". If reserved")[0]
        raise torch.OutOfMemoryError(f"{figures}; {fix}") from error
