"""How a saved model does on a test split: predictions and scores of each sample."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import compress
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.datasets.prepared import PreparedSet
from flyte_ddp.errors import UserError
from flyte_ddp.predict.prediction_batches import SavedModel, read_test_split


@dataclass
class Evaluation:
    """A model's predictions and scores on N samples: arrays [N].

    The logits [N, classes] are not kept: with thousands of classes they would fill the memory.
    """

    predictions: NDArray[np.int64]
    labels: NDArray[np.int64]
    finite: NDArray[np.bool_]  # whether all logits of a sample are numbers
    confidence: NDArray[np.float64]  # the probability of the prediction
    nll: NDArray[np.float64]  # the negative log-likelihood of the label, in nats
    brier: NDArray[np.float64]  # from 0 to 2; Brier, Monthly Weather Review 78 (1950)
    _: KW_ONLY
    spread: float  # the largest of all logits minus the smallest
    ids: Sequence[str] = ()  # of the N samples
    undecoded: Sequence[str] = ()  # ids of the samples that cannot be decoded: not among the N

    @classmethod
    def from_batches(cls, batches: Iterable[tuple[Tensor, Tensor]]) -> Self:
        """Return the evaluation of one or more batches of logits [n, classes] and labels [n] on the CPU; no ``ids``."""
        columns, lowest, highest = [], math.inf, -math.inf
        for logits, labels in batches:
            logs = torch.log_softmax(logits, dim=1, dtype=torch.float64)
            of_label, confidence = logs.gather(1, labels[:, None])[:, 0], logs.max(dim=1).values.exp()
            brier = logs.exp_().square_().sum(dim=1) - 2 * of_label.exp() + 1
            finite = logits.isfinite().all(dim=1)
            columns.append([logits.argmax(dim=1), labels, finite, confidence, -of_label, brier])
            lowest, highest = min(lowest, logits.min().item()), max(highest, logits.max().item())
        arrays = [torch.cat(each).numpy() for each in zip(*columns, strict=True)]
        return cls(*arrays, spread=highest - lowest)

    @cached_property
    def correct(self) -> NDArray[np.bool_]:
        """Whether each prediction is the label: [N]."""
        return np.asarray(self.predictions == self.labels)

    @property
    def accuracy(self) -> float:
        """Share of correct predictions, from 0 to 1."""
        return float(self.correct.mean())


def evaluate_split(model: SavedModel, data: PreparedSet) -> Evaluation:
    """Read a data set's test split, and return the model's evaluation on those of its samples that can be decoded.

    Downloads remote shards into the cache; decodes in threads, which end before it returns. Raises UserError if the
    split cannot be read, has a class that the model lacks, images that it does not take, no sample that can be decoded,
    or more than ``model.bad_samples`` that cannot.
    """
    places = {name: place for place, name in enumerate(model.classes)}
    ids, undecoded = list[str](), list[str]()

    def compute_logits_and_labels() -> Iterator[tuple[Tensor, Tensor]]:
        """Compute and yield logits and labels of each batch; append its samples' ids to ``ids`` or ``undecoded``."""
        for batch in read_test_split(model, data):
            truths = [*compress(batch.truths or (), batch.decoded)]
            if unknown := [name for name in truths if name not in places]:
                known = ", ".join(model.classes[:6])
                said = f"the model knows {known}; give data with its classes"
                raise UserError(f"class {unknown[0]!r} of the test split: {said}")
            ids.extend(compress(batch.ids, batch.decoded))
            undecoded.extend(name for name, decoded in zip(batch.ids, batch.decoded, strict=True) if not decoded)
            if truths:
                yield model.compute_logits(batch.inputs).cpu(), torch.tensor([places[name] for name in truths])
        if not ids:
            raise UserError("the test split has no image that can be decoded; repair it")

    found = Evaluation.from_batches(compute_logits_and_labels())
    found.ids, found.undecoded = ids, undecoded
    return found


def compute_logits_of_split(model: SavedModel, data: PreparedSet) -> Iterator[NDArray[np.float32]]:
    """Read the test split, and yield the logits [classes] of each sample that can be decoded, in the split's order.

    Downloads remote shards into the cache. Raises UserError if :func:`read_test_split` does.
    """
    for batch in read_test_split(model, data):
        yield from model.compute_logits(batch.inputs).cpu().numpy()
