"""Errors of a device that has failed, and of one whose memory is too small, in words that say what to do."""

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from flyte_ddp.errors import MachineError

# What CUDA says of hardware and drivers, in torch's errors or NCCL's; of wrong code it says other things.
FAILED = re.compile(
    "(?:CUDA error|Cuda failure).*(?:unspecified launch failure|launch timed out|uncorrectable|hardware|unknown error"
    "|busy or unavailable|no CUDA-capable device).*"
    "|CUDA unknown error.*|CUDA driver initialization failed.*|No CUDA GPUs are available|system not yet initialized"
)
NO_MEMORY = re.compile("(?:CUDA|Cuda).*out of memory|CUBLAS_STATUS_ALLOC_FAILED")  # also in NCCL's errors


@contextmanager
def explain_failed_device(device: str) -> Iterator[None]:
    """Raise MachineError, which names device and host, for an error in the block by which the device has failed."""
    try:
        yield
    except RuntimeError as error:
        if (found := FAILED.search(str(error))) is None:
            raise
        raise MachineError(
            f"{device} of host {socket.gethostname()} failed: {found[0]}; a process cannot use it again, so start the "
            "run again, on another host if the error returns (the kernel's log there has NVIDIA's number, Xid)"
        ) from error


@contextmanager
def explain_device_memory(describe: Callable[[], str], fix: str) -> Iterator[None]:
    """Add to an error for lack of device memory what was computed in the block, by ``describe``, and the ``fix``."""
    try:
        yield
    except RuntimeError as error:
        if NO_MEMORY.search(str(error)) is None:
            raise
        figures = re.split(r"\.? If reserved|\n", str(error))[0]  # without torch's advice
        raise torch.OutOfMemoryError(f"{figures}; it was {describe()}; {fix}") from error
