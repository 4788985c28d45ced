"""A launcher whose agents are processes of this machine, as a stand-in for engines that start them elsewhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from flyte_ddp.job import Job, Place
from flyte_ddp.launch import agent
from flyte_ddp.launch.remote import meeting_place


def launch(job: Job, *, num_ranks: int, shared: bool = True) -> None:
    """Runs the job; where nothing is shared, no agent sees the launcher's run folder or its prepared data."""
    seen = job if shared else replace(job, data=Path("/nowhere/data"))
    with meeting_place(seen, "127.0.0.1") as meeting, ThreadPoolExecutor(num_ranks) as pool:
        for rank in range(num_ranks):
            invitation = meeting.invitation(Place(rank, num_ranks, device=rank))
            pool.submit(agent.run, invitation if shared else replace(invitation, run_folder=Path("/nowhere/run")))
        meeting.run(num_ranks, lambda: None)


def launch_apart(job: Job, *, num_ranks: int) -> None:
    """The same with nothing shared."""
    launch(job, num_ranks=num_ranks, shared=False)
