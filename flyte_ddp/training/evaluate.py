"""Exact evaluation: whole fixed batches are dealt to the ranks and every sample counts exactly once.

Results go back into the samples' own places and are added up there in fp64, so that the metrics are equal on any number
of ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from flyte_ddp.loading.split import Split
from flyte_ddp.parallel.distributed import from_rank_0, rank, sum_over_ranks, world_size


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one split; the tensors [N] have one value a sample, in the split's order, on the CPU."""

    loss: float
    accuracy: float
    losses: Tensor  # fp64
    predictions: Tensor  # int64, as is the truth
    truth: Tensor


def evaluate(predict: Callable[[Tensor], Tensor], images: Split, batch_size: int, device: torch.device) -> Evaluation:
    """Evaluate a split, all ranks together, and return the same result on every rank.

    Args:
        predict: maps uint8 images [n, H, W, C] to logits [n, classes].

    Raises:
        RuntimeError: a sample was not counted exactly once.
    """
    # Rows: loss, prediction, truth, times counted. Each sample is written by one rank, so the sum over ranks is exact.
    table = torch.zeros(4, len(images), dtype=torch.float64, device=device)
    with torch.no_grad():  # no inference_mode: a tensor that a model keeps from here may be of use in training
        for place, (pixels, labels, _) in images.batches(batch_size, rank(), world_size()):
            logits = predict(pixels).double()
            table[0, place] = functional.cross_entropy(logits, labels, reduction="none")
            table[1, place] = logits.argmax(1).double()
            table[2, place] = labels.double()
            table[3, place] += 1
    sum_over_ranks(table)
    losses, predictions, truth, counted = table.cpu()
    if not bool((counted == 1).all()):
        raise RuntimeError(f"evaluation counted {int((counted != 1).sum())} of {len(images)} samples not exactly once")
    count = max(1, len(images))
    return Evaluation(
        loss=losses.sum().item() / count,
        accuracy=(predictions == truth).sum().item() / count,
        losses=losses,
        predictions=predictions.long(),
        truth=truth.long(),
    )


def with_measures_of_rank_0(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the evaluations with the loss and the accuracy that rank 0 has computed; all ranks call it together.

    Every rank adds up the same numbers, but processors may add in different orders. By its own last bit a rank could
    stop training while the others continue and wait for it.
    """
    own = list(evaluations)
    measures = from_rank_0([(each.loss, each.accuracy) for each in own])
    return [replace(each, loss=loss, accuracy=accuracy) for each, (loss, accuracy) in zip(own, measures, strict=True)]
