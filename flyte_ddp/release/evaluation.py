"""Evaluation of a saved model, and of the best constant answer, on a test split."""

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

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.objectives.objective import list_float_tensors, overrides
from flyte_ddp.core.samples.leaves import Leaves, map_leaves
from flyte_ddp.core.text.formatting import name_measure
from flyte_ddp.core.training.evaluate import compute_batch_columns, compute_measures
from flyte_ddp.datasets.prepared_set import PreparedSet
from flyte_ddp.objectives import Classification, Multilabel, Objective
from flyte_ddp.objectives.threshold import predict_classes
from flyte_ddp.predict.prediction_batches import Batch, SavedModel, read_test_batches
from flyte_ddp.predict.sample_columns import SampleColumns, compute_sample_columns, join_columns
from flyte_ddp.release.scores import is_higher_better, score_samples

SURE = 50.0  # a logit whose probability is 1
TRIED = 10  # most frequent classes that are tried as constant answers
ROWS = 4096  # samples in a batch of constant answers


@dataclass
class Evaluation:
    """The measures of a model on a test split, and the objective's columns for each of N samples.

    The outputs are not kept, because outputs of thousands of classes would fill the memory.
    """

    objective: Objective
    # By name [N] or [N, k], on the CPU: the objective's, and for classification "nll", the negative log-likelihood of
    # the label in nats, and "confidence", the probability of the prediction.
    columns: dict[str, Tensor]
    finite: NDArray[np.bool_]  # [N], whether all outputs of a sample are finite
    measures: dict[str, float]  # by name; empty if an output is not finite, except in classification
    ids: Sequence[str] = ()  # of the N samples
    undecoded: Sequence[str] = ()  # ids of the samples that cannot be decoded: not among the N
    monitoring_columns: SampleColumns = field(default_factory=dict)  # empty: not requested, or not available
    monitoring_error: Exception | None = None  # because of which ``monitoring_columns`` is empty
    places: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # [N], among the decodable samples

    @classmethod
    def from_batches(cls, objective: Objective, batches: Iterable[tuple[Any, Leaves, int]]) -> Self:
        """Return the evaluation of batches of (outputs, targets, number of samples).

        At least one sample is needed. The ids of the samples stay empty. If an output is not finite, only a
        classification has measures. Raises UserError if the main measure is undefined.
        """
        # The values of each column by name and shape, as small byte strings. Tensors or growing buffers would lie in
        # memory between the large tensors of the batches, and the allocator could not use that memory again.
        values, finite = defaultdict[tuple[str, tuple[int, ...]], list[bytes]](list), bytearray()
        with torch.no_grad():  # otherwise losses are computed as in training
            for batch in batches:
                for part in objective.split_batch(*batch):
                    columns, are_finite = compute_columns_and_finite(objective, *part)
                    for name, column in columns.items():
                        values[name, column.shape[1:]].append(column.double().cpu().numpy().tobytes())
                    finite += are_finite.numpy().tobytes()
                    del columns, are_finite
                del batch, part  # frees memory before the next batch is computed
        found = {
            name: torch.from_numpy(np.frombuffer(bytearray().join(buffer)).reshape(len(finite), *shape))
            for (name, shape), buffer in values.items()
        }
        return cls.from_columns(objective, found, np.frombuffer(finite, np.bool_))

    @classmethod
    def from_columns(cls, objective: Objective, columns: dict[str, Tensor], finite: NDArray[np.bool_]) -> Self:
        """Return the evaluation of all samples from the objective's columns.

        ``finite`` [N] is whether all outputs of a sample are finite. If an output is not finite, only a classification
        has measures. Raises UserError if the main measure is undefined.
        """
        found = cls(objective, columns, finite, {}, places=np.arange(len(finite)))
        if finite.all() or isinstance(objective, Classification):
            found.measures = compute_measures(objective, columns)
        if finite.all() and not math.isfinite(found.score):
            name = objective.main_measure
            raise UserError(
                f"{name_measure(name)} is undefined on this test split; give a test split with more varied samples"
            )
        return found

    def select_samples(self, chosen: NDArray[np.bool_]) -> Self:
        """Return the evaluation of the samples that the mask ``chosen`` [N] selects, without ``monitoring_columns``.

        Raises UserError if the main measure of the selected samples is undefined.
        """
        columns = {name: column[torch.from_numpy(chosen)] for name, column in self.columns.items()}
        found = self.from_columns(self.objective, columns, self.finite[chosen])
        found.ids, found.undecoded, found.places = [*compress(self.ids, chosen)], self.undecoded, self.places[chosen]
        return found

    @property
    def samples(self) -> int:
        return len(self.finite)

    @property
    def score(self) -> float:
        """The main measure, or 0 if ``measures`` is empty because an output is not finite."""
        return self.measures.get(self.objective.main_measure, 0.0)

    @cached_property
    def scores(self) -> NDArray[np.float64]:
        """The score of each sample [N], where higher is better. Empty if ``measures`` is empty."""
        return score_samples(self.objective, self.columns) if self.measures else np.empty(0)

    @property
    def classifies(self) -> bool:
        return isinstance(self.objective, Classification) and {"prediction", "truth", "nll"} <= {*self.columns}

    @property
    def correct(self) -> NDArray[np.bool_]:
        return np.asarray(self.columns["prediction"] == self.columns["truth"])


