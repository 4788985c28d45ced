"""A rank as a process, around run_rank: its signals, and its end with the launcher.

Imports torch only when the rank can report that importing it failed.
"""

import faulthandler
import os
import pkgutil
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from flyte_ddp.launch.supervise.link import CONSEQUENCES, Link, RankInfo, classify_failure
from flyte_ddp.launch.supervise.stopping import call_on_signals
from flyte_ddp.machine import process


def start_rank(info: RankInfo, pipe: Connection, stacks: Connection) -> None:
    """Run the rank's work to its end, report to the launcher, and exit this process: a rank's first function.

    Call it with SIGTERM and SIGINT blocked; it unblocks them. SIGUSR1 writes the stack to ``stacks``, even in C code.
    """
    process.die_with_parent()
    process.restore_start_method()
    process.set_process_name(f"rank {info.rank}")
    # Silences DDP's warning that all parameters were used; the `ddp` strategy makes it look for unused ones.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=False)
    link = Link(pipe)
    link.send("ready")
    # They go to all processes of a terminal, the launcher among them.
    process.ignore_signals((signal.SIGINT, signal.SIGHUP))
    # SIGTERM may be sent to all processes or to one: the launcher then stops all ranks.
    with (
        call_on_signals((signal.SIGTERM,), lambda: link.send("stop")),
        process.undone_in_forks(lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL)),
    ):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        code = run_and_report(info, link)
        # Skips Python's clean-up, which would wait for peers that may be gone, and take a second to free torch.
        os._exit(code)


def run_and_report(info: RankInfo, link: Link) -> int:
    """Run the rank's work, report its end or its error to the launcher, and return the process's exit code."""
    try:
        from flyte_ddp.launch.supervise.rank import run_rank

        pkgutil.resolve_name(info.function)  # imports torch and the function's module while the work is on its way
        run_rank(link.receive_work().prepare_on_host(), info, link.offer_saving, link)
    except BaseException as error:
        flush_output()  # before the report, on which the launcher ends this process
        link.report_error(error)
        if classify_failure(error) in CONSEQUENCES:
            threading.Event().wait()  # the launcher may ask for a checkpoint, and then kills this process
        return 1
    flush_output()
    link.send("completed")
    return 0


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may be listening any more
            stream.flush()
