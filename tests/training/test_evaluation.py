"""Evaluation on any number of ranks: every sample counts once, and the figures are the same to the last bit."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli import HELPERS
from ranks import run_ranks
from torch import nn
from torch.nn import functional

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.json_lines import read_records
from flyte_ddp.loading.arrays import ArrayImages
from flyte_ddp.loading.split import Split
from flyte_ddp.order.sampling import ListedOrder
from flyte_ddp.parallel.distributed import broadcast_object, rank, world_size
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings
from flyte_ddp.training import evaluate as evaluation
from flyte_ddp.training.evaluate import evaluate_split
from flyte_ddp.training.train import evaluate_splits
from flyte_ddp.training.training_state import TrainingState

HP = Hyperparameters(backend="gloo", precision="fp32", validation_fraction=0.1)
SIZES = (7, 64, 297, 1000)  # of test batches; 297 samples, so that some ranks get none


def evaluate_in_ranks(folder: Path) -> None:
    arrays = open_arrays(folder.parent / "digits")
    found = {}
    for size in SIZES:
        hp = Hyperparameters(**{**HP.to_dict(), "test_batch_size": size, "num_ranks": world_size()})
        state = TrainingState(hp, detect_hardware(hp), arrays, None)
        found[size] = [vars(split) for split in evaluate_splits(state)]
    if rank() == 0:
        torch.save(found, folder / "found.pt")


@pytest.mark.slow
def test_metrics_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    found = {}
    for ranks in (1, 3):
        (tmp_path / str(ranks)).mkdir()
        assert run_ranks(evaluate_in_ranks, tmp_path / str(ranks), ranks) == [0] * ranks
        found[ranks] = torch.load(tmp_path / str(ranks) / "found.pt", weights_only=True)
    arrays = open_arrays(data)
    for size in SIZES:
        for one, *others in zip(*(found[ranks][size] for ranks in found), strict=True):
            for other in others:
                assert (one["loss"], one["accuracy"]) == (other["loss"], other["accuracy"])
                assert all(torch.equal(one[key], other[key]) for key in ("losses", "predictions", "truth"))
        _, test = found[1][size]
        assert torch.equal(test["truth"], torch.tensor(arrays.test_labels))


def test_a_sample_that_is_not_counted_once_is_an_error() -> None:
    class Twice(Split):
        def load_evaluation_batches(self, batch_size, part, parts):
            yield from super().load_evaluation_batches(batch_size, part, parts)
            yield from super().load_evaluation_batches(batch_size, part, parts)

    images, labels = torch.zeros(5, 1, 1, 1, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64)
    split = Twice(ArrayImages(images, labels), ListedOrder(torch.arange(5, dtype=torch.int32).numpy()))
    with pytest.raises(RuntimeError, match="counted 5 of 5 samples not exactly once"):
        evaluate_split(
            lambda batch: functional.one_hot(batch[:, 0, 0, 0].long(), 2).float(), split, 2, torch.device("cpu")
        )


def disagreeing(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A model in whose run rank 1 adds up each evaluation's losses to one bit less than before, and rank 0 does not."""
    calls = itertools.count()

    def broadcast_other_bits(metrics):
        return broadcast_object((1.0 - rank() * next(calls) * 2.0**-53, metrics[1]))

    evaluation.broadcast_object = broadcast_other_bits
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


@pytest.mark.slow
def test_the_sums_of_rank_0_decide_when_all_ranks_stop(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines whose vector units differ add up the same losses to other last bits."""
    monkeypatch.chdir(HELPERS)
    hp = replace(HP, model="test_evaluation:disagreeing", num_ranks=2, epochs=6, early_stop_patience=2, keep="best")
    settings = Settings(progress="off", wandb_mode="disabled", timeout=60.0)
    records = read_records(run_training(hp, digits, tmp_path / "run", settings).metrics)
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert [record["validation_loss"] for record in evaluations] == [1.0, 1.0, 1.0], "the first is the best"
