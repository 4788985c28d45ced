"""The process of a rank around run_rank: signals, and the end with the launcher.

Imports torch only when the rank can report a failed import.
"""

import faulthandler
import os
import pkgutil
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from flyte_ddp.core.launch.supervise.failure_report import CONSEQUENCES, classify_error
from flyte_ddp.core.launch.supervise.link import Link, RankInfo
from flyte_ddp.core.launch.supervise.messages import Notice
from flyte_ddp.core.launch.supervise.stopping import call_on_signals
from flyte_ddp.core.machine import process


def start_rank(info: RankInfo, pipe: Connection, stacks: Connection) -> None:
    """Run the rank's work to its end, report to the launcher, and exit this process.

    This is the first function of a rank's process, and never returns. The caller must have blocked SIGTERM and SIGINT,
    and this function unblocks both signals. SIGTERM is only reported to the launcher, and SIGINT and SIGHUP are
    ignored. On SIGUSR1, the process writes its stack to ``stacks``, even in C code.
    """
    process.die_with_parent()
    process.use_default_start_method()
    process.set_process_name(f"rank {info.rank}")
    # Silences DDP's warning that all parameters were used. The `ddp` strategy makes DDP look for unused parameters.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=False)
    link = Link(pipe)
    link.send(Notice.READY)
    # A terminal sends these signals to all its processes, including the launcher.
    process.ignore_signals((signal.SIGINT, signal.SIGHUP))
    # SIGTERM may be sent to all processes or to one process. In both cases the launcher stops all ranks.
    with (
        call_on_signals((signal.SIGTERM,), lambda: link.send(Notice.STOP)),
        process.undone_in_forks(lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL)),
    ):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        code = run_and_report(info, link)
        # Skips Python's clean-up, which would wait for peers that may be gone, and take a second to free torch.
        os._exit(code)


def run_and_report(info: RankInfo, link: Link) -> int:
    """Run the rank's work, report its end or error to the launcher, and return the process's exit code.

    After a failed collective operation, waits until the launcher kills this process, and does not return.
    """
    try:
        from flyte_ddp.core.launch.supervise.rank import run_rank

        pkgutil.resolve_name(info.function)  # imports torch and the function's module while the work is on its way
        run_rank(link.receive_work().prepare_on_host(), info, link.offer_saving, link)
    except BaseException as error:
        flush_output()  # before the report, after which the launcher ends this process
        link.report_error(error)
        if classify_error(error) in CONSEQUENCES:
            threading.Event().wait()  # the launcher may request a checkpoint, and then kills this process
        return 1
    flush_output()
    link.send(Notice.COMPLETED)
    return 0


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the stream may be closed
            stream.flush()
