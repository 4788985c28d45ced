"""The same promises on a CPU and on a GPU; and what only GPUs can show, such as hangs that the host reports in time."""

import time
from dataclasses import replace
from pathlib import Path

import faults
import numpy as np
import pytest
import torch
from array_sources import images_in_memory
from faulty_runs import saved
from training_runs import Train, cut_off, losses, records_of, resumed_steps, weights

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.core.launch import spawn
from flyte_ddp.core.parallel import hang_watch
from flyte_ddp.core.parallel.hang_watch import in_collective, start_hang_watch
from flyte_ddp.core.parallel.training_pass import TrainingPass
from flyte_ddp.objectives import Facts, make_objective

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("user_models")]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and --gpu")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, and --gpu")
on_gpu = pytest.param("cuda", marks=needs_gpu)
on_each_device = pytest.mark.parametrize("device", ["cpu", on_gpu])
# What a CPU does is the promise of another test; here it shows that the test itself can be passed.
also_on_cpu = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.exhaustive), on_gpu])
HP = Hyperparameters(model="faults:model", epochs=2, batch_size=100, num_ranks=1, precision="fp64")
HP = replace(HP, augment="crop", ema_decay=0.9, deterministic=True, log_interval=1)


def on_device(hp: Hyperparameters, device: str) -> Hyperparameters:
    return replace(hp, backend="nccl" if device == "cuda" else "gloo")


@pytest.mark.parametrize(
    ("device", "num_ranks"),
    [
        pytest.param("cpu", 1, marks=pytest.mark.exhaustive),
        pytest.param("cuda", 1, marks=needs_gpu),
        pytest.param("cuda", 2, marks=needs_two_gpus),
    ],
)
def test_each_device_computes_what_two_cpu_ranks_do(train: Train, device: str, num_ranks: int) -> None:
    """Without dropout, whose random numbers a device draws in its own way."""
    hp = replace(HP, model="small_cnn")
    on_one = train(on_device(replace(hp, num_ranks=num_ranks), device), "one")
    on_two = train(on_device(replace(hp, num_ranks=2), "cpu"), "two")
    assert losses(on_one) == pytest.approx(losses(on_two), abs=1e-9)
    assert on_one.test_accuracy == on_two.test_accuracy


@on_each_device
def test_losses_of_masks_have_a_deterministic_form(device: str) -> None:
    """In contrast to torch's own loss of images (nll_loss2d), which is refused on a GPU then."""
    outputs = torch.randn(4, 3, 9, 7, device=device, requires_grad=True)
    targets = torch.randint(0, 3, (4, 9, 7), device=device)
    torch.use_deterministic_algorithms(True)
    try:
        make_objective("segmentation", Facts(("a", "b", "c"), (9, 7)), {}).losses(outputs, targets).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    shares = outputs.detach().softmax(1) - torch.nn.functional.one_hot(targets, 3).permute(0, 3, 1, 2)
    torch.testing.assert_close(outputs.grad, shares)


@also_on_cpu
def test_the_default_precision_trains(train: Train, device: str) -> None:
    hp = Hyperparameters(epochs=8, batch_size=100, num_ranks=1, learning_rate=0.05)
    assert train(on_device(hp, device)).test_accuracy > 0.8


@pytest.mark.parametrize(
    ("device", "num_ranks"),
    [
        pytest.param("cpu", 2, marks=pytest.mark.exhaustive),
        pytest.param("cuda", 1, marks=needs_gpu),
        pytest.param("cuda", 2, marks=needs_two_gpus),
    ],
)
def test_a_killed_rank_is_replaced_in_place(train: Train, device: str, num_ranks: int, tmp_path, monkeypatch) -> None:
    """A single one, too, where a launcher gives it a process of its own."""
    hp = on_device(replace(HP, num_ranks=num_ranks), device)
    expected = train(hp, "undisturbed", launch=spawn.launch)
    faults.inject(monkeypatch, tmp_path / "marker", rank=num_ranks - 1, at="training", kind="SIGKILL", **{"pass": 5})
    found = train(hp, "killed", launch=spawn.launch, restarts=1, checkpoint_seconds=0.01)
    assert next(record["reason"] for record in records_of(found, "restart")).startswith("rank ")
    assert all(torch.equal(value, weights(expected)[name]) for name, value in weights(found).items())


@also_on_cpu
@pytest.mark.parametrize("optimizer", ["sgd", "own_training:precise"])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(train: Train, device: str, optimizer: str) -> None:
    hp = on_device(replace(HP, optimizer=optimizer), device)
    expected = train(hp, "undisturbed")
    cut_off(lambda: train(hp, checkpoint_seconds=1e-9), 20)
    retried = train(hp)
    assert resumed_steps(retried) == [0, 20]
    found = weights(retried)
    assert all(torch.equal(value, found[name]) for name, value in weights(expected).items())
    assert losses(retried) == losses(expected)


