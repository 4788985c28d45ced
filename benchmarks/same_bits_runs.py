"""Train configurations in turn, and print the SHA-256 of each model and the metrics records.

This script is copied by same_bits.py into a folder, beside the library to use and zygote.py of tests/helpers, and runs
there. Configurations also load a user-defined model from this file.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import zygote
from torch import Tensor, nn

import flyte_ddp
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch
from flyte_ddp.run import run_training

HERE = Path(__file__).resolve().parent


class OwnModel(nn.Module):
    """A model with layers on which ranks must agree: BatchNorm, dropout, and a buffer changed by forward passes."""

    level: Tensor

    def __init__(self, num_classes: int, input_shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.register_buffer("level", torch.zeros(()))
        self.conv = nn.Conv2d(channels, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8 * height * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, classes]. In training also moves ``level`` towards the mean of the images."""
        if self.training:
            self.level.lerp_(images.mean(), 0.1)
        hidden = torch.relu(self.norm(self.conv(images - self.level)))
        logits: Tensor = self.head(self.dropout(hidden).flatten(1))
        return logits


def train_configuration(hyperparameters: dict[str, Any], run: Path) -> dict[str, Any]:
    """Train with a single thread per rank, and return the outcome.

    The outcome has the SHA-256 ``model`` and the ``records`` of the metrics, or the ``error``. Writes the run to the
    folder ``run``, and prepared data beside this folder.
    """
    try:
        hp = Hyperparameters(**hyperparameters)
        data = fetch(hp.dataset, "", run.with_name(f"{run.name}-data"), progress="off")
        result = run_training(hp, data, run, threads=1)
    except Exception as error:  # of this configuration; the others are trained all the same
        return {"error": f"{type(error).__name__}: {error}"}
    records = [json.loads(line) for line in result.metrics.read_text().splitlines()]
    return {"model": hashlib.sha256(result.model.read_bytes()).hexdigest(), "records": records}


def main(request: str) -> None:
    """Train each configuration of the request, a JSON list, and print its outcome as a line of JSON on stdout.

    What libraries print to stdout goes to stderr. Starts a process for ranks to be forks of: each would import seconds
    of torch and torchvision. Raises RuntimeError if the library is not the one beside this script.
    """
    if not Path(flyte_ddp.__file__).is_relative_to(HERE):
        raise RuntimeError(f"{flyte_ddp.__file__} was imported, not the library in {HERE}")
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # gloo prints to stdout
    with zygote.used():
        for number, hyperparameters in enumerate(json.loads(request)):
            print(json.dumps(train_configuration(hyperparameters, HERE / f"run-{number}")), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
