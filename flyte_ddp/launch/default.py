"""The default launcher of a run."""

from flyte_ddp.launch import single, spawn
from flyte_ddp.machine.resources import Request, detect_world
from flyte_ddp.runs.work import Launch


def choose_launcher(request: Request) -> Launch:
    """Return single's ``launch`` for one rank, else spawn's.

    Raises:
        UserError: This machine has too few GPUs for the ranks.
    """
    return single.launch if detect_world(request).num_ranks == 1 else spawn.launch
