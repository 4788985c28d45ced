"""What a model answers on a test split."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flyte_ddp.datasets.prepared import PreparedSet
from flyte_ddp.errors import UserError
from flyte_ddp.loading.encoded import BadSamples
from flyte_ddp.models import artifacts
from flyte_ddp.predict.prediction_batches import Batch, Request, split_batches
from flyte_ddp.settings import Settings

BATCH_SIZE = 500


@dataclass
class Answers:
    """Of N samples of a test split and C classes."""

    logits: NDArray[np.float32]  # [N, C]
    labels: NDArray[np.int64]  # [N]
    ids: Sequence[str] = field(default_factory=list)  # of the N samples
    undecoded: Sequence[str] = field(default_factory=list)  # ids of other samples, which cannot be decoded

    @cached_property
    def predictions(self) -> NDArray[np.int64]:
        """[N]."""
        return np.asarray(self.logits.argmax(axis=1), dtype=np.int64)

    @cached_property
    def correct(self) -> NDArray[np.bool_]:
        """[N]."""
        return np.asarray(self.predictions == self.labels)

    @property
    def accuracy(self) -> float:
        """From 0 to 1."""
        return float(self.correct.mean())

    @cached_property
    def log_probabilities(self) -> NDArray[np.float64]:
        """[N, C]."""
        return torch.log_softmax(torch.from_numpy(self.logits).double(), dim=1).numpy()

    @cached_property
    def nll(self) -> NDArray[np.float64]:
        """The negative log-likelihood of each sample, in nats: [N]."""
        return -self.log_probabilities[np.arange(len(self.labels)), self.labels]

    @cached_property
    def brier(self) -> NDArray[np.float64]:
        """The Brier score of each sample, from 0 to 2: [N]. Brier, Monthly Weather Review 78 (1950)."""
        probabilities = np.exp(self.log_probabilities)
        of_label = probabilities[np.arange(len(self.labels)), self.labels]
        return np.asarray((probabilities**2).sum(axis=1) - 2 * of_label + 1)

    def confusion(self) -> NDArray[np.int64]:
        """[C, C], the label first."""
        classes = self.logits.shape[1]
        return np.bincount(self.labels * classes + self.predictions, minlength=classes**2).reshape(classes, classes)


class Model:
    """A saved model, ready to be asked.

    Raises:
        UserError: its files are missing, damaged, or do not belong together.

    """

    def __init__(self, weights: Path, sidecar: Path, settings: Settings) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module: nn.Module
        self.sidecar: dict[str, Any]
        self.module, self.sidecar = artifacts.load_model(weights, sidecar, self.device)
        self.settings = settings
        self.bytes = weights.stat().st_size
        self.digest = str(self.sidecar["digests"]["weights"])
        self.classes = [str(name) for name in self.sidecar["classes"]]

    def takes(self) -> str:
        """Channels, height and width of its input, such as 3 x 224 x 224."""
        spec = artifacts.input_spec(self.sidecar)
        return f"{spec.channels} x {spec.height} x {spec.width}"

    def batches(self, data: PreparedSet, batch_size: int = BATCH_SIZE) -> Generator[Batch, None, None]:
        """The test split, as this model takes it; so many images may be undecodable as in its training."""
        allowed = BadSamples(self.sidecar.get("hyperparameters", {}).get("bad_samples", 0))
        request = Request(artifacts.input_spec(self.sidecar), batch_size, self.device, allowed)
        return split_batches(data, request, classes=self.classes, settings=self.settings)

    def logits(self, inputs: Tensor) -> Tensor:
        """[n, C] of inputs [n, channels, height, width]."""
        with torch.no_grad():
            found: Tensor = self.module(inputs).float()
        return found

    def answers(self, data: PreparedSet) -> Answers:
        """On all samples of the test split that can be decoded.

        Raises:
            UserError: the data set has a class that the model does not know, or images that it does not take.
        """
        places = {name: place for place, name in enumerate(self.classes)}
        logits, labels, ids, undecoded = [], [], list[str](), list[str]()
        for batch in self.batches(data):
            if len(batch.inputs):  # no model is asked about no image at all
                logits.append(self.logits(batch.inputs).cpu().numpy())
            for name, truth, decoded in zip(batch.ids, batch.truths or (), batch.decoded, strict=True):
                (ids if decoded else undecoded).append(name)
                if decoded:
                    labels.append(place_of(truth, places))
        if not logits:
            raise UserError("the test split has no image that can be decoded; repair it")
        return Answers(np.concatenate(logits), np.array(labels, dtype=np.int64), ids, undecoded)


def place_of(truth: str, places: Mapping[str, int]) -> int:
    """The number of a class in the model."""
    if truth not in places:
        known = ", ".join([*places][:6])
        raise UserError(f"class {truth!r} of the test split: the model knows {known}; give data with its classes")
    return places[truth]
