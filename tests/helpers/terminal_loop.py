"""A program whose ranks take steps until a file ``end`` exists: ``python terminal_loop.py spawn|elastic``."""

import sys
from pathlib import Path

import torch
from torch import distributed as dist

from flyte_ddp import current_rank, run_ranks
from flyte_ddp.core.launch import spawn
from flyte_ddp.engines import elastic


def train() -> int:
    rank = current_rank()
    dist.init_process_group("gloo")
    step = (rank.load() or {"step": 0})["step"]
    print(f"rank {rank.rank} begins after step {step}", flush=True)
    ended = False
    while not ended:
        flag = torch.tensor([int(Path("end").exists())])
        dist.all_reduce(flag)
        ended = bool(flag)
        step += 1
        if rank.rank == 0 and step == 3:
            Path("started").touch()
        if rank.due():
            rank.save(step, {"step": step})
    return step


if __name__ == "__main__":
    launch = {"elastic": elastic.launch, "spawn": spawn.launch}[sys.argv[1]]
    Path("result").write_text(str(run_ranks(train, num_ranks=2, folder="run", launch=launch)))
