"""Load batches in processes that run the user's own code, ahead of training.

A batch does not depend on which process loads which sample, nor on how many there are: the rank numbers the tasks, and
each sample has a place and a seed of its own. On Linux only; elsewhere the rank loads its batches itself.
"""

import io
import itertools
import mmap
import pickle
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from flyte_ddp.device_copy import copy_to_device
from flyte_ddp.errors import UserError
from flyte_ddp.loading.batch_memory import BatchMemory, Layout, read_tree
from flyte_ddp.loading.facts import Facts
from flyte_ddp.loading.loader_process import (
    NAME,
    BatchTask,
    Collated,
    Loaded,
    Task,
    common_shape,
    load_into,
    run_loader_server,
)
from flyte_ddp.loading.own_items import ItemLoader
from flyte_ddp.loading.own_samples import SampleLoader
from flyte_ddp.loading.seeding import keep_random_state
from flyte_ddp.loading.split import Batch, ImageSource
from flyte_ddp.order.sampling import Indices
from flyte_ddp.process import spawn_context

POSSIBLE = sys.platform == "linux"
END_SECONDS = 5.0  # that a killed process may take to end
# Samples of one task of images at most. A task or its answer must fit into the buffers of a pipe: else both sides might
# wait for each other for ever. The answer has names; that of a whole batch is short.
MOST_SAMPLES = 256


