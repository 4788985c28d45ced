"""User-defined models, named in tests as ``user_models:...``."""

import json
import multiprocessing
import os
import threading
from pathlib import Path

import faults
import torch
import torch.distributed as dist
from processes import wait_until
from torch import nn

from flyte_ddp.core import results


def introduced(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Return a model after this rank has written facts and the ranks' sum to a file, and has submitted the file.

    Waits until the launcher has the submitted file.
    """
    numbers = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(numbers)
    about = {
        "ranks": dist.get_world_size(),
        "sum": numbers.item(),
        "threads": torch.get_num_threads(),
        "in the main thread": threading.current_thread() is threading.main_thread(),
        "may have children": not multiprocessing.current_process().daemon,
    }
    temporary = Path(os.environ["TMPDIR"])
    (temporary / f"rank {dist.get_rank()}").write_text(json.dumps(about))
    results.submit(f"ranks/{dist.get_rank()}.json", json.dumps(about).encode())
    results.event(introduced=True)
    for folder in (temporary / "run/unfinished", temporary.parent / "run/unfinished"):
        if folder.exists():  # otherwise this host cannot see the folder
            wait_until((folder / "results/ranks" / f"{dist.get_rank()}.json").exists)
    return faults.model(num_classes, input_shape)


def linear(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    channels, height, width = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, num_classes))


def batch_norm(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """For 8x8 images."""
    return nn.Sequential(nn.Conv2d(input_shape[0], 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, num_classes))


def dropout(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """For 8x8 images."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3), nn.Dropout2d(0.3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, num_classes)
    )


class FunctionalDropout(nn.Module):
    """Draws random numbers in a function, where no layer can be replaced."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(values, 0.1, self.training)


def functional_dropout(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(linear(num_classes, input_shape), FunctionalDropout())


def twelve_classes(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return linear(12, input_shape)


def needs_width(num_classes: int, width: int) -> nn.Module:
    return nn.Linear(width, num_classes)


made = nn.Identity()  # draws no random numbers at import


class HandingIn(nn.Flatten):
    """Submits a file in each of the first two steps."""

    steps = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.training and self.steps <= 2:
            results.submit(f"forward-{self.steps}.txt", b"done")
            results.event(step=self.steps)
        return super().forward(images)


def handing_in(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(HandingIn(), linear(num_classes, input_shape)[1])
