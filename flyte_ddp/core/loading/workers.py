"""Load batches ahead of training in processes, which run user code.

A batch does not depend on the number of processes, nor on the process that loads a sample. The rank numbers the tasks,
and each sample has its own position and seed. Processes exist on Linux only. On other systems the rank runs user code.
"""

import errno
import io
import itertools
import mmap
import os
import pickle
import select
import signal
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import MachineError, UserError
from flyte_ddp.core.loading.batch_memory import BatchMemory, Layout, read_tree
from flyte_ddp.core.loading.loader_process import END, NAME, STARTED, Call, run_loader_server
from flyte_ddp.core.loading.sample_loader import Loaded, SampleLoader
from flyte_ddp.core.lookahead import start_ahead
from flyte_ddp.core.machine import waiting
from flyte_ddp.core.machine.process import open_spawn_context, request_stack
from flyte_ddp.core.order.random_state import keep_random_state
from flyte_ddp.core.order.sampling import Indices

POSSIBLE = sys.platform == "linux"
START_SECONDS = 300.0  # for processes to start, and import torch, on a busy machine
GRACE_SECONDS = 5.0  # added to a process's own limit for a sample, before the rank gives up
MOST_SECONDS = 2e6  # longest wait of poll()
NO_STACK = "(a loader process that does not report its stack)"
END_SECONDS = 5.0  # that a killed process may take to end
# Most samples in a task of images. A task, or its answer with the samples' names, must fit into the buffers of a pipe:
# else both sides might wait for each other for ever. The answer to a whole batch (submit_call) has no names.
MOST_SAMPLES = 256


@dataclass(eq=False)
class Worker:
    """A rank's record of a loader process."""

    number: int
    pipe: Connection
    tasks: int = 0  # sent to the process and not answered yet
    pid: int | None = None  # None until the process has started


