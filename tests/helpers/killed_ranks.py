"""A function of somebody else's in whose middle a rank is killed, on any launcher."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import wait_until
from torch.optim.optimizer import register_optimizer_step_post_hook

from flyte_ddp import current_rank


def call_and_kill(function: Callable[..., Any], rank: int, step: int, marker: str, *arguments: Any) -> Any:
    """Call a function. At the end of an optimizer's step number ``step`` kill a rank, once a state has been saved.

    The rank leaves the file ``marker`` then, and is not killed where that is there. It computes with one thread, as all
    do, so that runs on all launchers have the same bits.
    """
    here, steps = current_rank(), itertools.count(1)
    torch.set_num_threads(1)

    def kill(*_: object) -> None:
        if next(steps) == step and not Path(marker).exists():
            wait_until(lambda: [*(here.folder / "checkpoints").glob("*.ckpt")])
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    handle = register_optimizer_step_post_hook(kill if here.rank == rank else lambda *_: None)
    try:
        return function(*arguments)
    finally:
        handle.remove()
