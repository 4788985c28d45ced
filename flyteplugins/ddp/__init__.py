"""The configuration ``TaskEnvironment(plugin_config=DDP(num_ranks=2))`` of tasks whose body runs on several ranks.

For Flyte 2. The outputs of the tasks are the return values of rank 0.
"""

import os
import signal
import sys
from dataclasses import dataclass

import click
from flyte.extend import TaskPluginRegistry

from flyte_ddp.core.errors import UserError, print_to_stderr
from flyte_ddp.core.launch.supervise.stopping import forward_stop_signals
from flyte_ddp.pods.outcomes import describe_ended_run
from flyte_ddp.pods.platforms import is_in_pod
from flyteplugins.ddp.task import DDPTask

__all__ = ["DDP"]


@dataclass(frozen=True)
class DDP:
    """Number of ranks that run a task's body in the task's pod. Restarts after a failure follow Flyte's ``retries=``.

    Args:
        num_ranks: Number of ranks. 0 starts a rank for each visible GPU, else for each CPU, up to 4.

    Raises:
        UserError: The number is invalid.
    """

    num_ranks: int = 0

    def __post_init__(self) -> None:
        if type(self.num_ranks) is not int or self.num_ranks < 0:
            raise UserError(f"num_ranks={self.num_ranks!r}: must be a number of ranks, or 0 for a rank on each GPU")


def is_local_command() -> bool:
    """Return whether this process is the command ``flyte`` with an option for a local run."""
    is_command = click.get_current_context(silent=True) is not None
    return is_command and not {"--local", "--tracked"}.isdisjoint(sys.argv)


def end_command(*_: object) -> None:
    """End the process after a Ctrl-C, without waiting for the thread of the task."""
    print_to_stderr(f"\n{describe_ended_run(KeyboardInterrupt())}")
    os._exit(1)


TaskPluginRegistry.register(DDP, DDPTask)
if not is_in_pod():
    # The body of a local run is not in the main thread. After a Ctrl-C the SDK's command would end the main thread, and
    # the body would fail in the middle of its work with tracebacks.
    if is_local_command():
        signal.signal(signal.SIGINT, end_command)
    forward_stop_signals()
