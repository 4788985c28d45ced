"""Load batches of images ahead of training, by threads of the rank: built-in decoding releases the GIL."""

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.loading.batch_memory import Layout
from flyte_ddp.loading.encoded import limit_threads
from flyte_ddp.loading.loader_process import Loaded, load_into
from flyte_ddp.loading.own_samples import SampleLoader
from flyte_ddp.order.sampling import Indices

SAMPLES_A_TASK = 8  # at most; enough to make the cost of a task itself small


class LoaderThreads:
    """Threads that do what a LoaderPool does for images, and share the loaders with the rank."""

    def __init__(self, threads: int) -> None:
        self.number = threads
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="decoder", initializer=limit_threads)

    def start_images(
        self, loader: SampleLoader, samples: Indices, epoch: int | None, layout: Layout
    ) -> tuple[NDArray[np.uint8], list[Future[Loaded]]]:
        memory = np.empty(layout.size, np.uint8)
        loads = loader.start_loads(samples.tolist(), epoch)
        size = max(1, min(SAMPLES_A_TASK, len(samples) // (2 * self.number)))
        starts = range(0, len(samples), size)
        tasks = [self.pool.submit(load_into, memory, layout, start, loads[start : start + size]) for start in starts]
        return memory, tasks

    def wait_for_images(self, tasks: Sequence[Future[Loaded]]) -> list[Loaded]:
        wait(tasks, return_when=FIRST_EXCEPTION)  # one wait for all: each wake-up takes time from the threads
        return [task.result() for task in tasks]

    def close(self) -> None:
        """Stop the threads; does not wait for those that are downloading."""
        self.pool.shutdown(wait=False, cancel_futures=True)