@also_on_cpu
@pytest.mark.parametrize(("max_steps", "optimizer"), [(17, "sgd"), (0, "sgd"), (0, "own_training:precise")])
def test_a_loss_that_is_not_finite(train: Train, tmp_path: Path, max_steps: int, optimizer: str, device: str) -> None:
    """Own optimisers do not know that they must skip the step after it."""
    hp = replace(HP, model="test_diagnosis:activation", precision="fp32", max_steps=max_steps, deterministic=False)
    hp = on_device(replace(hp, optimizer=optimizer), device)
    with pytest.raises(UserError, match=r"at epoch 1, step 17 \(first non-finite activation: the output"):
        train(hp)
    assert 14 <= saved(tmp_path / "run").step < 17


@pytest.mark.parametrize(
    ("device", "image_size", "batch_size", "epochs"),
    [
        pytest.param("cpu", 24, 100, 1, marks=pytest.mark.exhaustive),
        pytest.param("cuda", 224, 256, 50, marks=needs_gpu),
    ],
)
def test_the_time_goes_where_the_device_spends_it(
    train: Train, device: str, image_size: int, batch_size: int, epochs: int
) -> None:
    """And not to the host's waiting for it."""
    hp = replace(HP, model="resnet18", precision="fp32", deterministic=False, ema_decay=0.0)
    hp = on_device(replace(hp, image_size=image_size, batch_size=batch_size, epochs=epochs), device)
    [end] = records_of(train(hp), "end")
    seconds = end["seconds"]
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total)
    assert all(part >= -0.01 * total for part in seconds.values())
    assert seconds["forward_backward"] > 0.5 * (total - seconds["evaluation"])
    assert seconds["data"] < 0.2 * total
    assert seconds["other"] < 0.3 * total


TWO = Hyperparameters(model="faults:model", epochs=2, batch_size=100, num_ranks=2, backend="nccl", precision="fp32")
BUSY_CYCLES = 20_000_000_000  # of a GPU's clock: some ten seconds, as if a collective did not end


@needs_gpu
def test_the_host_prepares_a_batch_while_the_device_is_busy() -> None:
    device = torch.device("cuda", 0)
    arrays = images_in_memory(
        torch.zeros(1000, 8, 8, 1, dtype=torch.uint8, device=device),
        torch.zeros(1000, dtype=torch.int64, device=device),
        device,
        augment="crop_flip",
    )
    samples, this_pass = np.arange(100), TrainingPass()
    this_pass.has_dropout = True

    def prepare() -> float:
        begin = time.monotonic()
        arrays.load_batch(samples, 0)
        this_pass.begin_pass(0, 0, samples, device)
        this_pass.finish_pass()
        return time.monotonic() - begin

    prepare()  # the first time takes memory, for which the device may be waited for
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    assert prepare() < 1.0
    assert not torch.cuda.current_stream().query(), "and it is still busy"
    torch.cuda.synchronize()


@needs_gpu
@pytest.mark.parametrize("blocked", ["number", "ordinary memory"])
def test_a_busy_device_is_reported_while_the_host_is_blocked(monkeypatch: pytest.MonkeyPatch, blocked: str) -> None:
    reported: list[float] = []
    values = torch.zeros(3, device="cuda")
    monkeypatch.setattr(hang_watch, "_watch", None)
    start_hang_watch(1.0, lambda _: reported.append(time.monotonic()), torch.cuda.Event)
    begin = time.monotonic()
    with in_collective():
        torch.cuda._sleep(BUSY_CYCLES)
    if blocked == "number":
        values.sum().item()
    else:
        torch.zeros(1 << 20).to("cuda")
    unblocked = time.monotonic()
    assert len(reported) == 1
    assert begin + 1.0 <= reported[0] < unblocked


@needs_two_gpus
@pytest.mark.parametrize(
    ("strategy", "at", "rank", "number"),
    [("ddp", "training", 1, 0), ("ddp", "training", 0, 3), ("ddp", "evaluation", 1, 0)],
)
def test_a_rank_that_hangs_is_named_by_those_that_wait_in_nccl(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, at: str, rank: int, number: int
) -> None:
    faults.inject(monkeypatch, tmp_path / "marker", rank=rank, at=at, kind="hang", **{"pass": number})
    with pytest.raises(RankError) as caught:
        train(replace(TWO, strategy=strategy), timeout=5.0)
    assert time.time() - float((tmp_path / "marker").read_text()) < 30, "before NCCL itself, a minute later"
    assert caught.value.recoverable
    words = f"rank {rank} did not reach the collective operation in which rank {1 - rank} waited for 5 s"
    assert words in str(caught.value)
    assert "in hang" in str(caught.value)