class LoaderPool:
    """Loader processes of a rank. The processes end with the rank, even if the rank is killed."""

    def __init__(self, loaders: Sequence[Any], workers: int) -> None:
        """Start a process that imports torch and forks the loader processes, without waiting for the process.

        Loader processes ignore SIGINT, SIGTERM and SIGHUP, so a rank that is asked to stop can finish the last steps.

        Args:
            loaders: The objects whose methods the processes call. Pickled and sent with the first call.

        Raises:
            UserError: This process's limits are too low for so many processes.
            MachineError: The machine has no room.
        """
        self.loaders, self.number = loaders, workers
        self.answers: dict[int, Any] = {}  # by the number of the call
        self.numbers = itertools.count()
        # No memory is deleted: a loader process knows a memory by its path, which no other memory may get.
        self.memories: list[BatchMemory] = []
        self.free: list[BatchMemory] = []
        self.started = False
        with (
            translate_resource_errors(f"{workers} loader processes", "FLYTE_DDP_LOADERS"),
            open_spawn_context() as context,
        ):
            pipes, self.exits = [context.Pipe() for _ in range(workers)], context.Pipe(duplex=False)
            self.workers = {ours.fileno(): Worker(number, ours) for number, (ours, _) in enumerate(pipes)}
            arguments = [theirs for _, theirs in pipes], self.exits[1], waiting.limit_seconds
            self.server = context.Process(target=run_loader_server, args=arguments, name=NAME, daemon=True)
            self.server.start()
        for end in (*arguments[0], self.exits[1]):
            end.close()  # so that the end of a process is the end of its pipe
        self.poll = select.poll()  # once for all: connection.wait registers all pipes at each call
        for descriptor in self.workers:
            self.poll.register(descriptor, select.POLLIN)
        ours = [self.exits[0], *(worker.pipe for worker in self.workers.values())]
        self.end = weakref.finalize(self, end_loader_processes, self.server, ours)  # at exit, too

    def send_call(self, call: Call) -> int:
        """Send a call to the process with the fewest unanswered calls, and return the call's number.

        Does not wait for the answer. Receives answers of other calls. The first call of this method also sends the
        loaders to all processes.

        Raises:
            RuntimeError: A process has ended. A MachineError if a signal killed the process.
        """
        number, worker = next(self.numbers), min(self.workers.values(), key=lambda each: each.tasks)
        try:
            if not self.started:
                self.started, content = True, pickle_with_mapped_files(self.loaders)
                for each in self.workers.values():
                    each.pipe.send_bytes(content)
            # Receive answers first: a process that waits to deliver an answer reads no tasks.
            self.receive_answers(wait=False)
            worker.pipe.send_bytes(pickle.dumps((number, call)))  # as send() does, in less of the rank's time
        except OSError:
            raise self.make_ended_error(worker) from None
        worker.tasks += 1
        return number

    def start_loading_images(
        self, loader: SampleLoader, samples: Indices, epoch: int | None, layout: Layout
    ) -> tuple[NDArray[np.uint8], list[int]]:
        """Start loading a batch of images, without waiting. ``loader`` must be one of the pool's loaders.

        Returns:
            The batch's memory, and the tasks for :meth:`wait_for_loaded_images`. When the array is deleted, another
                batch may use the memory.

        Raises:
            UserError: This process's limits are too low for the batch.
            RuntimeError: A process has ended. A MachineError if a signal killed it, or if the machine has no room.
        """
        free = self.take_unused_memory()
        memory = self.map_batch_memory(free, layout.size)
        tasks_in_all = 2 * self.number if self.number > 1 else 1  # two for each process balance slow and fast samples
        size = max(1, min(-(-len(samples) // tasks_in_all), MOST_SAMPLES))
        numbers, place = samples.tolist(), self.loaders.index(loader)
        tasks = [
            self.send_call(
                Call(place, "load_part_of_batch", (numbers[start : start + size], epoch, start, layout, free.path))
            )
            for start in range(0, len(samples), size)
        ]
        return memory, tasks

    def wait_for_loaded_images(self, tasks: Sequence[int]) -> list[Loaded]:
        return [self.wait_for_answer(task) for task in tasks]

    def submit_call(self, method: Any, *arguments: Any) -> tuple[BatchMemory, int]:
        """Let a process call ``method`` with ``arguments``, without waiting.

        ``method`` must be a bound method of one of the pool's loaders. Returns the argument for
        :meth:`wait_for_result`.
        """
        memory = self.take_unused_memory()
        call = Call(self.loaders.index(method.__self__), method.__name__, arguments, memory.path)
        return memory, self.send_call(call)

    def wait_for_result(self, submitted: tuple[BatchMemory, int]) -> Any:
        """Wait for a call of :meth:`submit_call`, and return the result. Call this method once for each call.

        The arrays of the result are views of a memory, which stays in use while an array exists. Raises the errors of
        :meth:`wait_for_answer`.
        """
        memory, number = submitted
        place = self.wait_for_answer(number)
        return read_tree(self.map_batch_memory(memory, place[1]), place)

    def wait_for_answer(self, number: int) -> Any:
        """Wait for the answer of call ``number``, a result of :meth:`send_call`, and return the answer.

        Call this method once for each call.

        Raises:
            Exception: The call failed, with this error. The traceback is in a note.
            RuntimeError: A process has ended. A MachineError if a signal killed the process.
            MachineError: No process answered within ``waiting.limit_seconds`` and 5 s.
        """
        while number not in self.answers:
            self.receive_answers(wait=True)
        answer = self.answers.pop(number)
        if isinstance(answer, Exception):
            raise answer  # with a note, the traceback in the process
        return answer

    def receive_answers(self, *, wait: bool) -> None:
        """Receive all answers that have arrived, and store them in ``answers``. With ``wait``, waits for an answer.

        Raises:
            RuntimeError: A process has ended. A MachineError if a signal killed the process.
            MachineError: With ``wait``, no answer came within :meth:`compute_answer_time_limit`.
        """
        while ready := self.poll.poll(self.compute_answer_time_limit() * 1000 * wait):
            for descriptor, _ in ready:
                worker = self.workers[descriptor]
                try:
                    number, answer = worker.pipe.recv()
                except (EOFError, OSError):
                    raise self.make_ended_error(worker) from None
                if number == STARTED:
                    worker.pid = answer
                    continue
                worker.tasks -= 1
                self.answers[number] = answer
                wait = False
        if wait:
            raise self.make_late_error()

    def compute_answer_time_limit(self) -> float:
        """Return the time limit for the next answer, in seconds.

        The limit is the limit for loading a sample and 5 s. While processes start, the limit is at least 300 s
        (START_SECONDS).
        """
        starting = any(worker.tasks and worker.pid is None for worker in self.workers.values())
        limit = waiting.limit_seconds + GRACE_SECONDS
        return min(max(limit, START_SECONDS) if starting else limit, MOST_SECONDS)

    def make_late_error(self) -> MachineError:
        """Return an error with the stacks of the processes that did not answer in time.

        Sends these processes SIGUSR1, and waits up to 5 s for each stack. Afterwards no answers can be received from
        these processes.
        """
        loading = [worker for worker in self.workers.values() if worker.tasks]
        if any(worker.pid is None for worker in loading):
            return MachineError(f"a loader process has not started within {START_SECONDS:g} s")
        stacks = [worker.pid and request_stack(worker.pid, worker.pipe, END_SECONDS) for worker in loading]
        return waiting.make_late_error(
            "a batch from loader processes", "\n".join(stack or NO_STACK for stack in stacks)
        )

    def take_unused_memory(self) -> BatchMemory:
        """Return an unused memory, or a new memory if all are in use.

        Raises:
            UserError: This process may open no more files.
            MachineError: The machine has no room.
        """
        if not self.free:
            with translate_resource_errors(f"{self.number} loader processes", "FLYTE_DDP_LOADERS"):
                self.memories.append(BatchMemory())
            return self.memories[-1]
        return self.free.pop()

    def map_batch_memory(self, memory: BatchMemory, size: int) -> NDArray[np.uint8]:
        """Grow a memory to at least ``size`` bytes, and return the memory as an array of bytes.

        When the array and its views are deleted, the memory is unused again.

        Raises:
            UserError: This process's limits are too low.
            MachineError: The machine has no room.
        """
        with translate_resource_errors(f"a batch of {size:,} bytes", "batch_size"):
            whole = memory.grow(size)
        weakref.finalize(whole, self.free.append, memory).atexit = False
        return whole

    def make_ended_error(self, worker: Worker) -> RuntimeError:
        """Return an error that explains how a loader process ended: a MachineError if a signal killed the process.

        Waits up to 5 s for each exit code, until the worker's exit code arrives. Without this code, waits up to 5 s for
        the process that forked the loader processes.
        """
        who, code = "a loader process", None
        with suppress(EOFError, OSError):
            while code is None and self.exits[0].poll(END_SECONDS):
                number, found = self.exits[0].recv()
                code = found if number == worker.number else None
        if code is None:
            who = "the process that starts loader processes"
            self.server.join(END_SECONDS)
            code = self.server.exitcode
        if code is None:
            return RuntimeError(f"{who} closed its pipe, but has not exited")
        if code >= 0:
            return RuntimeError(f"{who} ended with exit code {code}")
        why = ", often because of too little memory; lower FLYTE_DDP_LOADERS, or give the pod more memory"
        hint = why if code == -signal.SIGKILL else ""
        return MachineError(f"{who} ended with {signal.Signals(-code).name}{hint}")

    def close(self) -> None:
        """Kill the processes, and wait up to 10 s for the end of the process that forked them."""
        self.end()


@contextmanager
def translate_resource_errors(what: str, setting: str) -> Iterator[None]:
    """Turn OSErrors of the block that mean exhausted resources into errors with advice. Other errors are not changed.

    ``what`` names what the block needs, and ``setting`` is the setting to lower.

    Raises:
        UserError: The block exceeds this process's limits.
        MachineError: The machine has no room for the block.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.EFBIG):
            why = f"more than this process's limits allow ({error.strerror})"
            raise UserError(f"{what}: {why}; lower {setting}, or raise the limits (ulimit)") from None
        if error.errno in (errno.ENOMEM, errno.EAGAIN, errno.ENFILE):
            raise MachineError(f"{what}: no room on this machine ({error.strerror}); lower {setting}") from error
        raise


def end_loader_processes(server: BaseProcess, pipes: Sequence[Connection]) -> None:
    """End the server, the process that forked the loader processes, and with the server all loader processes.

    Asks the server to end, and waits up to 5 s. Then kills the server, and waits up to 5 s. Closes ``pipes``.
    """
    if server.is_alive() and server.pid:
        os.kill(server.pid, END)
        server.join(END_SECONDS)
    server.kill()  # the loader processes die with it
    server.join(END_SECONDS)
    for pipe in pipes:
        pipe.close()


def start_loader_pool(loaders: Sequence[Any], workers: int) -> LoaderPool | None:
    """Start ``workers`` loader processes that call methods of ``loaders``, without waiting, and return their pool.

    Returns None without loaders, and outside Linux. Then the rank must load samples itself.
    """
    return LoaderPool(loaders, workers) if POSSIBLE and loaders else None


def map_in_loader_pool(pool: LoaderPool | None, method: Any, parts: Iterable[Any]) -> Iterator[Any]:
    """Call a loader's bound ``method`` with each of ``parts`` in the pool's processes, and yield the results in order.

    The processes compute up to two results each ahead. Without a pool, this process calls the method, and restores the
    global random generators after each call. Nothing is called before the first ``next()``.
    """
    if pool is None:
        for part in parts:
            with keep_random_state():
                result = method(part)
            yield result
        return
    submitted = start_ahead(lambda part: pool.submit_call(method, part), parts, 2 * pool.number)
    yield from map(pool.wait_for_result, submitted)


class MappingPickler(pickle.Pickler):
    """Pickles memory-mapped arrays by file name, so all processes read the same memory."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.memmap) and isinstance(value.base, mmap.mmap):
            return np.memmap, (value.filename, value.dtype, "r", value.offset, value.shape)
        return NotImplemented


def pickle_with_mapped_files(value: Any) -> bytes:
    """Return the pickled value. Memory-mapped arrays are pickled as the names of their files."""
    buffer = io.BytesIO()
    MappingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
