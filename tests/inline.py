"""A launcher for one rank that runs in the test's own process, which has imported torch already."""

from __future__ import annotations

import torch

from flyte_ddp.job import Job
from flyte_ddp.launch import spawn


def launch(job: Job, *, num_ranks: int) -> None:
    """Runs one rank here, more than one as usual."""
    if num_ranks > 1:
        spawn.launch(job, num_ranks=num_ranks)
        return
    from flyte_ddp.train import train

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(job.hardware.threads)
    try:
        train(job)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
