"""A launcher whose agents are processes of this machine, as a stand-in for engines that start them elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from flyte_ddp.errors import UnreachableError
from flyte_ddp.job import Job
from flyte_ddp.launch import agent
from flyte_ddp.launch.place import Place
from flyte_ddp.launch.remote import Invitation, meeting_place

NOWHERE = Path("/nowhere")


def launch(job: Job, *, num_ranks: int, retries: int = 0) -> None:
    """Runs the job; no agent sees the launcher's run folder or its prepared data.

    Args:
        retries: how often an agent is sent once more.
    """
    with meeting_place(replace(job, data=NOWHERE), "127.0.0.1") as meeting, ThreadPoolExecutor(num_ranks) as pool:
        invitations = [meeting.invitation(Place(rank, num_ranks, device=rank)) for rank in range(num_ranks)]
        sent = [pool.submit(send, replace(each, run_folder=NOWHERE), retries) for each in invitations]
        try:
            meeting.run(num_ranks, lambda: refuse_failed(sent))
        finally:
            meeting.close()


def send(invitation: Invitation, retries: int) -> None:
    """Sends an agent."""
    try:
        agent.run(invitation)
    except agent.RankEndedError:
        if not retries:
            raise
        send(invitation, retries - 1)


def refuse_failed(sent: Sequence[Future[None]]) -> None:
    if any(each.done() and each.exception() for each in sent):
        raise UnreachableError("an agent will not come")
