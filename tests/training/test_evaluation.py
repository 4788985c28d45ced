"""Evaluation on any number of ranks: every sample counts once, and the figures are the same to the last bit."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_runs import Train, records_of

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.parallel.distributed import broadcast_object, rank
from flyte_ddp.core.training import evaluate as evaluation
from flyte_ddp.objectives import Classification, Facts, Objective

HP = Hyperparameters(backend="gloo", precision="fp32", validation_fraction=0.1)


def disagreeing(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A model in whose run rank 1 adds up each evaluation's losses to one bit less than before, and rank 0 does not."""
    calls = itertools.count()

    def broadcast_other_bits(measures):
        return broadcast_object({**measures, "loss": 1.0 - rank() * next(calls) * 2.0**-53})

    evaluation.broadcast_object = broadcast_other_bits
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


@pytest.mark.slow
@pytest.mark.usefixtures("user_models")
def test_the_sums_of_rank_0_decide_when_all_ranks_stop(train: Train) -> None:
    """Machines whose vector units differ add up the same losses to other last bits."""
    hp = replace(HP, model="test_evaluation:disagreeing", num_ranks=2, epochs=6, early_stop_patience=2, keep="best")
    evaluations = records_of(train(hp, timeout=60.0), "evaluation")
    assert [record["validation_loss"] for record in evaluations] == [1.0, 1.0, 1.0], "the first is the best"


class Coupled(Classification):
    """Losses that depend on the rest of the batch."""

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        return super().losses(outputs, targets) - outputs.mean()


class Split:
    """Three batches, the last one small, of more logits than are computed at once."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(250, 3000, generator=generator)
        self.targets = torch.randint(3000, (250,), generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def load_evaluation_batches(self, batch_size: int, _: int, __: int) -> Iterator[Any]:
        for start in range(0, len(self), batch_size):
            place = slice(start, min(len(self), start + batch_size))
            yield place, (self.logits[place], self.targets[place], None)


@pytest.mark.parametrize("kind", [Classification, Coupled])
def test_batches_of_many_classes_have_the_columns_of_whole_ones(kind: type[Objective]) -> None:
    """The logits of a batch lie in memory that the next batch uses, as a compiled model's do."""
    split, objective, reused = Split(), kind(Facts(tuple(map(str, range(3000))))), torch.empty(100, 3000)
    parts = []

    def predict(inputs: Tensor, _: Tensor, samples: int) -> Tensor:
        return reused[:samples].copy_(inputs)

    def count(batch: Tensor) -> None:
        parts.append(len(batch))

    losses = objective.losses
    objective.losses = lambda outputs, targets: count(targets) or losses(outputs, targets)  # type: ignore[method-assign,func-returns-value]
    found = evaluation.compute_split_columns(predict, split, 100, objective)  # type: ignore[arg-type]
    assert (len(parts) == 3) == (kind is Coupled), "own losses see whole batches"
    assert sum(parts) == 250
    for start in (0, 100, 200):
        chosen = slice(start, min(250, start + 100))
        logits, targets = split.logits[chosen].double(), split.targets[chosen]
        expected = nn.functional.cross_entropy(logits, targets, reduction="none")
        torch.testing.assert_close(found["loss"][chosen], expected - (logits.mean() if kind is Coupled else 0))
        whole = evaluation.compute_batch_columns(kind(objective.facts), split.logits[chosen], targets, len(targets))
        for name, column in whole.items():
            assert torch.equal(found[name][chosen], column.double()), "to the bit"
