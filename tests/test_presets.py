"""The presets in config/: small JSON files of hyperparameters, each a complete answer to one question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import DATASETS

FOLDER = Path(__file__).parents[1] / "config"
NAMES = ("fast", "resnet18", "smoke", "tutorial")
SAMPLES = {"digits": 1_437, "mnist": 60_000, "fashion_mnist": 60_000, "cifar10": 50_000}  # for training


def values(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content


def samples_seen(name: str) -> int:
    hp = Hyperparameters.from_dict(values(name))
    whole = hp.epochs * round(SAMPLES[hp.dataset] * (1 - hp.validation_fraction))
    return min(whole, hp.max_steps * hp.batch_size) if hp.max_steps else whole


def test_the_presets_are_these() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.json")) == [f"{name}.json" for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_valid_and_says_what_it_sets(name: str) -> None:
    given = values(name)
    assert given
    hp = Hyperparameters.from_json((FOLDER / f"{name}.json").read_text())
    assert {field: getattr(hp, field) for field in given} == given
    assert hp.dataset in DATASETS  # a preset needs nothing that its user would have to write
    assert not hp.data_source
    assert not hp.init_from


def test_smoke_is_the_smallest_and_needs_no_network() -> None:
    others = [samples_seen(name) for name in NAMES if name != "smoke"]
    assert samples_seen("smoke") * 10 < min(others)
    hp = Hyperparameters.from_dict(values("smoke"))
    assert hp.dataset == "digits"
    assert hp.num_ranks == 2


def test_the_tutorial_preset_is_the_tutorials() -> None:
    """Flyte's MNIST tutorial: SGD at 0.01 with momentum 0.5, ten epochs of batches of 128 on each of two ranks."""
    hp = Hyperparameters.from_dict(values("tutorial"))
    assert (hp.dataset, hp.model, hp.optimizer, hp.schedule) == ("mnist", "tutorial", "sgd", "constant")
    assert (hp.epochs, hp.batch_size, hp.test_batch_size) == (10, 256, 1000)
    assert (hp.learning_rate, hp.momentum, hp.nesterov, hp.weight_decay) == (0.01, 0.5, False, 0.0)
    assert (hp.augment, hp.label_smoothing, hp.validation_fraction, hp.ema_decay) == ("none", 0.0, 0.0, 0.0)


def test_the_fast_preset_is_the_default_but_for_data_and_length() -> None:
    """So what is measured with it is what people get without it."""
    may_differ = {"dataset", "model", "epochs", "batch_size", "learning_rate", "validation_fraction"}
    assert set(values("fast")) <= may_differ | {"test_batch_size", "label_smoothing", "ema_decay", "keep"}
    assert Hyperparameters.from_dict(values("fast")).model == Hyperparameters().model
