"""What a run reports, saves and warns of, and how mistakes end it."""

import html
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_loop import arrays_in_fp64
from torch.nn import functional
from training_runs import QUIET, Train, notes

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core import hardware
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine import resources
from flyte_ddp.core.machine.resources import World
from flyte_ddp.core.runs.run_folder import OUTPUTS, UNFINISHED
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.core.text.sections import Confusions, decode_sections
from flyte_ddp.models import artifacts
from flyte_ddp.run import run_training

BASE = Hyperparameters(epochs=2, batch_size=100, num_ranks=2, precision="fp32", channels_last="off", log_interval=1)
EXPLODING = replace(BASE, learning_rate=1000.0, schedule="constant")

pytestmark = pytest.mark.usefixtures("user_models")


@pytest.mark.slow
def test_equal_runs_leave_equal_files(train: Train) -> None:
    """To the last byte, but for what they say about time."""
    hp = replace(BASE, precision="auto", channels_last="auto", keep="best", ema_decay=0.5, augment="crop_flip")
    one, other = (train(replace(hp, deterministic=True), name) for name in ("one", "other"))
    for name in ("model.pt", "model.json", "predictions.npz"):
        assert (one.run_folder / name).read_bytes() == (other.run_folder / name).read_bytes(), name


@pytest.mark.slow
def test_reported_metrics_are_those_of_the_saved_model(train: Train, digits: Path) -> None:
    """With BatchNorm, too, also where each rank gathers running statistics on its own."""
    result = train(
        replace(BASE, model="user_models:batch_norm", test_batch_size=64, strategy="ddp", sync_batchnorm=False)
    )
    model, sidecar = artifacts.load_model(result.model, result.sidecar)
    images, truth = arrays_in_fp64(digits, "test")
    with torch.no_grad():
        logits = model(images.float())
    assert sidecar.metrics.test["accuracy"] == (logits.argmax(1) == truth).sum().item() / len(truth)
    assert sidecar.metrics.test["loss"] == pytest.approx(functional.cross_entropy(logits, truth).item(), rel=1e-5)
    assert result.epoch_accuracies[-1] == result.test_accuracy
    with np.load(result.run_folder / "predictions.npz") as kept:
        confusions = decode_sections(str(kept["sections"]))[0]
    assert isinstance(confusions, Confusions)
    counts = {(first, second): samples for first, second, samples in confusions.counts}
    assert counts == Counter(zip(truth.tolist(), logits.argmax(1).tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sync_batchnorm", "words"),
    [
        ("functional_dropout", True, "draws random numbers outside"),
        ("batch_norm", False, "BatchNorm used the statistics of each"),
        ("dropout", True, ""),
    ],
)
def test_the_report_says_where_the_number_of_ranks_matters(
    train: Train, model: str, sync_batchnorm: bool, words: str
) -> None:
    hp = replace(BASE, model=f"user_models:{model}", sync_batchnorm=sync_batchnorm, augment="crop_flip")
    result = train(replace(hp, num_ranks=1, max_steps=2))
    told = notes(result)
    assert [words in note for note in told] == ([True] if words else [])
    assert all(note in html.unescape(result.report.read_text()) for note in told)


@pytest.mark.parametrize(
    ("hp", "words"),
    [
        (replace(EXPLODING, epochs=30), "loss is (nan|inf).*epoch.*step"),
        # The last step's own loss is finite, what it leads to is not.
        (replace(EXPLODING, momentum=0.0, nesterov=False, max_steps=3, keep="best"), "loss is (nan|inf).*step 3"),
        (replace(BASE, model="user_models:twelve_classes"), r"returned \(\d+, 12\).*\(\d+, 10\)"),
        (replace(BASE, model="user_models:made"), "user_models:made' is a model instance"),
        (replace(BASE, options='{"model": {"width": 2}}'), "options of model 'small_cnn': .*'width'; correct"),
        # 7 samples to train on: a batch of 6 leaves one of a single sample, and ResNet18 makes 8x8 images 1x1.
        (
            replace(BASE, model="resnet18", batch_size=6, validation_fraction=0.9953, epochs=1),
            r"batch_size=6: BatchNorm .* single value",
        ),
        (replace(BASE, model="user_models:needs_width"), "options of model .*: missing a required argument: 'width'"),
    ],
)
def test_a_users_mistake_ends_in_one_error_and_no_result(
    train: Train, tmp_path: Path, hp: Hyperparameters, words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        train(replace(hp, num_ranks=1))
    assert len(caught.value.message.splitlines()) <= 2
    assert not [name for name in OUTPUTS if (tmp_path / "run" / name).exists()]
    if failed := re.search(r"loss is .* step (\d+)", caught.value.message):
        records = read_records(tmp_path / "run" / UNFINISHED / "metrics.jsonl")
        losses = [record["step"] for record in records if record["kind"] == "train"]
        last = 3 if hp.max_steps else int(failed[1]) - 1
        assert losses == [*range(1, last + 1)], "every finite loss is kept"


def test_cpu_quota_of_a_container_counts(tmp_path: Path) -> None:
    assert resources.read_cpu_quota(tmp_path) > 1000
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert resources.read_cpu_quota(tmp_path) == 2.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert resources.read_cpu_quota(tmp_path) > 1000


def test_shared_memory_is_for_cpu_ranks_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.choose_gradient_averaging(BASE.strategy, World(2)) == "shared_memory"
    assert hardware.choose_gradient_averaging(BASE.strategy, World(2, "cuda")) == "ddp"
    with pytest.raises(UserError, match=r"strategy='shared_memory': requires CPU ranks on Linux.*use strategy='ddp'"):
        hardware.choose_gradient_averaging("shared_memory", World(2, "cuda"))
    monkeypatch.setattr("sys.platform", "darwin")
    assert hardware.choose_gradient_averaging(BASE.strategy, World(2)) == "ddp"


def test_shared_memory_is_for_ranks_of_one_host() -> None:
    named = replace(BASE, strategy="shared_memory")
    assert hardware.choose_gradient_averaging(named.strategy, World(2, hosts=("a", "a"))) == "shared_memory"
    assert hardware.choose_gradient_averaging(BASE.strategy, World(2, hosts=("a", "b"))) == "ddp"
    with pytest.raises(UserError, match=r"strategy='shared_memory'.*all ranks on one host.* a, b;"):
        hardware.choose_gradient_averaging(named.strategy, World(2, hosts=("b", "a")))


def test_a_split_that_leaves_nothing_to_train_on_is_refused_before_a_rank_starts(digits: Path, tmp_path: Path) -> None:
    words = "validation_fraction=0.9999: holds out all 1,500 training samples of dataset='digits'"
    hp, no_launch = replace(BASE, validation_fraction=0.9999), lambda *_, **__: pytest.fail("ranks were started")
    with pytest.raises(UserError, match=words):
        run_training(hp, digits, tmp_path / "run", QUIET, launch=no_launch)
    assert not (tmp_path / "run").exists()
