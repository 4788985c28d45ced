"""User-defined functions for run_ranks: ranks find, save and return values, and fail."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flyte_ddp import current_rank
from flyte_ddp.core import results

TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)


@dataclass
class Outcome:
    """A value that a function may return."""

    step: int
    weights: torch.Tensor


def give_back(value: Any = None, *more: Any, **named: Any) -> Any:
    return [value, *more, named] if more or named else value


def delete_records() -> str:
    """Record a value, and delete the run's own file of records."""
    current_rank().record(1, loss=0.5)
    (current_rank().folder / "metrics.jsonl").unlink()
    return "the value"


def give(kind: str) -> Any:
    """Return a value of the kind on rank 0. Other ranks return a lock."""
    if current_rank().rank:
        return threading.Lock()
    return {"none": None, "tensor": torch.arange(3.0), "dataclass": Outcome(3, torch.ones(2))}[kind]


def describe_place() -> list[dict[str, Any]]:
    """Return environment, process, folder and group of each rank."""
    rank = current_rank()
    rank.join()
    mine = {
        "place": (rank.rank, rank.world_size, rank.local_rank, rank.device.type),
        "environment": {name: os.environ[name] for name in TORCHRUN},
        "process": os.getpid(),
        "folder": rank.folder.is_dir(),
        "group": (dist.get_rank(), dist.get_world_size()),
    }
    every: list[Any] = [None] * rank.world_size
    dist.all_gather_object(every, mine)
    return every


def make_groups(times: int = 3) -> list[float]:
    """Create process groups one after the other, with torch or ``join()``, and all-reduce in each."""
    sums = []
    for count in range(times):
        if count % 2:
            current_rank().join()
        else:
            dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(total.item())
        dist.destroy_process_group()
    return sums


def start_group(then: str) -> None:
    """Leave a process group and changed settings behind, and raise if ``then`` is "raise"."""
    rank = current_rank()
    rank.join()
    torch.set_num_threads(3)
    os.environ["MASTER_PORT"] = "1"
    if then == "raise":
        raise ArithmeticError("own words")


def fail() -> None:
    raise ArithmeticError("own words")


def fail_in_backward(who: int = 1) -> None:
    """Fail on one rank after three passes. The other ranks wait in the backward pass."""
    rank = current_rank()
    rank.join()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
    for count in range(1000):
        if rank.rank == who and count == 3:
            fail()
        model(torch.ones(4, 8)).sum().backward()


def save_wrong(kind: str) -> None:
    """Save a state that cannot be saved."""
    import numpy as np

    rank = current_rank()
    if kind == "later":
        rank.save(1, {"best": 0.5})
    states: dict[str, Any] = {"list": [1], "later": {"best": np.float64(0.5)}}
    states["inner"] = {"model": {"weight": torch.ones(3), "rule": Outcome(1, torch.ones(1))}}
    rank.save(2, states[kind])


def step_back(what: str) -> None:
    rank = current_rank()
    start = rank.load()
    call = rank.save if what == "save" else lambda step, _: rank.record(step, x=1)
    call(3 if start is None else start["step"] - 1, {"step": 3})
    call(2, {"step": 2})


def train(steps: int, fail_at: int = 0, marker: str = "", size: int = 4) -> dict[str, Any]:
    """Add up 1 to ``steps`` in each number of a tensor. Rank 1 is killed once, unless the marker exists.

    Returns the sum, and the state at the start of this attempt on each rank.
    """
    rank = current_rank()
    rank.join()
    state = rank.load() or {"step": 0, "sum": torch.zeros(size)}
    begun = [0] * rank.world_size
    dist.all_gather_object(begun, (state["step"], state["sum"][-1].item()))
    for step in range(state["step"] + 1, steps + 1):
        total = torch.full((size,), float(step))
        dist.all_reduce(total)
        state = {"step": step, "sum": state["sum"] + total / rank.world_size}
        rank.record(step, total=state["sum"][0])
        rank.save(step, state)
        if step == fail_at and not (marker and Path(marker).exists()):
            rank._checkpoints.wait_until_written()
            if rank.rank == 1:
                Path(marker or os.devnull).write_text("failed")
                os.kill(os.getpid(), signal.SIGKILL)
    if rank.rank == 0:
        (rank.folder / "own").mkdir(exist_ok=True)
        (rank.folder / "own/model.txt").write_text(str(state["sum"][0].item()))
        results.submit("maps/last.txt", b"3")
        results.event(step=steps)
    return {"sum": state["sum"][0].item(), "begun": begun}


