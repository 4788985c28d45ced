"""What only a GPU can show: the same training on one, checked against CPU ranks."""

from dataclasses import replace
from pathlib import Path

import faults
import pytest
import torch
from faulty_runs import saved

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import RankError, UserError
from flyte_ddp.json_lines import read_records
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.usefixtures("user_models"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

QUIET = Settings(progress="off", wandb_mode="disabled")
HP = Hyperparameters(
    model="faults:model",
    epochs=2,
    batch_size=100,
    num_ranks=1,
    backend="nccl",
    precision="fp64",
    augment="crop",
    ema_decay=0.9,
    deterministic=True,
    log_interval=1,
)


def losses(metrics: Path) -> list[float]:
    return [record["loss"] for record in read_records(metrics) if record["kind"] == "train"]


def test_a_gpu_computes_what_cpu_ranks_do(digits: Path, tmp_path: Path) -> None:
    """Without dropout, whose random numbers a device draws in its own way."""
    hp = replace(HP, model="small_cnn", precision="fp64")
    on_gpu = run_training(hp, digits, tmp_path / "gpu", QUIET)
    on_cpu = run_training(replace(hp, backend="gloo", num_ranks=2), digits, tmp_path / "cpu", QUIET)
    assert losses(on_gpu.metrics) == pytest.approx(losses(on_cpu.metrics), abs=1e-9)
    assert on_gpu.test_accuracy == on_cpu.test_accuracy


def test_a_run_on_a_gpu_goes_on_bit_for_bit(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_training(HP, digits, tmp_path / "undisturbed", QUIET)
    faults.inject(monkeypatch, tmp_path / "marker", rank=0, at="training", kind="ArithmeticError", **{"pass": 20})
    with pytest.raises(RankError, match="the rank's own words"):
        run_training(HP, digits, tmp_path / "run", QUIET)
    retried = run_training(HP, digits, tmp_path / "run", QUIET)
    starts = [record["resumed_after_step"] for record in read_records(retried.metrics) if record["kind"] == "start"]
    assert starts == [0, 20]
    weights = [torch.load(result.model, weights_only=True) for result in (expected, retried)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert losses(retried.metrics) == losses(expected.metrics)


@pytest.mark.parametrize("max_steps", [17, 0])
def test_a_loss_that_is_not_finite(digits: Path, tmp_path: Path, max_steps: int) -> None:
    hp = replace(HP, model="test_diagnosis:activation", precision="fp32", max_steps=max_steps, deterministic=False)
    with pytest.raises(
        UserError, match=r"at epoch 1, step 17 \(the first activation that was not finite is the output"
    ):
        run_training(hp, digits, tmp_path / "run", QUIET)
    found = saved(tmp_path / "run")
    assert found is not None
    assert found.step == 14


def test_complex_weights_train(digits: Path, tmp_path: Path) -> None:
    hp = replace(HP, model="parallel_models:Complex", precision="fp32", deterministic=False)
    assert all(loss > 0 for loss in losses(run_training(hp, digits, tmp_path / "run", QUIET).metrics))


def test_a_second_run_in_this_process_compiles_as_well(digits: Path, tmp_path: Path) -> None:
    hp = Hyperparameters(model="small_cnn", max_steps=5, batch_size=100, num_ranks=1, backend="nccl", compile=True)
    for name, batch_size in (("first", 100), ("second", 90)):  # another size, so that it is compiled again
        run_training(replace(hp, batch_size=batch_size), digits, tmp_path / name, QUIET)


def test_the_default_precision_trains(digits: Path, tmp_path: Path) -> None:
    hp = Hyperparameters(epochs=8, batch_size=100, num_ranks=1, backend="nccl", learning_rate=0.05)
    assert run_training(hp, digits, tmp_path / "run", QUIET).test_accuracy > 0.9


def test_the_time_goes_where_the_gpu_spends_it(digits: Path, tmp_path: Path) -> None:
    """And not to the host's waiting for it; a model that keeps the GPU busy."""
    hp = replace(HP, model="resnet18", image_size=96, precision="fp32", epochs=4, deterministic=False, ema_decay=0.0)
    (end,) = [
        each
        for each in read_records(run_training(hp, digits, tmp_path / "run", QUIET).metrics)
        if each["kind"] == "end"
    ]
    seconds = end["seconds"]
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total)
    assert all(part >= -0.01 * total for part in seconds.values())
    assert seconds["forward_backward"] > 0.5 * (total - seconds["evaluation"])
    assert seconds["other"] < 0.3 * total
