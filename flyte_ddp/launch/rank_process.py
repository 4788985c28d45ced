"""A rank as a process of its own: signals, its launcher's death, and its report, around :func:`run_rank`.

Needs no torch until the rank can report that importing it failed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from flyte_ddp.job import Job, Place
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.stopping import SIGNALS

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_rank(job: Job, place: Place, pipe: Connection, stacks: Connection) -> None:
    """The process's first function, called with ``SIGNALS`` blocked; ends the process.

    Args:
        pipe: to the launcher, see :class:`Link`.
        stacks: where Python's stack is written to on SIGUSR1, even while the rank sits in a call that does not return.

    """
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=False)
    link = Link(pipe, saved=job.checkpoint.step if job.checkpoint else 0)
    leave_signals_to_the_launcher(link)
    try:
        from flyte_ddp.launch.rank import run_rank

        run_rank(job, place, link.offer_saving, link)
    except BaseException as error:
        flush()  # before the report: when the launcher has it, it ends this process
        link.report(error)
        code = 1
    else:
        flush()
        link.send("completed")
        code = 0
    # Without the clean-up that waits for peers, which may be gone, and takes a second to take torch apart.
    os._exit(code)


def flush() -> None:
    """Sends off what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may be listening any more
            stream.flush()


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that started it ends, so that no rank outlives its launcher."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_signals_to_the_launcher(link: Link) -> None:
    """Has the launcher stop all ranks when this one gets SIGTERM, which may be sent to all processes or to one.

    Python's own handlers wait for the main thread, which may sit in a collective for long; a thread that reads from
    the wake-up file does not. Ctrl-C goes to all processes of a terminal, the launcher among them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)

    def forward() -> None:
        while byte := os.read(reader, 1):
            if byte[0] == signal.SIGTERM:  # a byte comes for every signal that Python handles
                link.send("stop")

    threading.Thread(target=forward, name="signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