def wait_for_stop(kind: str, marker: str) -> Any:
    """Run until this process is stopped. Save whenever a save is due, or once and never again."""
    rank = current_rank()
    state = rank.load()
    if state is not None:
        return state["step"]
    for step in range(1, 100_000):
        time.sleep(0.01)
        asked = rank.due()
        if kind == "slow" and asked:
            time.sleep(1000)
        if (kind == "due" and asked) or (kind == "slow" and step == 5):
            rank.save(step, {"step": step})
        if step == 20 and rank.rank == 0:
            Path(marker).write_text(str(time.time()))
    return None


def record(**values: Any) -> None:
    current_rank().record(3, **values)


def record_values() -> None:
    """Record each kind of number."""
    import numpy as np

    rank = current_rank()
    rank.record(1, number=1, real=0.5, flag=True, tensor=torch.tensor(2), loss=torch.ones(1, requires_grad=True) * 3)
    rank.record(1, array=np.ones(1), single=np.float32(0.5), nothing=float("nan"), endless=float("inf"))
    rank.record(2, real=0.25)


def record_extremes() -> str:
    """Record values that a chart cannot show, and unusual names. Return a text."""
    import numpy as np

    rank = current_rank()
    rank.record(1, huge=10**400, wide=1.7e308, count=np.uint64(2**64 - 1), flag=np.bool_(True))
    rank.record(2, wide=-1.7e308, **{"\ud800 <b>": 1.0, "loss": 5e-324})
    rank.record(3, loss=1e249)
    return "the value"


def draw(steps: list[int]) -> list[Any]:
    """Return the random numbers of each kind that each rank draws in these steps."""
    import random

    import numpy as np

    rank, drawn = current_rank(), []
    rank.join()
    for step in steps:
        rank.seed_step(step, seed=5)
        noise = nn.functional.dropout(torch.ones(64, device=rank.device)).tolist()
        drawn.append((noise, torch.rand(1).item(), np.random.rand(), random.random()))  # noqa: NPY002
    every: list[Any] = [None] * rank.world_size
    dist.all_gather_object(every, drawn)
    return every


def save_on_all_ranks() -> Any:
    """Return an earlier attempt's state. Without a state, save on all ranks, and then load."""
    rank = current_rank()
    if (state := rank.load()) is not None:
        return state
    for step in range(1, 4):
        rank.save(step, {"of": rank.rank})
    rank._checkpoints.wait_until_written()
    rank.join()
    dist.barrier()
    return rank.load()


def return_late(seconds: float) -> str:
    """Return after ``seconds`` on rank 0, and immediately on other ranks."""
    if current_rank().rank == 0:
        time.sleep(seconds)
    return "late"


def load_into_a_model(size: int) -> Any:
    """Save a state of ``size`` bytes and fail. In the next attempt, load the state into a model on each rank.

    Returns by rank the additional bytes at the peak and at the end, and the sum of the model's values. At the end,
    pages that several ranks share count in part (PSS).
    """
    rank = current_rank()
    rank.join()
    model = torch.zeros(size // 4)
    if rank.rank == 0 and rank._checkpoints.newest is None:
        rank.save(1, {"model": torch.ones(size // 4)})
        raise RuntimeError("the first attempt fails")
    dist.barrier()
    before = [read_bytes("smaps_rollup", "Pss"), read_bytes("status", "VmRSS")]
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    dist.barrier()
    state = rank.load()
    assert state is not None
    model.copy_(state["model"])
    dist.barrier()
    found = [read_bytes("smaps_rollup", "Pss") - before[0], read_bytes("status", "VmHWM") - before[1]]
    dist.barrier()
    every: list[Any] = [None] * rank.world_size
    dist.all_gather_object(every, [*found, float(model.sum())])
    return every


def read_bytes(file: str, name: str) -> int:
    """Return a figure of this process that Linux reports in kB."""
    lines = Path("/proc/self", file).read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