class RemoteTraceback(Exception):  # noqa: N818
    """The traceback, as text, of an error in a loader process; it is shown as the cause of the error in the rank."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(eq=False)
class Worker:
    """A loader process, as its rank sees it."""

    number: int
    pipe: Connection
    tasks: int = 0  # that it has been sent and has not answered


Loader = SampleLoader | ItemLoader


class LoaderPool:
    """Loader processes of one rank; they end with the rank, however that ends."""

    def __init__(self, loaders: Sequence[Loader], workers: int) -> None:
        """Start a process that imports torch and forks the loader processes, and do not wait for it.

        The loader processes get ``loaders``, by pickling, with the first task. One import of torch is enough for all of
        them. They never hear SIGINT and SIGTERM, so that a rank that is asked to stop can do its last steps.
        """
        self.loaders, self.number = loaders, workers
        self.answers: dict[int, Any] = {}  # by task; an exception for a task that failed
        self.numbers = itertools.count()
        # All are kept, because a loader process knows a memory by its path, which must never be another one's.
        self.memories: list[BatchMemory] = []
        self.free: list[BatchMemory] = []
        self.started = False
        with spawn_context() as context:
            pipes, self.exits = [context.Pipe() for _ in range(workers)], context.Pipe(duplex=False)
            self.workers = {ours: Worker(number, ours) for number, (ours, _) in enumerate(pipes)}
            arguments = [theirs for _, theirs in pipes], self.exits[1]
            process = context.Process(target=run_loader_server, args=arguments, name=NAME, daemon=True)
            process.start()
        for end in (*arguments[0], self.exits[1]):
            end.close()  # so that the end of a process is the end of its pipe
        self.end = weakref.finalize(self, end_processes, process, [*self.workers, self.exits[0]])  # at exit, too

    def send_loaders(self) -> None:
        """Send the loaders to all processes; waits until they have started if the loaders are large."""
        self.started = True
        content = pickle_with_mapped_files(self.loaders)
        for worker in self.workers.values():
            worker.pipe.send_bytes(content)

    def submit(self, task: Task | BatchTask) -> int:
        """Give a task to the process that has the fewest, and return the task's number.

        Raises RuntimeError if a process has ended.
        """
        number, worker = next(self.numbers), min(self.workers.values(), key=lambda each: each.tasks)
        try:
            if not self.started:
                self.send_loaders()
            # A process that waits until an answer is read would not read its tasks.
            self.receive(wait=False)
            worker.pipe.send((number, task))
        except OSError:
            raise self.ended_error(worker) from None
        worker.tasks += 1
        return number

    def wait_for(self, number: int) -> Any:
        """Wait for a task, without a limit, and return what its process answered; raise the exception of the task.

        Raises RuntimeError if a process has ended.
        """
        while number not in self.answers:
            self.receive(wait=True)
        answer = self.answers.pop(number)
        if isinstance(answer, (Loaded, Collated)):
            return answer
        error, text = answer
        raise error from RemoteTraceback(text)

    def receive(self, *, wait: bool) -> None:
        """Take all answers that have come; with ``wait``, at least one. RuntimeError if a process has ended."""
        while ready := connection.wait(self.workers, None if wait else 0):
            for pipe in ready:
                worker = self.workers[pipe]  # type: ignore[index]
                try:
                    number, answer = worker.pipe.recv()
                except (EOFError, OSError):
                    raise self.ended_error(worker) from None
                worker.tasks -= 1
                self.answers[number] = answer
            wait = False

    def take_memory(self) -> BatchMemory:
        """Return memory for a batch that is not in use."""
        if not self.free:
            self.memories.append(BatchMemory())
            return self.memories[-1]
        return self.free.pop()

    def map_memory(self, memory: BatchMemory, size: int) -> NDArray[np.uint8]:
        """Return memory of :meth:`take_memory`; it is free again when nothing refers to the array any more."""
        whole = memory.resize(size)
        weakref.finalize(whole, self.free.append, memory).atexit = False
        return whole

    def ended_error(self, worker: Worker) -> RuntimeError:
        """Return the error for a loader process that has ended; its text names the signal or the exit code.

        Waits up to 5 s for the exit code, and as long again for each other process that ended before.
        """
        code = None
        with suppress(EOFError, OSError):
            while code is None and self.exits[0].poll(END_SECONDS):
                number, found = self.exits[0].recv()
                code = found if number == worker.number else None
        if code is None:
            return RuntimeError("a loader process could not start, or the process that started it has ended")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        hint = ", often for lack of memory; lower FLYTE_DDP_LOADER_THREADS" if code == -signal.SIGKILL else ""
        return RuntimeError(f"a loader process ended with {how}{hint}")

    def close(self) -> None:
        """Kill the processes, and wait up to 5 s for the end of the process that forked them."""
        self.end()


def end_processes(server: BaseProcess, pipes: Sequence[Connection]) -> None:
    """Kill the process that forked the loader processes, and so these; wait up to 5 s for it, and close the pipes."""
    server.kill()
    server.join(END_SECONDS)
    for pipe in pipes:
        pipe.close()


def make_pool(loaders: Sequence[Loader], workers: int) -> LoaderPool | None:
    """Return a pool of loader processes; None where the rank must load its samples itself: not on Linux."""
    return LoaderPool(loaders, workers) if POSSIBLE else None


class MappingPickler(pickle.Pickler):
    """Pickles memory-mapped arrays as the names of their files, so that all processes read the same memory."""

    def reducer_override(self, value: Any) -> Any:
        """Return how an array that is a whole file is opened again; NotImplemented for all else."""
        if isinstance(value, np.memmap) and isinstance(value.base, mmap.mmap):
            return np.memmap, (value.filename, value.dtype, "r", value.offset, value.shape)
        return NotImplemented


def pickle_with_mapped_files(value: Any) -> bytes:
    """Return a value pickled by MappingPickler."""
    buffer = io.BytesIO()
    MappingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class WorkerImages(ImageSource):
    """Source of samples that loader processes load; without a pool the rank loads them itself."""

    # Raises UserError for targets [n, ...] that the objective does not take; None: they are not checked.
    check_targets: Callable[[NDArray[Any]], None] | None = None
    batches_ahead = 2  # enough to keep the processes busy while load_batch() waits for a batch

    def __init__(self, loader: SampleLoader, pool: LoaderPool | None, device: torch.device) -> None:
        self.loader, self.pool, self.device = loader, pool, device
        self.prefetch_files = loader.prefetch_files
        # Memory, shape and tasks of batches that processes are filling, by epoch and samples.
        self.pending: dict[tuple[int | None, bytes], tuple[NDArray[np.uint8], Layout, list[int]]] = {}

    def prefetch_batch(self, samples: Indices, epoch: int | None) -> None:
        """Start to load these samples in the processes, unless they are already being loaded."""
        key = (epoch, samples.tobytes())
        if self.pool is not None and key not in self.pending:
            self.pending[key] = self.submit_batch(self.pool, samples, epoch)

    def load_batch(self, samples: Indices, epoch: int | None) -> Batch:
        """Return these samples on the device, augmented for an ``epoch`` of training, not for None.

        Starts to load the samples unless :meth:`prefetch_batch` has, and waits for the processes without a timeout.
        Raises the first error of a process, with the text of its traceback as cause; RuntimeError if one has ended.
        """
        if self.pool is None:
            layout = self.layout(samples)
            memory = np.empty(layout.size, np.uint8)
            task = Task(0, samples.tolist(), epoch, 0, layout, "")
            with keep_random_state():
                loaded = [load_into(memory, self.loader, task)]
        else:
            self.prefetch_batch(samples, epoch)
            memory, layout, tasks = self.pending.pop((epoch, samples.tobytes()))
            loaded = [self.pool.wait_for(task) for task in tasks]
            for each in loaded:
                if each.report is not None:
                    self.loader.add_report(each.report)
            self.loader.skip_read(samples)
        images = layout.images(memory, common_shape([each.shape for each in loaded] or self.loader.sizes[:1]))
        targets = layout.targets(memory)
        if self.check_targets is not None:
            names = [name for each in loaded for name in each.names]
            named = [name or str(sample) for sample, name in zip(samples.tolist(), names, strict=True)]
            check_each_target(self.check_targets, targets, named)
        inputs, labels = (copy_to_device(torch.from_numpy(values), self.device) for values in (images, targets))
        return Batch(inputs, labels, [name for each in loaded for name in each.names if name])

    def layout(self, samples: Indices) -> Layout:
        """Return the layout of a batch of these samples."""
        kind = self.loader.targets
        return Layout(len(samples), max(int(np.prod(size)) for size in self.loader.sizes), kind.dtype, kind.shape)

    def submit_batch(
        self, pool: LoaderPool, samples: Indices, epoch: int | None
    ) -> tuple[NDArray[np.uint8], Layout, list[int]]:
        """Give each process two tasks, more for many samples; return the memory, its layout, and the tasks' numbers."""
        layout, number = self.layout(samples), pool.loaders.index(self.loader)
        free = pool.take_memory()
        memory = pool.map_memory(free, layout.size)
        size = max(1, min(-(-len(samples) // (2 * pool.number)), MOST_SAMPLES))
        tasks = [
            pool.submit(Task(number, samples[start : start + size].tolist(), epoch, start, layout, free.path))
            for start in range(0, len(samples), size)
        ]
        return memory, layout, tasks

    def facts(self) -> Facts:
        """Return facts about the loading for the report."""
        return self.loader.facts()

    def close(self) -> None:
        """End the processes, also those of other sources of the same pool, and close files."""
        self.pending = {}
        if self.pool is not None:
            self.pool.close()
        self.loader.close()


class ItemBatches(ImageSource):
    """Source of batches of items, each loaded by one loader process; without a pool the rank loads them itself."""

    # Raises UserError for targets [n, ...] that the objective does not take; None: they are not checked.
    check_targets: Callable[[NDArray[Any]], None] | None = None

    def __init__(self, loader: ItemLoader, pool: LoaderPool | None, device: torch.device) -> None:
        self.loader, self.pool, self.device = loader, pool, device
        self.batches_ahead = 2 * pool.number if pool else 0  # each process finds its next task when it has done one
        # Memory and task of batches that processes are loading, by epoch and samples.
        self.pending: dict[tuple[int | None, bytes], tuple[BatchMemory, int]] = {}

    def prefetch_batch(self, samples: Indices, epoch: int | None) -> None:
        """Start to load these samples in a process, unless they are already being loaded."""
        key = (epoch, samples.tobytes())
        if self.pool is not None and key not in self.pending:
            memory = self.pool.take_memory()
            task = BatchTask(self.pool.loaders.index(self.loader), samples.tolist(), epoch, memory.path)
            self.pending[key] = memory, self.pool.submit(task)

    def load_batch(self, samples: Indices, epoch: int | None) -> Batch:
        """Return these samples on the device, augmented for an ``epoch`` of training, not for None.

        Starts to load the samples unless :meth:`prefetch_batch` has, and waits for the process without a timeout.
        Raises the first error of a process, with the text of its traceback as cause; RuntimeError if one has ended.
        """
        if self.pool is None:
            with keep_random_state():
                inputs, targets = self.loader.load_items(samples.tolist(), epoch)
        else:
            self.prefetch_batch(samples, epoch)
            memory, task = self.pending.pop((epoch, samples.tobytes()))
            collated = self.pool.wait_for(task)
            inputs, targets = read_tree(self.pool.map_memory(memory, collated.end), collated)
        if self.check_targets is not None and isinstance(targets, (np.ndarray, Tensor)):
            names = [f"{self.loader.side} {sample}" for sample in samples.tolist()]
            check_each_target(self.check_targets, np.asarray(targets), names)
        return Batch(*tree_map(self.put_on_device, (inputs, targets)))

    def put_on_device(self, value: Any) -> Any:
        """Return an array or tensor as a tensor on the device, and another value unchanged."""
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = torch.from_numpy(value)
        return copy_to_device(value, self.device) if isinstance(value, Tensor) else value

    def close(self) -> None:
        """End the processes, also those of other sources of the same pool."""
        self.pending = {}
        if self.pool is not None:
            self.pool.close()


def check_each_target(check: Callable[[NDArray[Any]], None], targets: NDArray[Any], names: Sequence[str]) -> None:
    """Call ``check`` with all targets [n, ...] of a batch; raise UserError, which names the sample, for a wrong one."""
    try:
        check(targets)
    except UserError:
        for place, name in enumerate(names):
            try:
                check(targets[place : place + 1])
            except UserError as error:
                raise UserError(f"the target that own code made of sample {name!r}: {error}") from None
        raise
