"""A user-defined function with a rank that is killed in the middle, on any launcher."""

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
    """Call a function, and kill a rank at the end of the optimizer's step ``step``, after a state has been saved.

    The killed rank creates the file ``marker``. If the file exists, the rank is not killed. All ranks compute with one
    thread, which gives the same bits on all launchers.
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