def evaluate_split(model: SavedModel, data: PreparedSet, *, for_monitoring: bool = False) -> Evaluation:
    """Run the model on the test split, and return the evaluation of the decodable samples.

    With ``for_monitoring``, the evaluation also has the columns of inputs and outputs by which monitoring compares
    samples. If these columns cannot be computed, the evaluation has the error instead.

    Raises:
        UserError: The split does not fit the model, no sample can be decoded, or the main measure is undefined. Other
            exceptions of user-defined code pass through.
    """
    ids, undecoded, monitoring_columns, failures = list[str](), list[str](), list[SampleColumns](), list[Exception]()

    def compute_outputs_and_targets() -> Iterator[tuple[Any, Leaves, int]]:
        """Yield outputs, targets and number of each batch's decodable samples, and fill the lists above.

        Raises:
            UserError: No image can be decoded.
        """
        for batch in read_test_batches(model, data):
            targets = select_targets(model, batch, batch.decoded)
            ids.extend(compress(batch.ids, batch.decoded))
            undecoded.extend(name for name, decoded in zip(batch.ids, batch.decoded, strict=True) if not decoded)
            if not any(batch.decoded):
                continue
            outputs = model.compute_outputs(batch.inputs)
            model.objective.check_outputs(model.sidecar.model, outputs, targets)
            yield outputs, targets, sum(batch.decoded)
            if for_monitoring and not failures:
                try:
                    monitoring_columns.append(compute_sample_columns(model, batch.inputs, outputs, batch.rows))
                    check_same_columns(monitoring_columns, sum(batch.decoded))
                except Exception as error:  # of user-defined answers: the verdict must not depend on them
                    failures.append(error)
            del outputs  # frees memory before the next outputs are computed
        if not ids:
            raise UserError("no image of the test split can be decoded; repair the images")

    found = Evaluation.from_batches(model.objective, compute_outputs_and_targets())
    found.ids, found.undecoded = ids, undecoded
    if failures:
        found.monitoring_error = failures[0]
    else:
        found.monitoring_columns = join_columns(monitoring_columns)
    return found


def compute_columns_and_finite(
    objective: Objective, outputs: Any, targets: Leaves, samples: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the objective's columns of a batch, and whether all outputs of each sample are finite (bool [samples]).

    Classification also has the columns "confidence" and "nll" (negative log-likelihood of the label). ``samples`` is
    the number of samples in the batch.
    """
    columns = compute_batch_columns(objective, outputs, targets, samples)
    if isinstance(objective, Classification) and isinstance(outputs, Tensor):
        logs = torch.log_softmax(outputs, dim=1, dtype=torch.float64)
        of_label = logs.gather(1, targets[:, None])[:, 0]
        of_prediction = logs.gather(1, predict_classes(objective, outputs)[:, None])[:, 0]
        columns |= {"confidence": of_prediction.exp(), "nll": -of_label}
    finite = torch.ones(samples, dtype=torch.bool)
    for tensor in list_float_tensors(outputs):
        # If a tensor has no row for each sample, all its numbers count for every sample.
        rows = tensor.shape[:1] == (samples,)
        finite &= tensor.isfinite().reshape(samples if rows else 1, -1).all(dim=1).cpu()
    return columns, finite


def check_same_columns(batches: Sequence[SampleColumns], samples: int) -> None:
    """Raise UserError unless the last batch has the first batch's columns, with a value for each sample.

    ``batches`` are the columns of each batch so far. ``samples`` is the number of decodable samples in the last batch.
    """
    if batches[-1].keys() != batches[0].keys() or {*map(len, batches[-1].values())} != {samples}:
        raise UserError(
            "the objective's answers: must have the same columns in each batch, and a value for each sample"
        )


def select_targets(model: SavedModel, batch: Batch, chosen: Sequence[bool]) -> Leaves:
    """Return the targets of a batch's samples that the mask ``chosen`` selects, as the objective expects targets.

    Names of classes become the model's class numbers. Raises UserError for a class that the model does not know, or for
    targets that do not fit the objective.
    """
    if batch.truths is not None:
        places = {name: place for place, name in enumerate(model.classes)}
        truths = [*compress(batch.truths, chosen)]
        if unknown := [name for name in truths if name not in places]:
            known = ", ".join(model.classes[:6])
            raise UserError(
                f"truth: unknown class {unknown[0]!r}; the model knows {known}; give data with these classes"
            )
        return torch.tensor([places[name] for name in truths], device=model.device)
    targets = batch.targets if all(chosen) else map_leaves(lambda leaf: leaf[torch.tensor(chosen)], batch.targets)
    if isinstance(targets, Tensor) and len(targets):
        model.objective.check_targets(targets.cpu().numpy())
    return targets


def evaluate_best_constant(found: Evaluation) -> Evaluation | None:
    """Return the evaluation of the constant answer with the best main measure, or None if no answer is known.

    A constant answer gives the same outputs for every sample. Classification tries the shares of the classes and the
    ten most frequent classes. Multilabel tries the shares of the labels and all labels. For other objectives, or if
    user-defined columns need other outputs, no answer is known. ``found`` is a model's evaluation, which gives
    objective and truths.
    """
    objective, truth = found.objective.with_threshold(None), found.columns.get("truth")
    if truth is None or not isinstance(objective, (Classification, Multilabel)):
        return None
    # If the objective defines its columns without a likelihood, outputs are not logits, and no answer can be made.
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
        if objective.main_measure != "accuracy":  # accuracy is best for the most frequent class, as above
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
