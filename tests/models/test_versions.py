"""A model whose modules have versions, torchvision's MNASNet, which takes no weights without: all that loads it."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchvision.models import mnasnet0_5

from flyte_ddp.config import Hyperparameters
from flyte_ddp.predict.predict import write_prediction_table
from flyte_ddp.release.judge import judge_challenger
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.registry import Registry
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

QUIET = Settings(progress="off", wandb_mode="disabled", checkpoint_seconds=0.0)


@pytest.mark.slow
def test_what_is_trained_is_predicted_released_and_started_from(digits: Path, tmp_path: Path) -> None:
    hp = Hyperparameters(model="mnasnet0_5", image_size=32, epochs=1, max_steps=3, learning_rate=0.01, num_ranks=1)
    first = run_training(hp, digits, tmp_path / "first", QUIET)

    model = mnasnet0_5(num_classes=10)  # the three lines of docs/model.md
    model.load_state_dict(torch.load(first.model, weights_only=True))
    model.eval()

    files = first.model, first.sidecar
    write_prediction_table(*files, images=None, dataset=digits, output=tmp_path / "table.csv", settings=QUIET)
    with (tmp_path / "table.csv").open() as table:
        rows = [*csv.DictReader(table)]
    correct = sum(row["prediction"] == row["truth"] for row in rows)
    assert correct / len(rows) == pytest.approx(first.test_accuracy)

    judged = judge_challenger(*files, digits, Registry(str(tmp_path / "registry"), "digits"), Policy(), settings=QUIET)
    assert judged.verdict.challenger_accuracy == pytest.approx(first.test_accuracy)

    second = replace(hp, init_from=str(first.model), max_steps=1, learning_rate=1e-9, weight_decay=0.0)
    started = run_training(second, digits, tmp_path / "second", QUIET)
    weights, before = (torch.load(each.model, weights_only=True) for each in (started, first))
    for name, value in dict(model.named_parameters()).items():
        torch.testing.assert_close(weights[name], value.detach(), atol=1e-6, rtol=0)
    assert weights._metadata == before._metadata
