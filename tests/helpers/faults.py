"""Faults for ranks: the model ``faults:model`` fails at the point that the environment names.

The variable ``FAULTS`` is JSON with ``rank``, ``at`` (import, data, training, evaluation, checkpoint or results),
``pass`` (how often the point is passed before), ``kind`` and ``marker``. The fault creates the file ``marker``. If the
file exists, a run does not fail again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from flyte_ddp.core import results

if TYPE_CHECKING:
    import pytest  # takes half a second

FAULT: dict[str, Any] = json.loads(os.environ.get("FAULTS", "{}"))


def inject(monkeypatch: pytest.MonkeyPatch, marker: Path, **fault: Any) -> None:
    """Make the next run fail, by a variable in the environment of the ranks."""
    monkeypatch.setenv("FAULTS", json.dumps({"pass": 0, "marker": str(marker), **fault}))


def hang() -> None:
    """Hang in Python code."""
    while True:
        time.sleep(0.01)


def hang_in_c() -> None:
    """Hang in a C call that holds the interpreter's lock, which stops all Python code of this process."""
    import ctypes

    ctypes.PyDLL(None).pause()


def fail() -> None:
    raise ArithmeticError("the rank's own words")


def fail_like_a_hang() -> None:
    """Raise an error with gloo's words that no other rank has caused."""
    raise RuntimeError("label service timed out: Connection closed by peer")


def own_asynchronous_collective() -> None:
    """Fail in an asynchronous collective, whose traceback shows no function of torch.distributed."""
    dist.all_reduce(torch.ones(1), async_op=True).wait()


def hand_in_to_a_slow_folder() -> None:
    """Submit a file to a folder that takes longer than any test."""
    results.replace_file = lambda *_, **__: time.sleep(1000)
    results.submit("slow", b"1")


ASYNCHRONOUS = "\nCUDA kernel errors might be asynchronously reported at some other API call."  # torch's words
DEVICE_ERRORS = {
    "lost device": torch.AcceleratorError(f"CUDA error: unspecified launch failure{ASYNCHRONOUS}"),
    "failed assertion": torch.AcceleratorError(f"CUDA error: device-side assert triggered{ASYNCHRONOUS}"),
    "full device": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is "
        "free. Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the allocated memory 76.10 "
        "GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management"
    ),
}


def fail_on_device() -> None:
    """Raise torch's error of a failed forward pass on a GPU."""
    raise DEVICE_ERRORS[FAULT["kind"]]


KINDS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sys.exit": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(0),
    "slow result": hand_in_to_a_slow_folder,
    "ArithmeticError": fail,
    "slow": lambda: time.sleep(1.0),
    "RuntimeError": fail_like_a_hang,
    "own asynchronous collective": own_asynchronous_collective,
    "hang": hang,
    "hang in C": hang_in_c,
    **dict.fromkeys(DEVICE_ERRORS, fail_on_device),
}
passed: dict[str, int] = {}


def passing(point: str) -> None:
    """Fail if the fault belongs to this rank, this point and this pass."""
    if FAULT.get("at") != point or FAULT["rank"] != (dist.get_rank() if dist.is_initialized() else 0):
        return
    passed[point] = passed.get(point, -1) + 1
    marker = Path(FAULT["marker"])
    if passed[point] == FAULT["pass"] and not marker.exists():
        marker.write_text(str(time.time()))
        KINDS[FAULT["kind"]]()


def before(owner: Any, name: str, point: str) -> None:
    """Make each call of a function of the library pass a point first."""
    function = getattr(owner, name)

    def with_point(*args: Any, **kwargs: Any) -> Any:
        passing(point)
        return function(*args, **kwargs)

    setattr(owner, name, with_point)


class OneLayer(nn.Module):
    """A layer from 8x8 grey pixels to 10 classes. Passes points before forward passes."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: Any) -> Any:
        passing("training" if self.training else "evaluation")
        return self.head(images.flatten(1))


class Passing(nn.Sequential):
    """Passes points before forward passes."""

    def forward(self, images: Any) -> Any:
        passing("training" if self.training else "evaluation")
        return super().forward(images)


def model(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Return a model for 8x8 images with BatchNorm and dropout."""
    convolution = (nn.Conv2d(input_shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    return Passing(*convolution, nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, num_classes))


if FAULT and dist.is_initialized():  # in a rank
    from flyte_ddp.core.loading.split import Split
    from flyte_ddp.core.models import saving
    from flyte_ddp.core.runs import checkpoint

    passing("import")
    before(Split, "load_batch", "data")
    before(checkpoint, "write_checkpoint", "checkpoint")
    before(saving, "save_model", "results")
