"""How a saved model, and the best answer that is the same for all samples, does on a test split."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flyte_ddp.datasets.prepared import PreparedSet
from flyte_ddp.errors import UserError
from flyte_ddp.objectives import Classification, Multilabel, Objective
from flyte_ddp.objectives.objective import list_floats, overrides
from flyte_ddp.objectives.threshold import predict_classes, with_threshold
from flyte_ddp.predict.prediction_batches import Batch, SavedModel, read_test_split
from flyte_ddp.predict.sample_columns import SampleColumns, describe_batch, join_columns
from flyte_ddp.release.scores import is_higher_better, score_samples
from flyte_ddp.samples.leaves import Leaves, map_leaves
from flyte_ddp.text.formatting import name_measure
from flyte_ddp.training.evaluate import compute_columns, measure_columns, split_batch

SURE = 50.0  # a logit whose probability is 1
TRIED = 10  # classes that are tried for all samples: the commonest
ROWS = 4096  # of a batch


@dataclass
class Evaluation:
    """A model's measures, and its numbers for each of N samples.

    The outputs are not kept: with thousands of classes they would fill the memory.
    """

    objective: Objective
    # By name [N] or [N, k], on the CPU: the objective's, and for classification "nll", the negative log-likelihood of
    # the label in nats, and "confidence", the probability of the prediction.
    columns: dict[str, Tensor]
    finite: NDArray[np.bool_]  # [N], whether all outputs of a sample are numbers
    measures: dict[str, float]  # by name; empty if an output is not finite, except in classification
    ids: Sequence[str] = ()  # of the N samples
    undecoded: Sequence[str] = ()  # ids of the samples that cannot be decoded: not among the N
    described: SampleColumns = field(default_factory=dict)  # empty: not asked for, or not to be had
    undescribed: Exception | None = None  # why not, such as what own answers have raised
    places: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # [N], among the decodable samples

    @classmethod
    def from_batches(cls, objective: Objective, batches: Iterable[tuple[Any, Leaves, int]]) -> Self:
        """Evaluate one or more batches (outputs, targets, samples); UserError if the main measure is undefined."""
        # The values of each column, by its name and shape. Small pieces, and no tensors and no buffers that grow: those
        # would lie between the large tensors of the batches in the memory, and keep the allocator from using it again.
        values, finite = defaultdict[tuple[str, tuple[int, ...]], list[bytes]](list), bytearray()
        with torch.no_grad():  # else losses are those of training
            for batch in batches:
                for part in split_batch(objective, *batch):
                    columns, are_finite = compute_part(objective, *part)
                    for name, column in columns.items():
                        values[name, column.shape[1:]].append(column.double().cpu().numpy().tobytes())
                    finite += are_finite.numpy().tobytes()
                    del columns, are_finite
                del batch, part  # or the next batch's outputs would be computed beside these
        found = {
            name: torch.from_numpy(np.frombuffer(bytearray().join(buffer)).reshape(len(finite), *shape))
            for (name, shape), buffer in values.items()
        }
        return cls.from_columns(objective, found, np.frombuffer(finite, np.bool_))

    @classmethod
    def from_columns(cls, objective: Objective, columns: dict[str, Tensor], finite: NDArray[np.bool_]) -> Self:
        """Measure the columns of all samples; UserError if the main measure is undefined."""
        found = cls(objective, columns, finite, {}, places=np.arange(len(finite)))
        if finite.all() or isinstance(objective, Classification):
            found.measures = measure_columns(objective, columns)
        if finite.all() and not math.isfinite(found.score):
            name = objective.main_measure
            raise UserError(
                f"{name_measure(name)} is not defined on this test split; judge on one with samples of more kinds"
            )
        return found

    def select(self, chosen: NDArray[np.bool_]) -> Self:
        """Return the evaluation on the ``chosen`` samples, [N]; UserError if the main measure is undefined on these."""
        columns = {name: column[torch.from_numpy(chosen)] for name, column in self.columns.items()}
        found = self.from_columns(self.objective, columns, self.finite[chosen])
        found.ids, found.undecoded, found.places = [*compress(self.ids, chosen)], self.undecoded, self.places[chosen]
        return found

    @property
    def samples(self) -> int:
        return len(self.finite)

    @property
    def score(self) -> float:
        """The main measure; 0 if it was not measured, because an output is not finite."""
        return self.measures.get(self.objective.main_measure, 0.0)

    @cached_property
    def scores(self) -> NDArray[np.float64]:
        """The score of each sample, [N], more is better; empty where ``measures`` is."""
        return score_samples(self.objective, self.columns) if self.measures else np.empty(0)

    @property
    def classifies(self) -> bool:
        return isinstance(self.objective, Classification) and {"prediction", "truth", "nll"} <= {*self.columns}

    @property
    def correct(self) -> NDArray[np.bool_]:
        return np.asarray(self.columns["prediction"] == self.columns["truth"])


def evaluate_split(model: SavedModel, data: PreparedSet, *, describe: bool = False) -> Evaluation:
    """Run the model on the test split, and return its evaluation on decodable samples; UserError for an unfit split.

    ``describe`` adds the samples' columns, or the error that ended their description.
    """
    ids, undecoded, described, failures = list[str](), list[str](), list[SampleColumns](), list[Exception]()

    def compute_outputs_and_targets() -> Iterator[tuple[Any, Leaves, int]]:
        for batch in read_test_split(model, data):
            targets = find_targets(model, batch, batch.decoded)
            ids.extend(compress(batch.ids, batch.decoded))
            undecoded.extend(name for name, decoded in zip(batch.ids, batch.decoded, strict=True) if not decoded)
            if not any(batch.decoded):
                continue
            outputs = model.compute_outputs(batch.inputs)
            model.objective.check_outputs(str(model.sidecar["model"]), outputs, targets)
            yield outputs, targets, sum(batch.decoded)
            if describe and not failures:
                try:
                    described.append(describe_batch(model, batch.inputs, outputs, batch.rows))
                    require_same_columns(described, sum(batch.decoded))
                except Exception as error:  # of own answers; after the evaluation, as no verdict may depend on them
                    failures.append(error)
            del outputs  # before the next ones are computed
        if not ids:
            raise UserError("the test split has no image that can be decoded; repair it")

    found = Evaluation.from_batches(model.objective, compute_outputs_and_targets())
    found.ids, found.undecoded = ids, undecoded
    if failures:
        found.undescribed = failures[0]
    else:
        found.described = join_columns(described)
    return found


def compute_part(objective: Objective, outputs: Any, targets: Leaves, samples: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the columns of samples, and for each whether all outputs are finite."""
    columns = compute_columns(objective, outputs, targets, samples)
    if isinstance(objective, Classification) and isinstance(outputs, Tensor):
        logs = torch.log_softmax(outputs, dim=1, dtype=torch.float64)
        of_label = logs.gather(1, targets[:, None])[:, 0]
        of_prediction = logs.gather(1, predict_classes(objective, outputs)[:, None])[:, 0]
        columns |= {"confidence": of_prediction.exp(), "nll": -of_label}
    finite = torch.ones(samples, dtype=torch.bool)
    for tensor in list_floats(outputs):
        # Of a tensor that has no row for each sample, all numbers count for all samples.
        rows = tensor.shape[:1] == (samples,)
        finite &= tensor.isfinite().reshape(samples if rows else 1, -1).all(dim=1).cpu()
    return columns, finite


