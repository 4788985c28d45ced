"""Texts of a language run: as the user's tokenizer joins them, with tokens by the second and the gradient's norm."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import leaf_tasks
import numpy as np
import pytest
import torch
from predictions import predict_rows
from report_page import Page
from torch import Tensor, nn
from training_runs import QUIET, notes, records_of, train_in, train_on, weights

from flyte_ddp import arrays
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.objectives import Objective
from flyte_ddp.run import Result

HP = Hyperparameters(
    dataset="test_texts:texts", model="test_texts:pairs", objective="language", batch_size=16, max_steps=2, epochs=1,
    log_interval=1, precision="fp64", num_ranks=1, learning_rate=0.1, schedule="constant", nesterov=False, momentum=0.0,
    weight_decay=0.0, validation_fraction=0.0, grad_clip_norm=1e9,
    options='{"objective": {"shift": true, "decode": "test_texts:decode"}}',
)  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("user_models")]

PIECES = ("to", "ken", "iz", "er", "<pad>")
LENGTH = 6


def texts(_: str) -> Any:
    tokens = np.random.default_rng(0).integers(0, 4, (80, LENGTH))
    return arrays((tokens[:64], tokens[:64]), (tokens[64:], tokens[64:]), classes=PIECES)


def pairs(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(num_classes, 8), nn.Linear(8, num_classes))


def decode(tokens: list[int]) -> str:
    return "~".join(PIECES[token] for token in tokens)


def train(folder: Path, hp: Hyperparameters) -> Result:
    return train_in(folder / "run", hp, fetch(hp.dataset, "", folder / "data", progress="off"))


def test_texts_are_joined_by_the_users_function_and_tokens_are_counted(tmp_path: Path) -> None:
    result = train(tmp_path, HP)
    page = Page(result.report.read_text())
    cells = page.texts("td")
    shown = [cell for cell in cells if "~" in cell]
    assert len(shown) == 2 * 16, "prediction and truth of each test sample"
    assert all(set(cell.split("~")) <= {*PIECES} for cell in shown)
    for record in records_of(result, "train"):  # all but the first token of a text are predicted
        ratio = record["tokens_per_second"] / record["samples_per_second"]
        assert ratio == pytest.approx(LENGTH - 1)
    assert {"Tokens per second", "Gradient norm"} <= set(page.texts("h3"))
    assert "test_texts:decode" in HP.list_user_callables(), "its code counts in the cache key"


def test_the_norm_in_the_metrics_is_the_gradients(tmp_path: Path) -> None:
    """Two first steps of plain SGD from the same weights differ by the gradient times the difference of their rates."""
    runs = [train(tmp_path / str(rate), replace(HP, max_steps=1, learning_rate=rate)) for rate in (0.1, 0.3)]
    one, other = map(weights, runs)
    apart = torch.cat([(one[name] - other[name]).flatten() for name in one])
    [record] = records_of(runs[0], "train")
    assert record["gradient_norm"] == pytest.approx(apart.norm().item() / 0.2, rel=1e-9)
    unclipped = train(tmp_path / "unclipped", replace(HP, max_steps=1, grad_clip_norm=0.0))
    assert not any("gradient_norm" in record for record in records_of(unclipped, "train"))


@pytest.mark.parametrize("data", [leaf_tasks.texts, leaf_tasks.whole_texts])
def test_a_texts_prediction_does_not_depend_on_the_others_of_its_batch(
    data: Callable[[str], SampleArrays], tmp_path: Path
) -> None:
    """Neither the report's nor the table's: they end with the last token that counts, not with the padding."""
    options = {"objective": {"shift": data is leaf_tasks.whole_texts}}
    hp = replace(HP, collate="padded", model="leaf_tasks:Reader", options=json.dumps(options))
    found = []
    for size in (1, 7, 23):
        folder = tmp_path / str(size)
        run = train_on(folder, data(""), replace(hp, test_batch_size=size))
        files = run.model, run.sidecar, folder / "table.csv"
        table = predict_rows(*files, dataset=folder / "data", batch_size=size, settings=QUIET)
        found.append([(row["prediction"], row["truth"]) for row in table])
        with np.load(run.run_folder / "predictions.npz") as reported:
            found.append([*zip(reported["prediction"], reported["truth"], strict=True)][: len(table)])
    assert all(each == found[0] for each in found)
    lengths = [len(targets) if (targets >= 0).any() else 0 for targets in data("").test_targets]
    assert [len(prediction) for prediction, _ in found[0]] == lengths
    assert max(lengths) > min(filter(None, lengths)), "some are padded"


class EachPlace(Objective):
    """A number at each place of a series, without words for tables."""

    def weights(self, targets: Tensor) -> Tensor:
        return (~targets.isnan()).float()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[..., 0] - targets.nan_to_num()).square()


def numbers(num_classes: int) -> nn.Module:
    class Numbers(nn.Linear):
        def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(values)

    return Numbers(2, num_classes)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_numbers_of_padded_samples_are_shown_as_far_as_all_batches_have_them(size: int, tmp_path: Path) -> None:
    hp = replace(HP, collate="padded", model="test_texts:numbers", objective="test_texts:EachPlace", options="")
    run = train_on(tmp_path, leaf_tasks.series(""), replace(hp, test_batch_size=size))
    assert not [note for note in notes(run) if "could not describe" in note]
    with np.load(run.run_folder / "predictions.npz") as reported:
        assert "truth_0" in reported["make_number_columns"]
