"""A saved model: its files, its input, and its logits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.models import artifacts
from flyte_ddp.settings import Settings


class SavedModel:
    """A saved model, loaded in evaluation mode to the GPU if there is one.

    Args:
        weights: ``model.pt``.
        sidecar: ``model.json`` of the same run.
        settings: for the images that it is given: where shards are cached, and how many threads decode.
        bad_samples: how many images may be impossible to decode; None: as many as in the model's training.

    Raises:
        UserError: a file is missing or damaged, or the two do not belong together.
    """

    def __init__(self, weights: Path, sidecar: Path, settings: Settings, bad_samples: int | None = None) -> None:
        self.files = weights, sidecar
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module: nn.Module
        self.sidecar: dict[str, Any]
        self.module, self.sidecar = artifacts.load_model(weights, sidecar, self.device)
        self.settings = settings
        self.bytes = weights.stat().st_size
        self.digest = str(self.sidecar["digests"]["weights"])  # SHA-256 of model.pt
        self.classes = [str(name) for name in self.sidecar["classes"]]
        self.spec = artifacts.input_spec(self.sidecar)
        trained_with = int(self.sidecar.get("hyperparameters", {}).get("bad_samples", 0))
        self.bad_samples = trained_with if bad_samples is None else bad_samples

    def describe_input(self) -> str:
        """Return channels, height and width of the input, such as 3 x 224 x 224."""
        return f"{self.spec.channels} x {self.spec.height} x {self.spec.width}"

    def compute_logits(self, inputs: Tensor) -> Tensor:
        """Return the logits float32 [n, classes] of inputs [n, channels, height, width]; n may be 0."""
        if not len(inputs):
            return torch.empty(0, len(self.classes))
        with torch.no_grad():
            found: Tensor = self.module(inputs).float()
        return found
