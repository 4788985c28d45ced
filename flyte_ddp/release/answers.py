"""A saved model, evaluated on a test split."""

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

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
    """Scores of the probabilities of N samples: [N] each."""

    confidence: NDArray[np.float64]  # the probability of the prediction
    nll: NDArray[np.float64]  # the negative log-likelihood of the label, in nats
    brier: NDArray[np.float64]  # from 0 to 2; Brier, Monthly Weather Review 78 (1950)


@dataclass
class Answers:
    """What is kept of the logits [N, C] of N samples, which would fill memory with thousands of classes."""

    predictions: NDArray[np.int64]  # [N]
    labels: NDArray[np.int64]  # [N]
    finite: NDArray[np.bool_]  # [N] whether all logits of a sample are numbers
    scores: Scores
    spread: float  # the largest of all logits minus the smallest
    ids: Sequence[str] = field(default_factory=list)  # of the N samples
    undecoded: Sequence[str] = field(default_factory=list)  # ids of other samples, which cannot be decoded

    @classmethod
    def from_batches(cls, batches: Iterable[tuple[Tensor, Tensor]]) -> Self:
        """Return the answers of at least one batch, without ids.

        Args:
            batches: logits [n, C] and labels [n], on the CPU.
        """
        columns, lowest, highest = [], math.inf, -math.inf
        for logits, labels in batches:
            logs = torch.log_softmax(logits, dim=1, dtype=torch.float64)
            of_label, confidence = logs.gather(1, labels[:, None])[:, 0], logs.max(dim=1).values.exp()
            brier = logs.exp_().square_().sum(dim=1) - 2 * of_label.exp() + 1
            scores_of_batch = confidence, -of_label, brier
            columns.append([logits.argmax(dim=1), labels, logits.isfinite().all(dim=1), *scores_of_batch])
            lowest, highest = min(lowest, logits.min().item()), max(highest, logits.max().item())
        predictions, truth, finite, *scores = (torch.cat(each).numpy() for each in zip(*columns, strict=True))
        return cls(predictions, truth, finite, Scores(*scores), highest - lowest)

    @cached_property
    def correct(self) -> NDArray[np.bool_]:
        """Whether the prediction is the label: [N]."""
        return np.asarray(self.predictions == self.labels)

    @property
    def accuracy(self) -> float:
        """Share of correct predictions, from 0 to 1."""
        return float(self.correct.mean())


class Model:
    """A saved model, loaded in evaluation mode to the GPU if there is one.

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
        """Return channels, height and width of the input, such as 3 x 224 x 224."""
        spec = artifacts.input_spec(self.sidecar)
        return f"{spec.channels} x {spec.height} x {spec.width}"

    def batches(self, data: PreparedSet, batch_size: int = BATCH_SIZE) -> Generator[Batch, None, None]:
        """Yield the test split, prepared for this model."""
        allowed = BadSamples(self.bad_samples)
        request = Request(artifacts.input_spec(self.sidecar), batch_size, self.device, allowed)
        return split_batches(data, request, classes=self.classes, settings=self.settings)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits [n, C] of inputs [n, channels, height, width]."""
        with torch.no_grad():
            found: Tensor = self.module(inputs).float()
        return found

    def answers(self, data: PreparedSet) -> Answers:
        """Return the answers on all samples of the test split that can be decoded.

        Raises:
            UserError: the split has a class that the model does not know, images that it does not take, or none.
        """
        places = {name: place for place, name in enumerate(self.classes)}
        ids, undecoded = list[str](), list[str]()

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for batch in self.batches(data):
                labels = []
                for name, truth, decoded in zip(batch.ids, batch.truths or (), batch.decoded, strict=True):
                    (ids if decoded else undecoded).append(name)
                    if decoded and truth not in places:
                        known = ", ".join(self.classes[:6])
                        said = f"the model knows {known}; give data with its classes"
                        raise UserError(f"class {truth!r} of the test split: {said}")
                    if decoded:
                        labels.append(places[truth])
                if labels:
                    yield self.logits(batch.inputs).cpu(), torch.tensor(labels)
            if not ids:
                raise UserError("the test split has no image that can be decoded; repair it")

        found = Answers.from_batches(batches())
        found.ids, found.undecoded = ids, undecoded
        return found

    def rows(self, data: PreparedSet) -> Iterator[NDArray[np.float32]]:
        """Yield the logits [C] of each sample that can be decoded, computed anew, in the order of :meth:`answers`."""
        for batch in self.batches(data):
            if len(batch.inputs):
                yield from self.logits(batch.inputs).cpu().numpy()
