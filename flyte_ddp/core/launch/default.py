"""The default launcher of a run."""

from flyte_ddp.core.launch import single, spawn
from flyte_ddp.core.machine.resources import Request, detect_world
from flyte_ddp.core.runs.work import Launch


def choose_launcher(request: Request) -> Launch:
    """Return the ``launch`` of :mod:`single` if one rank will run, else the ``launch`` of :mod:`spawn`.

    For ``num_ranks`` 0, the number depends on this machine's GPUs and cores.

    Raises:
        UserError: The machine has too few GPUs for the request, or another number of GPUs than FLYTE_DDP_GPUS.
    """
    return single.launch if detect_world(request).num_ranks == 1 else spawn.launch
