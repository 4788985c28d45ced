"""A launcher whose agents are processes of this machine, as a stand-in for engines that start them elsewhere."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from flyte_ddp.core.errors import UnreachableError
from flyte_ddp.core.launch.engine import JoinTicket, RankEndedError, RankInfo, open_rendezvous, run_agent
from flyte_ddp.core.machine.resources import detect_world
from flyte_ddp.core.runs.work import Work

NOWHERE = Path("/nowhere")


def launch(work: Work, *, retries: int = 0) -> None:
    """Run the work on agents that cannot see the run folder or a training's data.

    An agent that fails is restarted up to ``retries`` times.
    """
    work = work.choose_world(detect_world)
    num_ranks = work.world.num_ranks
    if hasattr(work.arguments, "data"):
        work = replace(work, arguments=replace(work.arguments, data=NOWHERE))
    with ThreadPoolExecutor(num_ranks) as pool, open_rendezvous(work, "127.0.0.1") as rendezvous:
        infos = [RankInfo(rank, num_ranks, rank, work.function, "cpu") for rank in range(num_ranks)]
        tickets = [rendezvous.make_ticket(info) for info in infos]
        sent = [pool.submit(send, replace(each, output_folder=NOWHERE), retries) for each in tickets]
        rendezvous.run_ranks(lambda: refuse_failed(sent))


def send(ticket: JoinTicket, retries: int) -> None:
    """Run an agent for a ticket, and restart the agent up to ``retries`` times."""
    try:
        run_agent(ticket.to_stdin())
    except RankEndedError:
        if not retries:
            raise
        send(ticket, retries - 1)


def refuse_failed(sent: Sequence[Future[None]]) -> None:
    if any(each.done() and each.exception() for each in sent):
        raise UnreachableError("an agent will not come")
