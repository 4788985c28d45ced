"""Load images ahead of training in threads of the rank."""

import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import numpy as np
import threadpoolctl
import torch
from numpy.typing import NDArray

from flyte_ddp.core.loading.batch_memory import Layout
from flyte_ddp.core.loading.sample_loader import Loaded, SampleLoader, load_into_memory
from flyte_ddp.core.loading.workers import LoaderPool
from flyte_ddp.core.machine import waiting
from flyte_ddp.core.order.sampling import Indices

THREADS = "decoder"  # how the threads' names begin
SAMPLES_A_TASK = 8  # most samples in a thread's task; enough to make a task's own cost small


class LoaderThreads:
    """Threads of the rank that load images, with the methods of a LoaderPool for images.

    The threads share the loaders with the rank.
    """

    def __init__(self, threads: int) -> None:
        self.number = threads
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix=THREADS, initializer=limit_to_one_thread)

    def start_loading_images(
        self, loader: SampleLoader, samples: Indices, epoch: int | None, layout: Layout
    ) -> tuple[NDArray[np.uint8], list[Future[Loaded]]]:
        """Start loading a batch of images, without waiting.

        Returns:
            The batch's memory, and the tasks for :meth:`wait_for_loaded_images`.
        """
        memory = np.empty(layout.size, np.uint8)
        loads = loader.make_load_functions(samples.tolist(), epoch)
        size = max(1, min(SAMPLES_A_TASK, len(samples) // (2 * self.number)))
        starts = range(0, len(samples), size)
        tasks = [
            self.pool.submit(load_into_memory, memory, layout, start, loads[start : start + size]) for start in starts
        ]
        return memory, tasks

    def wait_for_loaded_images(self, tasks: Sequence[Future[Loaded]]) -> list[Loaded]:
        """Wait until all tasks have loaded their images, and return the results in order.

        Raises:
            Exception: A task failed, with this error.
            MachineError: The tasks did not end within ``waiting.limit_seconds``.
        """
        # Wait once for all tasks, because each wake-up takes time from the threads.
        done, _ = wait(tasks, waiting.limit_seconds, return_when=FIRST_EXCEPTION)
        if len(done) < len(tasks) and not any(task.exception() for task in done):
            frames = [frame for thread, frame in sys._current_frames().items() if thread in self.list_threads()]
            stacks = ["".join(traceback.format_stack(frame)) for frame in frames]
            raise waiting.make_late_error("a batch from decoding threads", "\n".join(stacks))
        return [task.result() for task in tasks]

    def list_threads(self) -> set[int | None]:
        return {thread.ident for thread in threading.enumerate() if thread.name.startswith(THREADS)}

    def close(self) -> None:
        """Stop the threads, without waiting for threads that are downloading."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def limit_to_one_thread() -> None:
    """Limit torch and OpenMP to one thread for all later work of the calling thread."""
    torch.get_num_threads()  # torch's first call in a thread sets its number of threads, so the limit comes after it
    threadpoolctl.threadpool_limits(1, user_api="openmp")


ImagePool = LoaderPool | LoaderThreads
