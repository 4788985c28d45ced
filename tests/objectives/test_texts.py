"""Texts of a language run: as the user's tokenizer joins them, with tokens by the second and the gradient's norm."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report_page import Page
from torch import nn
from training_runs import records_of, train_in, weights

from flyte_ddp import arrays
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch
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
    assert "test_texts:decode" in HP.own_code(), "its code counts in the cache key"


def test_the_norm_in_the_metrics_is_the_gradients(tmp_path: Path) -> None:
    """Two first steps of plain SGD from the same weights differ by the gradient times the difference of their rates."""
    runs = [train(tmp_path / str(rate), replace(HP, max_steps=1, learning_rate=rate)) for rate in (0.1, 0.3)]
    one, other = map(weights, runs)
    apart = torch.cat([(one[name] - other[name]).flatten() for name in one])
    [record] = records_of(runs[0], "train")
    assert record["gradient_norm"] == pytest.approx(apart.norm().item() / 0.2, rel=1e-9)
    unclipped = train(tmp_path / "unclipped", replace(HP, max_steps=1, grad_clip_norm=0.0))
    assert not any("gradient_norm" in record for record in records_of(unclipped, "train"))
