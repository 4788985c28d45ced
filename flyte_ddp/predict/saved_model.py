"""A saved model: its files, its input, and its logits."""

from pathlib import Path

import torch
from torch import Tensor

from flyte_ddp.models import artifacts
from flyte_ddp.settings import Settings


class SavedModel:
    """``model.pt`` and ``model.json`` of one run, loaded in evaluation mode to the GPU if there is one.

    ``settings`` say for the images of a data set where shards are cached, and how many threads decode. ``bad_samples``
    is how many images may be impossible to decode; None: as many as the model's training allowed. Runs the code that
    the sidecar names. Raises UserError if a file is missing or damaged, or the two do not belong together.
    """

    def __init__(self, weights: Path, sidecar: Path, settings: Settings, bad_samples: int | None = None) -> None:
        self.files = weights, sidecar
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module, self.sidecar = artifacts.load_model(weights, sidecar, self.device)
        self.settings = settings
        self.bytes = weights.stat().st_size
        self.digest = str(self.sidecar["digests"]["weights"])  # SHA-256 of model.pt
        self.classes = [str(name) for name in self.sidecar["classes"]]
        self.spec = artifacts.parse_input_spec(self.sidecar)
        trained_with = int(self.sidecar.get("hyperparameters", {}).get("bad_samples", 0))
        self.bad_samples = trained_with if bad_samples is None else bad_samples

    def describe_input(self) -> str:
        """Return channels, height and width of the input, such as 3 x 224 x 224."""
        return f"{self.spec.channels} x {self.spec.height} x {self.spec.width}"

    def compute_logits(self, inputs: Tensor) -> Tensor:
        """Run the model without gradients on inputs [n, C, H, W] on its device; return logits float32 [n, classes]."""
        if not len(inputs):
            return torch.empty(0, len(self.classes))
        with torch.no_grad():
            logits: Tensor = self.module(inputs).float()
        return logits
