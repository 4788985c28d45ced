"""What only GPUs can show of hangs: the host does not wait where it must not, and says in time for whom it waits."""

import time
from dataclasses import replace
from pathlib import Path

import faults
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cli import HELPERS
from faulty_runs import in_spawned_processes
from ranks import run_ranks
from test_gpu import losses

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import RankError
from flyte_ddp.loading.arrays import ArrayImages
from flyte_ddp.parallel import hang_watch
from flyte_ddp.parallel.distributed import gather_objects, sum_over_ranks
from flyte_ddp.parallel.hang_watch import HangWatch, in_collective, watch_collectives
from flyte_ddp.parallel.training_pass import TrainingPass
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

QUIET = Settings(progress="off", wandb_mode="disabled", timeout=5.0)
HP = Hyperparameters(model="faults:model", epochs=2, batch_size=100, num_ranks=2, backend="nccl", precision="fp32")
BUSY_CYCLES = 20_000_000_000  # of a GPU's clock: some ten seconds, as if a collective did not end


def test_the_host_prepares_a_batch_while_the_device_is_busy() -> None:
    device = torch.device("cuda", 0)
    arrays = ArrayImages(
        torch.zeros(1000, 8, 8, 1, dtype=torch.uint8, device=device),
        torch.zeros(1000, dtype=torch.int64, device=device),
        augment="crop_flip",
    )
    samples, this_pass = np.arange(100), TrainingPass()

    def prepare() -> float:
        begin = time.monotonic()
        arrays.gather(samples, 0)
        this_pass.begin_pass(0, 0, samples, device)
        this_pass.finish_pass()
        return time.monotonic() - begin

    prepare()  # the first time takes memory, for which the device may be waited for
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    assert prepare() < 1.0
    assert not torch.cuda.current_stream().query(), "and it is still busy"
    torch.cuda.synchronize()


@pytest.mark.parametrize("blocked", ["number", "ordinary memory"])
def test_a_busy_device_is_reported_while_the_host_is_blocked(monkeypatch: pytest.MonkeyPatch, blocked: str) -> None:
    reported: list[float] = []
    values = torch.zeros(3, device="cuda")
    monkeypatch.setattr(hang_watch, "_watch", None)
    watch_collectives(1.0, lambda _: reported.append(time.monotonic()), torch.cuda.Event)
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


def test_what_the_device_has_done_is_not_reported() -> None:
    watch = HangWatch(60.0, pytest.fail, torch.cuda.Event)
    for _ in range(100):
        with watch.in_collective():
            torch.zeros(3, device="cuda").sum()
    torch.cuda.synchronize()
    assert not watch.has_overdue_collective()
    assert not watch.entered


def come_late(_: Path) -> None:
    """Both ranks on one GPU; rank 1 comes only when rank 0 has reported that it does not."""
    store = dist.distributed_c10d._get_default_store()
    torch.cuda.set_device(0)
    collectives = {
        "sum": lambda: sum_over_ranks(torch.zeros(3, device="cuda")),
        "objects": lambda: gather_objects("value"),
    }
    for name, collective in collectives.items():
        if dist.get_rank() == 0:
            watch_collectives(1.0, lambda error, name=name: store.set(name, str(error)), torch.cuda.Event)
        else:
            store.wait([name])
        collective()


def test_ranks_of_gloo_on_one_gpu(tmp_path: Path) -> None:
    assert run_ranks(come_late, tmp_path, 2) == [0, 0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("strategy", "at", "rank", "number"),
    [("ddp", "training", 1, 0), ("ddp", "training", 0, 3), ("hooks", "training", 1, 3), ("ddp", "evaluation", 1, 0)],
)
def test_a_rank_that_hangs_is_named_by_those_that_wait_in_nccl(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, at: str, rank: int, number: int
) -> None:
    monkeypatch.chdir(HELPERS)
    faults.inject(monkeypatch, tmp_path / "marker", rank=rank, at=at, kind="hang", **{"pass": number})
    with pytest.raises(RankError) as caught:
        run_training(replace(HP, strategy=strategy), digits, tmp_path / "run", QUIET)
    assert time.time() - float((tmp_path / "marker").read_text()) < 30, "before NCCL itself, a minute later"
    assert caught.value.recoverable
    assert f"rank {rank} did not come where rank {1 - rank} waited for 5 s" in str(caught.value)
    assert "in hang" in str(caught.value)


HANGS_EARLY = """
from flyte_ddp.launch.supervise import rank
join = rank.join_process_group
def hang_or_join(job, info, *others):
    while info.rank == 1:
        time.sleep(0.01)
    join(job, info, *others)
rank.join_process_group = hang_or_join
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_hangs_before_nccl_has_connected_it(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HELPERS)
    in_spawned_processes(monkeypatch, tmp_path, HANGS_EARLY)
    with pytest.raises(RankError, match="rank 1 did not come where rank 0 waited for 5 s"):
        run_training(HP, digits, tmp_path / "run", QUIET)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_what_two_cpu_ranks_do(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HELPERS)
    hp = replace(HP, model="small_cnn", precision="fp64", deterministic=True, log_interval=1)
    on_gpus = run_training(hp, digits, tmp_path / "gpus", QUIET)
    on_cpus = run_training(replace(hp, backend="gloo"), digits, tmp_path / "cpus", QUIET)
    assert losses(on_gpus.metrics) == pytest.approx(losses(on_cpus.metrics), abs=1e-9)
    assert on_gpus.test_accuracy == on_cpus.test_accuracy