def require_same_columns(described: Sequence[SampleColumns], samples: int) -> None:
    """Raise UserError unless the last batch's columns have its ``samples``, and the names of the first batch's."""
    if described[-1].keys() != described[0].keys() or {*map(len, described[-1].values())} != {samples}:
        raise UserError(
            "the objective's answers: must have the same columns in each batch, and a value for each sample"
        )


def find_targets(model: SavedModel, batch: Batch, chosen: Sequence[bool]) -> Leaves:
    """Return the targets of a batch's ``chosen`` samples as the objective takes them; UserError for unfit ones."""
    if batch.truths is not None:
        places = {name: place for place, name in enumerate(model.classes)}
        truths = [*compress(batch.truths, chosen)]
        if unknown := [name for name in truths if name not in places]:
            known = ", ".join(model.classes[:6])
            raise UserError(f"class {unknown[0]!r} of the truth: the model knows {known}; give data with these")
        return torch.tensor([places[name] for name in truths], device=model.device)
    targets = batch.targets if all(chosen) else map_leaves(lambda leaf: leaf[torch.tensor(chosen)], batch.targets)
    if isinstance(targets, Tensor) and len(targets):
        model.objective.check_targets(targets.cpu().numpy())
    return targets


def evaluate_constant(found: Evaluation) -> Evaluation | None:
    """Return the evaluation of the constant answer that is best by the main measure; None if none is known."""
    objective, truth = with_threshold(found.objective, None), found.columns.get("truth")
    if truth is None or not isinstance(objective, (Classification, Multilabel)):
        return None
    # With columns of its own and no likelihood the outputs are no logits, so a constant answer cannot be made.
    base = Multilabel if isinstance(objective, Multilabel) else Classification
    if overrides(objective, base, "columns") and "nll" not in found.columns:
        return None
    if base is Multilabel:
        truth = truth.float()
        share = truth.nanmean(0).nan_to_num()
        answers = [share.logit().clamp(-SURE, SURE), torch.full_like(share, SURE)]
    else:
        truth = truth.long()
        counts = truth.bincount(minlength=objective.outputs)
        answers = [(counts / len(truth)).log().clamp(min=-SURE)]
        if objective.main_measure != "accuracy":  # which depends on the first class alone: the commonest, as above
            commonest = counts.topk(min(TRIED, len(counts))).indices
            answers += [*(functional.one_hot(commonest, len(counts)) * SURE)]

    def give_answer(answer: Tensor) -> Iterator[tuple[Any, Leaves, int]]:
        for part in torch.split(truth, ROWS):
            yield answer.expand(len(part), -1), part, len(part)

    sign = 1 if is_higher_better(objective) else -1
    evaluations = list[Evaluation]()
    for answer in answers:
        with suppress(UserError):  # the measure is not defined where all answers are the same
            evaluations.append(Evaluation.from_batches(objective, give_answer(answer)))
    return max(evaluations, key=lambda each: sign * each.score, default=None)
