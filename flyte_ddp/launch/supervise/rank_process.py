"""A rank as a process of its own: signals, the launcher's death, and its report, around :func:`run_rank`.

Needs no torch until the rank can report that importing it failed.
"""

import faulthandler
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from flyte_ddp.launch.supervise.link import Link
from flyte_ddp.launch.supervise.stopping import SIGNALS, call_on_signals
from flyte_ddp.process import die_with_parent, set_name


@dataclass(frozen=True)
class RankInfo:
    """The place of a rank among those of its run."""

    rank: int
    world_size: int
    local_rank: int  # the number of its GPU, of those that its process sees
    store: str = ""  # a file by which ranks that are all on one host find each other


def start_rank(info: RankInfo, pipe: Connection, stacks: Connection) -> None:
    """Run the rank and end the process; its first function, called with ``SIGNALS`` blocked.

    The job comes by the pipe, so that the process can be started, and import torch, before there is one.

    Args:
        info: which rank it is.
        pipe: to the launcher, see :class:`Link`.
        stacks: where Python's stack is written to on SIGUSR1, even while the rank sits in a call that does not return.

    """
    die_with_parent()
    set_name(f"rank {info.rank}")
    quiet_torch()
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=False)
    link = Link(pipe)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal, the launcher among them
    # SIGTERM may be sent to all processes or to one: the launcher then stops all ranks.
    with call_on_signals((signal.SIGTERM,), lambda: link.send("stop")):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = run_and_report(info, link)
        # Without the clean-up that waits for peers, which may be gone, and takes a second to take torch apart.
        os._exit(code)


def run_and_report(info: RankInfo, link: Link) -> int:
    """Run the rank, tell the launcher what became of it, and return the process's exit code."""
    try:
        from flyte_ddp.launch.supervise.rank import run_rank

        run_rank(link.job(), info, link.offer_saving, link)
    except BaseException as error:
        flush()  # before the report: when the launcher has it, it ends this process
        link.report(error)
        return 1
    flush()
    link.send("completed")
    return 0


def quiet_torch() -> None:
    """Silence torch's C++ warnings; to be called before torch is imported.

    DDP would warn that all parameters were used, which it has to find out each time (strategies.py).
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def flush() -> None:
    """Flush stdout and stderr; errors are ignored."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may be listening any more
            stream.flush()
