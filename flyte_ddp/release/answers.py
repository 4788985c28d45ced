"""What a model answers on a test split."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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


class Scores(NamedTuple):
    """What the probabilities of N samples come to: [N] each."""

    confidence: NDArray[np.float64]  # the probability of the prediction
    nll: NDArray[np.float64]  # the negative log-likelihood of the label, in nats
    brier: NDArray[np.float64]  # from 0 to 2; Brier, Monthly Weather Review 78 (1950)


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
    def scores(self) -> Scores:
        """In double precision, of so many samples at a time that thousands of classes do not fill the memory."""
        parts = []
        for start in range(0, len(self.labels), BATCH_SIZE):
            logits = torch.from_numpy(self.logits[start : start + BATCH_SIZE]).double()
            labels = torch.from_numpy(self.labels[start : start + BATCH_SIZE])[:, None]
            logs = torch.log_softmax(logits, dim=1)
            of_label = logs.gather(1, labels)[:, 0]
            brier = logs.exp().square().sum(dim=1) - 2 * of_label.exp() + 1
            parts.append(torch.stack((logs.max(dim=1).values.exp(), -of_label, brier)))
        return Scores(*torch.cat(parts, dim=1).numpy())


class Model:
    """A saved model, ready to be asked.

    Args:
        weights: ``model.pt``.
        sidecar: ``model.json``.
        settings: for shards: where they are cached, and how many threads decode.
        bad_samples: how many images may be undecodable; by default as many as in its training.

    Raises:
        UserError: its files are missing, damaged, or do not belong together.

    """

    def __init__(self, weights: Path, sidecar: Path, settings: Settings, bad_samples: int | None = None) -> None:
        self.files = weights, sidecar
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module: nn.Module
        self.sidecar: dict[str, Any]
        self.module, self.sidecar = artifacts.load_model(weights, sidecar, self.device)
        self.settings = settings
        self.bytes = weights.stat().st_size
        self.digest = str(self.sidecar["digests"]["weights"])
        self.classes = [str(name) for name in self.sidecar["classes"]]
        trained_with = int(self.sidecar.get("hyperparameters", {}).get("bad_samples", 0))
        self.bad_samples = trained_with if bad_samples is None else bad_samples

    def takes(self) -> str:
        """Channels, height and width of its input, such as 3 x 224 x 224."""
        spec = artifacts.input_spec(self.sidecar)
        return f"{spec.channels} x {spec.height} x {spec.width}"

    def batches(self, data: PreparedSet, batch_size: int = BATCH_SIZE) -> Generator[Batch, None, None]:
        """The test split, as this model takes it."""
        allowed = BadSamples(self.bad_samples)
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
