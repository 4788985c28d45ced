"""Exact evaluation: fixed whole batches are dealt to the ranks, and every sample counts exactly once.

Each sample's result goes to the sample's own place in a table, which is added up in fp64. So the metrics do not depend
on the number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flyte_ddp.loading.split import Split
from flyte_ddp.parallel.distributed import broadcast_object, rank, sum_over_ranks, world_size


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one split. The tensors [N] hold one value for each sample, in the split's order, on the CPU."""

    loss: float
    accuracy: float
    losses: Tensor  # fp64
    predictions: Tensor  # int64, as is the truth
    truth: Tensor


def evaluate_split(
    predict: Callable[[Tensor], Tensor], split: Split, batch_size: int, device: torch.device
) -> Evaluation:
    """Evaluate a split on all ranks together and return the result, on every rank. All ranks must call it.

    Raises RuntimeError if a sample was not counted exactly once.

    Args:
        predict: maps uint8 images [n, H, W, C] to logits [n, classes].
    """
    # Rows: loss, prediction, truth, times counted. Each sample is written by one rank, so the sum over ranks is exact.
    table = torch.zeros(4, len(split), dtype=torch.float64, device=device)
    with torch.no_grad():  # not inference_mode: training could not use a tensor that a model keeps from an evaluation
        for place, (pixels, labels, _) in split.batches(batch_size, rank(), world_size()):
            logits = predict(pixels).double()
            table[0, place] = functional.cross_entropy(logits, labels, reduction="none")
            table[1, place] = logits.argmax(1).double()
            table[2, place] = labels.double()
            table[3, place] += 1
    sum_over_ranks(table)
    losses, predictions, truth, counted = table.cpu()
    if not bool((counted == 1).all()):
        raise RuntimeError(f"evaluation counted {int((counted != 1).sum())} of {len(split)} samples not exactly once")
    count = max(1, len(split))
    # All ranks use rank 0's metrics. Processors of different kinds may add up in different orders, and because of one
    # last bit a rank could stop training while the others continue and wait for it.
    own = losses.sum().item() / count, (predictions == truth).sum().item() / count
    return Evaluation(*broadcast_object(own), losses, predictions.long(), truth.long())
