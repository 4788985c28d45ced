"""The best answer that is the same for all samples, which a first model of classes or labels must be better than."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.errors import UserError
from flyte_ddp.objectives import Classification, Multilabel
from flyte_ddp.objectives.objective import overrides
from flyte_ddp.release.evaluation import Evaluation
from flyte_ddp.release.scores import is_higher_better
from flyte_ddp.samples.leaves import Leaves

SURE = 50.0  # a logit whose probability is 1
TRIED = 10  # classes that are tried for all samples: the commonest
ROWS = 4096  # of a batch


def evaluate_constant(found: Evaluation) -> Evaluation | None:
    """Return the evaluation of the best constant answer by the main measure; None if that is not known."""
    objective, truth = found.objective, found.columns.get("truth")
    if truth is None or not isinstance(objective, (Classification, Multilabel)):
        return None
    # Whoever has outputs that are no logits computes the columns from them; of classes only logits have a likelihood.
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
        commonest = counts.topk(min(TRIED, len(counts))).indices
        answers = [(counts / len(truth)).log().clamp(min=-SURE), *(torch.eye(len(counts))[commonest] * SURE)]

    def give_answer(answer: Tensor) -> Iterator[tuple[Any, Leaves, int]]:
        for part in torch.split(truth, ROWS):
            yield answer.expand(len(part), -1), part, len(part)

    sign = 1 if is_higher_better(objective) else -1
    evaluations = list[Evaluation]()
    for answer in answers:
        with suppress(UserError):  # the measure is not defined where all answers are the same
            evaluations.append(Evaluation.from_batches(objective, give_answer(answer)))
    return max(evaluations, key=lambda each: sign * each.score, default=None)
