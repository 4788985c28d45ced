"""What runs in loader processes, which answer calls of a rank, and in the process that forks them."""

import gc
import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flyte_ddp.loading.batch_memory import write_tree
from flyte_ddp.machine import process

NAME = "loader process"
MOST_CHARACTERS = 20_000  # of a traceback
KEPT_BLOCK_BYTES, KEPT_BYTES = 2**25, 2**27  # of freed memory; the first is the most that glibc allows


class Call(NamedTuple):
    """A call of a loader's method by one process."""

    loader: int  # its number
    method: str
    arguments: tuple[Any, ...]
    path: str = ""  # of memory that the result is written into, and that may grow; empty: the answer is the result

    def run(self, loader: Any) -> Any:
        result = getattr(loader, self.method)(*self.arguments)
        return write_tree(self.path, tree_map(tensor_to_array, result)) if self.path else result


def run_loader_server(pipes: Sequence[Connection], exits: Connection) -> None:
    """Fork a loader process for each of the pipes; send their numbers and exit codes by ``exits``, until all ended."""
    process.die_with_parent()
    process.set_process_name(NAME)
    # Before the forks, because most users' pipelines need it.
    import torchvision.transforms.v2  # noqa: F401

    gc.freeze()  # the collector writes to the objects that it visits, and forks no longer share written memory
    running = dict[int, int]()
    for number, pipe in enumerate(pipes):
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
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
        exits.send((running.pop(pid), os.waitstatus_to_exitcode(status)))


def run_loader_process(pipe: Connection) -> None:
    """Receive the pickled loaders, then calls; answer each, maybe by its error, until the rank and its pipe end."""
    torch.set_num_threads(1)
    # What an item frees the next one allocates again, without page faults; large blocks still go back to the kernel.
    process.set_malloc_option(process.M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    process.set_malloc_option(process.M_TRIM_THRESHOLD, KEPT_BYTES)
    loaders: Sequence[Any] | None = None
    with suppress(EOFError, OSError):  # the rank has ended
        content = pipe.recv_bytes()
        while True:
            number, call = pipe.recv()
            try:
                if loaders is None:
                    loaders = pickle.loads(content)
                answer: Any = call.run(loaders[call.loader])
            except BaseException as error:
                answer = portable_error(error)
                answer.add_note(traceback.format_exc()[-MOST_CHARACTERS:])
            sys.stdout.flush()  # what the user's code has printed
            pipe.send((number, answer))


def tensor_to_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) and value.dtype != torch.bfloat16 else value


def portable_error(error: BaseException) -> Exception:
    """Return an error that can be sent to the rank: of the same type if that is the library's, else a RuntimeError."""
    if type(error).__module__.startswith("flyte_ddp."):
        with suppress(Exception):
            return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    return RuntimeError(f"{type(error).__name__}: {error}")
