"""A user's own project: tasks whose bodies run on ranks."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flytekit import Deck, Resources, Secret, dynamic, map_task, task, workflow
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.file import FlyteFile

import flyte_ddp
from flytekitplugins.ddp import DDP

SMALL = Resources(cpu="2", mem="2Gi")
ATTEMPT = int(os.environ.get("FLYTE_ATTEMPT_NUMBER") or 0)


@dataclass
class Stats:
    total: float
    ranks: int


class Outputs(NamedTuple):
    stats: Stats
    model: FlyteFile


def add_up(value: float) -> Stats:
    """Add up a value over the ranks, each of which joins the others."""
    import torch
    import torch.distributed as dist

    rank = flyte_ddp.current_rank()
    rank.join()
    total = torch.tensor([value])
    dist.all_reduce(total)
    return Stats(total.item(), rank.world_size)


@task(task_config=DDP(num_ranks=2), requests=SMALL, limits=SMALL)
def train(start: int, data: FlyteFile) -> Outputs:
    """Rank 0 returns a dataclass and a file; all ranks read the data."""
    rank = flyte_ddp.current_rank()
    content = Path(data).read_text()
    stats = add_up(float(start + rank.rank))
    rank.record(1, loss=2.5)
    rank.record(2, loss=1.25)
    if rank.rank:
        return None
    Deck("mine", f"<p>made on rank 0 of {rank.world_size}</p>")
    model = rank.folder / "model.txt"
    model.write_text(f"{content} {stats.total}")
    return Outputs(stats, FlyteFile(str(model)))


@task(task_config=DDP(num_ranks=2))
def fail(how: str) -> int:
    """Fail on rank 1; ``how`` says in which way."""
    if flyte_ddp.current_rank().rank == 1:
        if how == "raise":
            raise ValueError("rank 1 cannot do that")
        raise FlyteRecoverableException("try that again")
    return 1


@task(task_config=DDP(num_ranks=1))
def measure() -> float:
    """Save a step, and return a text for a number."""
    rank = flyte_ddp.current_rank()
    rank.save((rank.load() or {"step": 0})["step"] + 1, {"step": 1})
    return "high"


@task(task_config=DDP(num_ranks=2), cache=True, cache_version="1", cache_ignore_input_vars=("note",), retries=3)
def learn(steps: int, note: str = "") -> list[int]:
    return learn_steps(steps)


@task(task_config=DDP(num_ranks=2, engine="elastic"), retries=3)
def learn_on_elastic(steps: int) -> list[int]:
    return learn_steps(steps)


def learn_steps(steps: int) -> list[int]:
    """Save each step; in the first attempt rank 1 dies after step 3. Returns the steps that this attempt did."""
    import torch.distributed as dist

    rank = flyte_ddp.current_rank()
    rank.join()
    state = rank.load() or {"step": 0}
    done = []
    for step in range(state["step"] + 1, steps + 1):
        dist.barrier()
        rank.save(step, {"step": step})
        rank._checkpoints.wait_until_written()
        done.append(step)
        if step == 3 and ATTEMPT == 0 and rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return done


@task(task_config=DDP(num_ranks=2), secret_requests=[Secret("team", "wandb-key")])
def go_on() -> int:
    """In the first attempt go on until the pod is told to stop. Returns the step from which the second one goes on."""
    rank = flyte_ddp.current_rank()
    step = (rank.load() or {"step": 0})["step"]
    while ATTEMPT == 0:
        step += 1
        if step == 1 or rank.due():
            rank.save(step, {"step": step})
        time.sleep(0.001)
    return step


@task(task_config=DDP(num_ranks=1))
def square(value: int) -> int:
    return value * value


@workflow
def squares(values: list[int]) -> list[int]:
    return map_task(square)(value=values)


@dynamic
def many(number: int) -> list[int]:
    return [square(value=value) for value in range(number)]


@task(task_config=DDP(num_ranks=2, nodes=2, engine="elastic"), requests=SMALL, limits=SMALL)
def on_elastic(value: int) -> Outputs:
    return hand_over(value)


@task(task_config=DDP(num_ranks=2, nodes=2, engine="ray"), requests=SMALL, limits=Resources(cpu="4"))
def on_ray(value: int) -> Outputs:
    return hand_over(value)


@task(task_config=DDP(nodes=2, engine="dask"), requests=SMALL, limits=Resources(cpu="4", mem="4Gi", gpu="2"))
def on_dask(value: int) -> Outputs:
    return hand_over(value)


@task(task_config=DDP(num_ranks=2, engine="dask"))
def on_dask_here(value: int) -> Outputs:
    return hand_over(value)


def hand_over(value: int) -> Outputs:
    rank = flyte_ddp.current_rank()
    stats = add_up(float(value))
    if rank.rank:
        return None
    model = rank.folder / "model.txt"
    model.write_text(f"{stats.total}")
    return Outputs(stats, FlyteFile(str(model)))
