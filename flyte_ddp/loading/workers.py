"""Load batches in processes that run the user's own code, ahead of training.

A batch does not depend on which process loads which sample, nor on how many there are: the rank numbers the tasks, and
each sample has a place and a seed of its own. On Linux only; elsewhere the rank loads its batches itself.
"""

import gc
import io
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.device_copy import copy_to_device
from flyte_ddp.errors import UserError
from flyte_ddp.loading.facts import Facts
from flyte_ddp.loading.own_samples import SampleLoader
from flyte_ddp.loading.seeding import keep_random_state
from flyte_ddp.loading.split import Batch, ImageSource
from flyte_ddp.order.sampling import Indices
from flyte_ddp.process import die_with_parent, hide_main_script, set_process_name

POSSIBLE = sys.platform == "linux"
NAME = "loader process"
END_SECONDS = 5.0  # that a killed process may take to end
# Of one task at most. Tasks, and answers with the samples' names, must fit into the buffers of a pipe: else rank and
# process might wait for each other for ever.
MOST_SAMPLES, MOST_CHARACTERS = 256, 20_000
ALIGNMENT = 64  # bytes
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RemoteTraceback(Exception):  # noqa: N818
    """The traceback, as text, of an error in a loader process; it is shown as the cause of the error in the rank."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Layout(NamedTuple):
    """Where the images and the targets of a batch lie in its memory."""

    samples: int
    image_bytes: int  # that are reserved for each image
    dtype: Any  # of the targets
    shape: tuple[int, ...]  # of one target

    @property
    def start_of_targets(self) -> int:
        """The byte at which the targets begin; the images begin at 0."""
        return -(-self.samples * self.image_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def size(self) -> int:
        """The size of the memory in bytes, at least 1."""
        return self.start_of_targets + max(1, self.targets_bytes)

    @property
    def targets_bytes(self) -> int:
        """The size of all targets in bytes."""
        return int(self.samples * np.prod(self.shape, dtype=np.int64) * np.dtype(self.dtype).itemsize)

    def targets(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the targets in a batch's memory as an array [samples, ...]."""
        part = memory[self.start_of_targets : self.start_of_targets + self.targets_bytes]
        found: NDArray[Any] = part.view(self.dtype).reshape(self.samples, *self.shape)
        return found

    def images(self, memory: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return the images in a batch's memory as an array [samples, *shape]."""
        rows = memory[: self.samples * self.image_bytes].reshape(self.samples, self.image_bytes)
        return rows[:, : int(np.prod(shape))].reshape(self.samples, *shape)


class Task(NamedTuple):
    """Samples that one process loads into the memory of their batch."""

    loader: int  # number of the SampleLoader
    samples: list[int]
    epoch: int | None
    first: int  # the place of the first sample in the batch
    layout: Layout
    path: str  # of the batch's memory


class Loaded(NamedTuple):
    """What a process answers after a task."""

    names: list[str]
    shape: tuple[int, ...]  # of the images
    report: Any  # of the SampleLoader


def load_into(memory: NDArray[np.uint8], loader: SampleLoader, task: Task) -> Loaded:
    """Load a task's samples into the memory of their batch. UserError if images have different shapes."""
    targets, names = task.layout.targets(memory), []
    shapes = set[tuple[int, ...]]()
    for place, sample in enumerate(task.samples, task.first):
        image, targets[place], name = loader.load_sample(sample, task.epoch)
        shapes.add(image.shape)
        start = place * task.layout.image_bytes
        copy_image(image, memory[start : start + image.size].reshape(image.shape))
        names.append(name)
    return Loaded(names, common_shape(shapes), loader.take_report())


def copy_image(image: NDArray[np.uint8], to: NDArray[np.uint8]) -> None:
    """Copy an image [H, W, C] to ``to``, by channels if each is in one piece, as in tensors: three times as fast."""
    if image.flags.c_contiguous:
        to[...] = image
    else:
        for channel in range(image.shape[2]):
            to[..., channel] = image[..., channel]


def common_shape(shapes: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the images of a batch; UserError if they have different ones."""
    if len({*shapes}) > 1:
        found = " and ".join(str(list(shape)) for shape in sorted({*shapes}))
        raise UserError(f"augment: images of one batch are {found}; return images of one size")
    return next(iter(shapes))


class BatchMemory:
    """Memory of batches, in an unnamed file that loader processes open by its path; it grows as needed."""

    def __init__(self) -> None:
        self.file = os.memfd_create("flyte-ddp")  # not in /dev/shm, which has 64 MB in a container
        weakref.finalize(self, os.close, self.file)  # a process may train many times
        self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        self.memory: mmap.mmap | None = None

    def resize(self, size: int) -> NDArray[np.uint8]:
        """Return all of the memory, of ``size`` bytes or more. Call it while no batch is in it."""
        if self.memory is None or len(self.memory) < size:
            os.ftruncate(self.file, size)
            self.memory = mmap.mmap(self.file, size)
        return np.frombuffer(self.memory, np.uint8)


@dataclass(eq=False)
class Worker:
    """A loader process, as its rank sees it."""

    number: int
    pipe: Connection
    tasks: int = 0  # that it has been sent and has not answered


class LoaderPool:
    """Loader processes of one rank; they end with the rank, however that ends."""

    def __init__(self, loaders: Sequence[SampleLoader], workers: int) -> None:
        """Start a process that imports torch and forks the loader processes, and do not wait for it.

        The loader processes get ``loaders``, by pickling, with the first task. One import of torch is enough for all of
        them. They never hear SIGINT and SIGTERM, so that a rank that is asked to stop can do its last steps.
        """
        self.loaders, self.number = loaders, workers
        self.answers: dict[int, Any] = {}  # by task; an exception for a task that failed
        self.numbers = itertools.count()
        self.free: list[BatchMemory] = []
        self.started = False
        context = multiprocessing.get_context("spawn")
        pipes, self.exits = [context.Pipe() for _ in range(workers)], context.Pipe(duplex=False)
        self.workers = {ours: Worker(number, ours) for number, (ours, _) in enumerate(pipes)}
        arguments = [theirs for _, theirs in pipes], self.exits[1]
        process = context.Process(target=run_loader_server, args=arguments, name=NAME, daemon=True)
        resource_tracker.ensure_running()  # before signals are blocked, because it unblocks them
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with hide_main_script():
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for end in (*arguments[0], self.exits[1]):
            end.close()  # so that the end of a process is the end of its pipe
        self.end = weakref.finalize(self, end_processes, process, [*self.workers, self.exits[0]])  # at exit, too

    def send_loaders(self) -> None:
        """Send the loaders to all processes; waits until they have started if the loaders are large."""
        self.started = True
        content = pickle_with_mapped_files(self.loaders)
        for worker in self.workers.values():
            worker.pipe.send_bytes(content)

    def submit(self, task: Task) -> int:
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

    def wait_for(self, number: int) -> Loaded:
        """Wait for a task, without a limit, and return what its process answered; raise the exception of the task.

        Raises RuntimeError if a process has ended.
        """
        while number not in self.answers:
            self.receive(wait=True)
        answer = self.answers.pop(number)
        if isinstance(answer, Loaded):
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

    def take_memory(self, size: int) -> tuple[str, NDArray[np.uint8]]:
        """Return memory for a batch and its path; it is free again when nothing refers to the array any more."""
        memory = self.free.pop() if self.free else BatchMemory()
        whole = memory.resize(size)
        weakref.finalize(whole, self.free.append, memory).atexit = False
        return memory.path, whole

    def ended_error(self, worker: Worker) -> RuntimeError:
        """Return the error for a loader process that has ended; waits up to 5 s for its exit code."""
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


def run_loader_server(pipes: Sequence[Connection], exits: Connection) -> None:
    """Fork a loader process for each of the pipes, and send their numbers and exit codes by ``exits``, until all ended.

    The first function of a process that has just imported this module. Imports torchvision's transforms, which most
    users' pipelines need. Linux ends this process with the rank's thread that started it, and its forks with it.
    """
    die_with_parent()
    set_process_name(NAME)
    import torchvision.transforms.v2  # noqa: F401

    gc.freeze()  # the collector writes to the objects that it visits, and forks no longer share written memory
    running = dict[int, int]()
    for number, pipe in enumerate(pipes):
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent()
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
    """Load the samples of each task that comes by the pipe, after the pickled loaders, and answer, until the rank ends.

    The end of the rank is the end of the pipe. Uses one thread of torch.
    """
    torch.set_num_threads(1)
    loaders: Sequence[SampleLoader] | None = None
    memories = dict[str, mmap.mmap]()
    with suppress(EOFError, OSError):  # the rank has ended
        content = pipe.recv_bytes()
        while True:
            number, task = pipe.recv()
            try:
                if loaders is None:
                    loaders = pickle.loads(content)
                memory = open_memory(memories, task.path, task.layout.size)
                answer: Any = load_into(memory, loaders[task.loader], task)
            except BaseException as error:
                answer = portable_error(error), traceback.format_exc()[-MOST_CHARACTERS:]
            sys.stdout.flush()  # what the user's code has printed
            pipe.send((number, answer))


def open_memory(opened: dict[str, mmap.mmap], path: str, size: int) -> NDArray[np.uint8]:
    """Return the memory at a path, of at least ``size`` bytes; ``opened`` keeps what was opened before."""
    if path not in opened or len(opened[path]) < size:
        with Path(path).open("r+b") as file:
            opened[path] = mmap.mmap(file.fileno(), 0)
    return np.frombuffer(opened[path], np.uint8)


def portable_error(error: BaseException) -> Exception:
    """Return an error that can be sent to the rank: of the same type if that is the library's, else a RuntimeError."""
    if type(error).__module__.startswith("flyte_ddp."):
        with suppress(Exception):
            return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    return RuntimeError(f"{type(error).__name__}: {error}")


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
        path, memory = pool.take_memory(layout.size)
        size = max(1, min(-(-len(samples) // (2 * pool.number)), MOST_SAMPLES))
        tasks = [
            pool.submit(Task(number, samples[start : start + size].tolist(), epoch, start, layout, path))
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
