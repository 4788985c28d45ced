"""Evaluation on any number of ranks: every sample counts once, and the figures are the same to the last bit."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from training_runs import Train

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.parallel.distributed import broadcast_object, rank, world_size
from flyte_ddp.text.json_lines import read_records
from flyte_ddp.training import evaluate as evaluation
from flyte_ddp.training.train import evaluate_splits
from flyte_ddp.training.training_state import TrainingState

HP = Hyperparameters(backend="gloo", precision="fp32", validation_fraction=0.1)
SIZES = (64, 1000)  # of test batches; 297 samples, so that some ranks get none


def leave_evaluations(folder: Path) -> None:
    """Leave, from rank 0, the evaluations of both splits for each size."""
    found = {}
    for size in SIZES:
        hp = replace(HP, test_batch_size=size, num_ranks=world_size())
        state = TrainingState(hp, detect_hardware(hp), open_arrays(folder / "digits"), None)
        found[size] = [vars(split) for split in evaluate_splits(state)]
    if rank() == 0:
        torch.save(found, folder / f"{world_size()}.pt")


@pytest.mark.slow
def test_metrics_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Each sample counts once and in its place, and figures of three ranks are those of one to the last bit."""
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(leave_evaluations, tmp_path, 3) == [0, 0, 0]
    leave_evaluations(tmp_path)
    on_one, on_three = (torch.load(tmp_path / f"{ranks}.pt", weights_only=True) for ranks in (1, 3))
    for size in SIZES:
        for one, other in zip(on_one[size], on_three[size], strict=True):
            assert one["measures"] == other["measures"]
            assert one["columns"].keys() == other["columns"].keys() == {"loss", "prediction", "truth"}
            assert all(torch.equal(column, other["columns"][name]) for name, column in one["columns"].items())
        assert torch.equal(one["columns"]["truth"], torch.tensor(open_arrays(data).test_labels).double())


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
    records = read_records(train(hp, timeout=60.0).metrics)
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert [record["validation_loss"] for record in evaluations] == [1.0, 1.0, 1.0], "the first is the best"
