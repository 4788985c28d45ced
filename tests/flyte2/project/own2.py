"""A user's own tasks of Flyte 2, whose bodies run on ranks."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import flyte
from flyte.io import File

import flyte_ddp
from flyteplugins.ddp import DDP
from flyteplugins.ddp.platform import task

env = flyte.TaskEnvironment(name="own", plugin_config=DDP(num_ranks=2))


@dataclass
class Stats:
    """A sum over the ranks, the number of ranks, and a file of rank 0."""

    total: float
    ranks: int
    model: File


@env.task
def add_up(start: int, data: File) -> Stats:
    """Add up over the ranks, by a process group of the user's. Rank 0 returns a dataclass with a file."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(total)
    here = flyte_ddp.current_rank()
    here.record(1, loss=2.5)
    model = here.folder / "model.txt"
    if dist.get_rank() == 0:
        model.write_text(f"{Path(data.path).read_text()} {total.item()}")
    stats = Stats(total.item(), dist.get_world_size(), File(path=str(model)))
    dist.destroy_process_group()
    return stats


@env.task
async def fail(how: str) -> int:
    """An async body, which returns the rank's number plus 40, or fails on rank 1."""
    rank = flyte_ddp.current_rank().rank
    if how == "raise" and rank == 1:
        raise LookupError("rank 1 cannot do that")
    return 40 + rank


@env.task
def learn(steps: int) -> list[int]:
    """Save each step. Without a saved step, rank 1 dies after step 3. Returns the steps that this attempt did."""
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
        dist.barrier()
        if step == 3 and rank.rank == 1 and not state["step"]:
            os.kill(os.getpid(), signal.SIGKILL)
    return done


@env.task
def go_on() -> int:
    """Go on until the command is stopped. A later run returns the saved step."""
    rank = flyte_ddp.current_rank()
    saved = (rank.load() or {"step": 0})["step"]
    step = saved
    while not saved:
        step += 1
        if step == 1 or rank.due():
            rank.save(step, {"step": step})
        time.sleep(0.001)
    return step


plain = flyte.TaskEnvironment(name="plain")


@task(plain)
def wait_for_ever(begun: str) -> int:
    """Make the file ``begun``, and wait in this process, as a judgement does between two files."""
    Path(begun).touch()
    while True:
        time.sleep(1)


@task(plain)
async def wait_for_another_task(begun: str) -> int:
    """Make the file ``begun``, and wait as for an awaited task. If the waiting is cancelled, delete the file.

    The SDK would abort the awaited task.
    """
    Path(begun).touch()
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        Path(begun).unlink()
        raise
    return 0


@env.task
def never_save(begun: str) -> int:
    """Save once, make the file ``begun`` on rank 0, and then look at no request to stop."""
    rank = flyte_ddp.current_rank()
    rank.join()
    rank.load()
    rank.save(1, {"done": 1})
    rank.due()  # from here on, a request to stop waits for rank 0
    if rank.rank == 0:
        Path(begun).touch()
    while True:
        time.sleep(1)
