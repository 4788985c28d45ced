"""Code that runs in loader processes, and in the process that forks loader processes.

Loader processes answer calls of a rank.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flyte_ddp.core.loading.batch_memory import write_tree
from flyte_ddp.core.machine import process, waiting

NAME = "loader process"
STARTED = -1  # in place of a call's number, in the message with the process's id
END = signal.SIGUSR2  # ends the process that forks loader processes
MOST_CHARACTERS = 20_000  # of a traceback
KEPT_BLOCK_BYTES, KEPT_BYTES = 2**25, 2**27  # of freed memory; glibc allows no larger blocks


class Call(NamedTuple):
    """A call of a loader's method, for a loader process to run."""

    loader: int  # position among the rank's loaders
    method: str
    arguments: tuple[Any, ...]
    path: str = ""  # of memory for the result, of which the answer is the place; empty: the answer is the result

    def run(self, loader: Any) -> Any:
        """Call the method of ``loader``, and return the result.

        If the call has a path, writes the result into the memory at the path, and returns the result's position there.
        """
        result = getattr(loader, self.method)(*self.arguments)
        return write_tree(self.path, tree_map(tensor_to_array, result)) if self.path else result


def run_loader_server(pipes: Sequence[Connection], exits: Connection, limit_seconds: float) -> None:
    """Fork a loader process for each pipe, and wait until all loader processes have ended.

    This is the main function of a new process, whose name and signal handlers are changed. Closes ``pipes``. If the
    rank ends or sends the signal END, kills the loader processes and all descendants, and exits.

    Args:
        pipes: The loader processes' ends of the pipes to the rank.
        exits: Gets (number, exit code) when a loader process ends. The number is the position of its pipe.
        limit_seconds: Time limit for loading a sample.
    """
    signal.signal(END, process.kill_descendants_and_exit)
    process.become_subreaper()  # of processes that loader processes leave behind
    process.die_with_parent(END)
    process.set_process_name(NAME)
    waiting.limit_seconds = limit_seconds
    # Imported before the forks, so all processes share the module, which most users' pipelines need.
    import torchvision.transforms.v2  # noqa: F401

    gc.freeze()  # the collector writes to the objects that it visits, and forks no longer share written memory
    running = dict[int, int]()
    for number, pipe in enumerate(pipes):
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.signal(END, signal.SIG_DFL)
            process.die_with_parent()
            if os.getppid() == server:  # else the server ended before die_with_parent was called
                for other in (*pipes, exits):
                    if other is not pipe:
                        other.close()
                run_loader_process(pipe)
            os._exit(0)
        running[pid] = number
    for pipe in pipes:
        pipe.close()
    while running:
        pid, status = os.wait()
        if pid in running:  # else a loader process left the process behind
            exits.send((running.pop(pid), os.waitstatus_to_exitcode(status)))
    process.kill_descendants()


def run_loader_process(pipe: Connection) -> None:
    """Run the rank's calls, and send the results by ``pipe``, until the rank ends.

    First sends this process's id, and receives the pickled loaders. Then receives pairs of number and Call, and sends
    the number with the call's result or error. Errors carry the traceback as a note.

    Changes settings of this process. SIGINT, SIGTERM and SIGHUP are ignored, and torch uses one thread. On SIGUSR1, the
    stack is written to ``pipe``.
    """
    process.use_default_start_method()
    process.ignore_signals(process.SIGNALS)  # so that a rank that is asked to stop can finish its last steps
    multiprocessing.current_process().daemon = False  # so that user code may start processes by multiprocessing
    faulthandler.register(signal.SIGUSR1, file=pipe.fileno(), all_threads=False)  # for a rank that waits too long
    process.undo_in_forks.append(lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL))
    torch.set_num_threads(1)
    # Keep freed memory for the next item, which saves page faults; larger blocks still go back to the kernel.
    process.set_malloc_option(process.M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    process.set_malloc_option(process.M_TRIM_THRESHOLD, KEPT_BYTES)
    loaders: Sequence[Any] | None = None
    with suppress(EOFError, OSError):  # the rank has ended
        pipe.send((STARTED, os.getpid()))
        content = pipe.recv_bytes()
        while True:
            number, call = pipe.recv()
            try:
                if loaders is None:
                    loaders = pickle.loads(content)
                answer: Any = call.run(loaders[call.loader])
            except BaseException as error:
                answer = make_portable_error(error)
                answer.add_note(traceback.format_exc()[-MOST_CHARACTERS:])
            sys.stdout.flush()  # what the user's code has printed
            pipe.send((number, answer))


def tensor_to_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) and value.dtype != torch.bfloat16 else value  # NumPy has none


def make_portable_error(error: BaseException) -> Exception:
    """Return a copy of an error that can be pickled and sent to the rank.

    Errors of flyte_ddp keep their type. Other errors, and errors that pickle rejects, become a RuntimeError with the
    error's type and text.
    """
    if type(error).__module__.startswith("flyte_ddp."):
        with suppress(Exception):
            return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    return RuntimeError(f"{type(error).__name__}: {error}")
