"""Evaluation on any number of ranks: every sample counts once, and the figures are the same to the last bit."""

import itertools
from dataclasses import replace

import pytest
from torch import nn
from training_runs import Train, records_of

from flyte_ddp.config import Hyperparameters
from flyte_ddp.parallel.distributed import broadcast_object, rank
from flyte_ddp.training import evaluate as evaluation

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
