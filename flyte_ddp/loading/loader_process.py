"""What runs in loader processes, and in the process that forks them: tasks of samples are loaded into their batches."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from flyte_ddp.errors import UserError
from flyte_ddp.loading.batch_memory import Layout, open_memory, write_tree
from flyte_ddp.loading.own_samples import Sample, SampleLoader
from flyte_ddp.machine.process import (
    M_MMAP_THRESHOLD,
    M_TRIM_THRESHOLD,
    die_with_parent,
    set_malloc_option,
    set_process_name,
)

NAME = "loader process"
MOST_CHARACTERS = 20_000  # of a traceback
KEPT_BLOCK_BYTES, KEPT_BYTES = 2**25, 2**27  # of freed memory; the first is the most that glibc allows


class Task(NamedTuple):
    """Samples that one process loads, each into its place in the memory of their batch."""

    loader: int  # number of the SampleLoader
    samples: list[int]
    epoch: int | None
    first: int  # the place of the first sample in the batch
    layout: Layout
    path: str  # of the batch's memory

    def run(self, loader: SampleLoader, opened: dict[str, mmap.mmap]) -> Loaded:
        memory = open_memory(opened, self.path, self.layout.size)
        loads = loader.start_loads(self.samples, self.epoch)
        return load_into(memory, self.layout, self.first, loads)._replace(report=loader.take_report())


class Call(NamedTuple):
    """A call of a loader's method by one process, which writes the result into memory."""

    loader: int  # its number
    method: str
    arguments: tuple[Any, ...]
    path: str  # of the memory, which may grow

    def run(self, loader: Any, opened: dict[str, mmap.mmap]) -> Written:
        result = getattr(loader, self.method)(*self.arguments)
        return Written(*write_tree(opened, self.path, tree_map(tensor_to_array, result)))


class Written(NamedTuple):
    """What a process answers after a call: where the result is in the memory, for ``batch_memory.read_tree``."""

    start: int
    end: int


class Loaded(NamedTuple):
    """What a process answers after a task."""

    names: list[str]
    shape: tuple[int, ...]  # of the images
    report: Any = None  # of the SampleLoader


def run_loader_server(pipes: Sequence[Connection], exits: Connection) -> None:
    """Fork a loader process for each of the pipes; send their numbers and exit codes by ``exits``, until all ended."""
    die_with_parent()
    set_process_name(NAME)
    # Before the forks, because most users' pipelines need it.
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
    """Receive the pickled loaders, then tasks; answer each, until the rank ends and with it the pipe."""
    torch.set_num_threads(1)
    # What an item frees the next one allocates again, without page faults; large blocks still go back to the kernel.
    set_malloc_option(M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    set_malloc_option(M_TRIM_THRESHOLD, KEPT_BYTES)
    loaders: Sequence[Any] | None = None
    memories = dict[str, mmap.mmap]()
    with suppress(EOFError, OSError):  # the rank has ended
        content = pipe.recv_bytes()
        while True:
            number, task = pipe.recv()
            try:
                if loaders is None:
                    loaders = pickle.loads(content)
                answer: Any = task.run(loaders[task.loader], memories)
            except BaseException as error:
                answer = portable_error(error), traceback.format_exc()[-MOST_CHARACTERS:]
            sys.stdout.flush()  # what the user's code has printed
            pipe.send((number, answer))


def tensor_to_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) and value.dtype != torch.bfloat16 else value


def load_into(memory: NDArray[np.uint8], layout: Layout, first: int, loads: Sequence[Callable[[], Sample]]) -> Loaded:
    """Call ``loads``, and write their images and targets into a batch's memory, from the place ``first`` on."""
    targets, names = layout.targets(memory), []
    shapes = set[tuple[int, ...]]()
    for place, load in enumerate(loads, first):
        image, targets[place], name = load()
        shapes.add(image.shape)
        start = place * layout.image_bytes
        copy_image(image, memory[start : start + image.size].reshape(image.shape))
        names.append(name)
    return Loaded(names, common_shape(shapes))


def copy_image(image: NDArray[np.uint8], to: NDArray[np.uint8]) -> None:
    """Copy ``image`` [H, W, C] into ``to``; a view of a [C, H, W] array is copied by channels, three times as fast."""
    if image.flags.c_contiguous:
        to[...] = image
    else:
        for channel in range(image.shape[2]):
            to[..., channel] = image[..., channel]


def common_shape(shapes: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    if len({*shapes}) > 1:
        found = " and ".join(str(list(shape)) for shape in sorted({*shapes}))
        raise UserError(f"augment: images of one batch are {found}; return images of one size")
    return next(iter(shapes))


def portable_error(error: BaseException) -> Exception:
    """Return an error that can be sent to the rank: of the same type if that is the library's, else a RuntimeError."""
    if type(error).__module__.startswith("flyte_ddp."):
        with suppress(Exception):
            return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    return RuntimeError(f"{type(error).__name__}: {error}")
