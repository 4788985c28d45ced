"""A rank as a process: its signals, its end with the launcher, and its report to the launcher, around run_rank.

Imports torch only when the rank can report that importing it failed.
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
from flyte_ddp.process import die_with_parent, set_process_name


@dataclass(frozen=True)
class RankInfo:
    """The place of a rank among those of its run."""

    rank: int
    world_size: int
    local_rank: int  # the number of its GPU, of those that its process sees
    store: str = ""  # a file by which ranks that are all on one host find each other


def start_rank(info: RankInfo, pipe: Connection, stacks: Connection) -> None:
    """Run the rank and exit; the first function of its process, which is called with SIGNALS blocked.

    Receives the job by the pipe: the process imports torch before there is a job. On SIGTERM it asks the launcher to
    stop all ranks; it ignores SIGINT. Linux kills the process when its parent ends.

    Args:
        pipe: connection to the launcher.
        stacks: pipe to which Python's stack is written on SIGUSR1, even while the rank is in C code.
    """
    die_with_parent()
    set_process_name(f"rank {info.rank}")
    silence_torch_warnings()
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
    """Run the rank, report to the launcher that it has completed or failed, and return the exit code (0 or 1)."""
    try:
        from flyte_ddp.launch.supervise.rank import run_rank

        run_rank(link.receive_job(), info, link.set_save_function, link)
    except BaseException as error:
        flush_output()  # before the report: when the launcher has it, it ends this process
        link.report_error(error)
        return 1
    flush_output()
    link.send("completed")
    return 0


def silence_torch_warnings() -> None:
    """Set an environment variable that silences torch's C++ warnings; has an effect before torch is imported.

    Without it DDP warns that all parameters were used, because the ``ddp`` strategy makes it look for unused ones.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def flush_output() -> None:
    """Flush stdout and stderr; ignore errors."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may be listening any more
            stream.flush()
