"""A task with a training loop of a user's own; test_cluster.py runs it in a pod, which it deletes in the middle."""

import time
from typing import NamedTuple

import torch
from flytekit import task
from flytekit.types.file import FlyteFile

from flyte_ddp import current_rank
from flytekitplugins.ddp import DDP

SAVE_STEPS = 10


class Totals(NamedTuple):
    """What the task returns; ``totals`` has a line for the start and for each step."""

    step: int
    resumed_after_step: int
    totals: FlyteFile


@task(task_config=DDP(num_ranks=2))
def add_up(seed: int, num_steps: int, step_seconds: float) -> Totals:
    """Replace a total by the sum of what the ranks make of it, again and again; a step lost or done twice shows."""
    rank = current_rank()
    rank.join()
    state = rank.load() or {"step": 0, "totals": [seed]}
    resumed_after_step, totals = state["step"], state["totals"]
    for step in range(resumed_after_step + 1, num_steps + 1):
        share = torch.tensor((rank.rank + 1) * totals[-1] + step, device=rank.device)
        torch.distributed.all_reduce(share)
        totals.append(share.item() % 2**31)
        time.sleep(step_seconds)
        rank.record(step, total=totals[-1])
        if rank.rank == 0 and (step % SAVE_STEPS == 0 or rank.due()):
            rank.save(step, {"step": step, "totals": totals})
    file = rank.folder / "totals.txt"
    if rank.rank == 0:
        file.write_text("\n".join(map(str, totals)))
    return Totals(num_steps, resumed_after_step, FlyteFile(str(file)))
