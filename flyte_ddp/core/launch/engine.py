"""All that a launcher for an engine uses, such as Ray: agents on other hosts, and the rendezvous that gathers them.

The launcher opens a rendezvous, and makes a ticket for each rank. The engine calls ``run_agent`` once for each rank,
with the ticket, on the host where the rank is to run. Then the launcher calls ``Rendezvous.run_ranks``. A short example
is in tests/helpers/agents.py.

- ``open_rendezvous`` gets the addresses at which the agents' hosts reach this host.
- ``pods/profiles.ENGINES`` lists the engines of Flyte's tasks.
- An agent gets its ticket on stdin. The end of stdin shows the agent that the engine has ended the task.
- When the launcher requests a restart, a living agent starts its rank again.
- ``RankInfo.device_type`` decides whether an agent may fork a process with torch.
- After RankEndedError, the engine starts the agent again, up to ``retries`` times.
- ``check_engine`` raises UnreachableError when an agent will not come (again).
- Agents end when the connection ends. So the rendezvous closes before the engine waits for agents or kills agents.
- ``RankInfo.local_rank`` is the number of a GPU among the GPUs of the agent's process.
- ``engines/capacity.py`` waits for hosts, and reduces the number of ranks to the capacity.
"""

from typing import Protocol

from flyte_ddp.core.launch.remote.agent import (
    RankEndedError,
    agent_start_error,
    open_rank_restarter,
    run_agent,
    start_agent,
)
from flyte_ddp.core.launch.remote.connection import JoinTicket, connect_to_launcher, open_local_folder
from flyte_ddp.core.launch.remote.proxy import LauncherGoneError, proxy_rank
from flyte_ddp.core.launch.remote.remote_handle import END_SECONDS
from flyte_ddp.core.launch.remote.rendezvous import Rendezvous, Replacement, derive_key, open_rendezvous
from flyte_ddp.core.launch.remote.sources import pack_sources
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.network import LOOPBACK, host_addresses
from flyte_ddp.core.runs.work import Work

__all__ = [
    "END_SECONDS",
    "LOOPBACK",
    "EngineLaunch",
    "JoinTicket",
    "LauncherGoneError",
    "RankEndedError",
    "RankInfo",
    "Rendezvous",
    "Replacement",
    "agent_start_error",
    "connect_to_launcher",
    "derive_key",
    "host_addresses",
    "open_local_folder",
    "open_rank_restarter",
    "open_rendezvous",
    "pack_sources",
    "proxy_rank",
    "run_agent",
    "start_agent",
]


class EngineLaunch(Protocol):
    """The ``launch`` of an engine on whose cluster Flyte runs tasks."""

    def __call__(self, work: Work, *, retries: int = 0, awaited_hosts: int = 0) -> None:
        """Run the work on the engine's hosts, and wait for the end.

        First waits for ``awaited_hosts`` hosts, as of a new cluster. The engine starts failed agents again up to
        ``retries`` times. Raises the errors of all launchers (:mod:`flyte_ddp.core.launch`).
        """
