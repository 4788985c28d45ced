"""A launcher whose agents are processes of this machine, as a stand-in for engines that start them elsewhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from flyte_ddp.job import Job, Place
from flyte_ddp.launch import agent
from flyte_ddp.launch.remote import meeting_place

NOWHERE = Path("/nowhere")


def launch(job: Job, *, num_ranks: int) -> None:
    """Runs the job; no agent sees the launcher's run folder or its prepared data."""
    with meeting_place(replace(job, data=NOWHERE), "127.0.0.1") as meeting, ThreadPoolExecutor(num_ranks) as pool:
        for rank in range(num_ranks):
            invitation = meeting.invitation(Place(rank, num_ranks, device=rank))
            pool.submit(agent.run, replace(invitation, run_folder=NOWHERE))
        meeting.run(num_ranks, lambda: None)
