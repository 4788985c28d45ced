"""How many ranks a cluster has room for, and on what devices."""

from __future__ import annotations

import sys

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError


def device_type(hp: Hyperparameters, has_gpus: bool, lack: str) -> str:
    """``cuda`` or ``cpu``.

    Args:
        has_gpus: whether there is a GPU for each rank.
        lack: what there is if not, in words.

    Raises:
        UserError: GPUs were asked for, and there are none.
    """
    if hp.backend == "nccl" and not has_gpus:
        raise UserError(f"backend='nccl': needs a GPU for each rank, but {lack}; use backend='gloo' or 'auto'")
    return "cuda" if has_gpus and hp.backend != "gloo" else "cpu"


def limited(hp: Hyperparameters, room: int, what: str, most: int) -> int:
    """As many ranks as were asked for, but no more than there is room for; where that is fewer, it is said.

    Args:
        room: for how many.
        what: there is, in words.
        most: ranks where no number was asked for.

    Raises:
        UserError: there is no room at all.
    """
    if room < 1:
        raise UserError(f"{what}: there is no room for a single rank; add workers, or wait until there are some")
    if hp.num_ranks > room:
        print(f"num_ranks={hp.num_ranks}: {what}, so there will be {room}", file=sys.stderr, flush=True)
    return min(hp.num_ranks or most, room)
