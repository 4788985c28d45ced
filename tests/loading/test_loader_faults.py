"""Processes that decode pictures: killed, without shared memory, and slow."""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoded_runs import BASE, labelled, quiet, train
from faulty_runs import when
from image_folders import stored, write_files
from PIL import Image
from processes import children_of, wait_until

from flyte_ddp.core.errors import MachineError, StoppedError, UserError
from flyte_ddp.core.loading.loader_threads import LoaderThreads
from flyte_ddp.core.loading.worker_sources import WorkerImages
from flyte_ddp.core.loading.workers import LoaderPool
from flyte_ddp.core.machine.process import list_children, list_living_trees
from flyte_ddp.core.order.sampling import ListedOrder
from flyte_ddp.core.training import train as training
from flyte_ddp.datasets.encoded.image_list import list_images
from flyte_ddp.datasets.encoded.readers import Encoded, FileReader
from flyte_ddp.datasets.encoded.samples import BadSamples, EncodedSamples

SAMPLES = np.arange(24)
Open = Callable[..., WorkerImages]


def write_pictures(folder: Path) -> None:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (len(SAMPLES), 9, 9, 3), np.uint8)
    write_files(folder, {f"{n % 3}/{n}.png": stored(Image.fromarray(each), "PNG") for n, each in enumerate(pixels)})


def open_pictures(folder: Path, processes: int, kind: type[FileReader] = FileReader, size: int = 8) -> WorkerImages:
    """Return a source of the pictures in a folder, loaded by so many processes; 0: by a thread."""
    loader = EncodedSamples(kind(list_images(str(folder))), [ListedOrder(SAMPLES)], BadSamples(0), size=size, classes=3)
    pool = LoaderPool([loader], processes) if processes else LoaderThreads(1)
    return WorkerImages(loader, pool, torch.device("cpu"))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens sources of the same pictures, and closes them."""
    folder, made = tmp_path / "pictures", list[WorkerImages]()
    write_pictures(folder)

    def make(*args: Any) -> WorkerImages:
        made.append(open_pictures(folder, *args))
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.mark.parametrize("victim", ["a loader process", "the process that starts loader processes"])
def test_a_decoding_process_that_is_killed_is_an_error_of_the_machine(opened: Open, victim: str) -> None:
    """Without a process that stays."""
    source = opened(2)
    source.load_batch(SAMPLES, 0)  # all have started
    server = source.pool.server.pid
    loaders = list_children(server)
    os.kill(server if "starts" in victim else min(loaders), signal.SIGKILL)  # with the server end all
    wait_until(lambda: min(loaders) not in list_living_trees(loaders))
    with pytest.raises(MachineError, match=f"^{victim} ended with SIGKILL, .* memory; lower"):
        source.load_batch(SAMPLES, 0)
    source.close()
    assert children_of(os.getpid()) == []


@contextmanager
def open_files_limit(most: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_processes_than_open_files_are_refused(opened: Open) -> None:
    """When all pipes but the last one have been made."""
    limit = len([*Path("/proc/self/fd").iterdir()]) - 1 + 135
    with open_files_limit(limit), pytest.raises(UserError) as caught:
        opened(67)
    assert str(caught.value) == (
        "67 loader processes: more than this process's limits allow (Too many open files); "
        "lower FLYTE_DDP_LOADERS, or raise the limits (ulimit)"
    )
    assert children_of(os.getpid()) == []


class Slow(FileReader):
    """Its first picture comes when the file ``go`` is there."""

    def read_sample(self, sample: int) -> Encoded:
        if sample == 0:
            wait_until(Path(self.images.address).with_name("go").exists)
        return super().read_sample(sample)


def test_a_slow_picture_is_waited_for_and_the_others_keep_their_places(opened: Open, tmp_path: Path) -> None:
    """The other process loads what it has of this batch and of the next one meanwhile."""
    source, at_once = opened(2, Slow), opened(0)
    batches = SAMPLES[:12], SAMPLES[12:]
    for batch in batches:
        source.begin_batch(batch, 0)

    def count_answers() -> int:
        source.pool.receive_answers(wait=False)
        return len(source.pool.answers)

    wait_until(lambda: count_answers() == 4)  # half of each batch's four tasks
    (tmp_path / "go").touch()
    for batch in batches:
        ours, others = (each.load_batch(batch, 0) for each in (source, at_once))
        assert torch.equal(ours.inputs, others.inputs)
        assert ours.names == others.names


@pytest.mark.slow
def test_a_stop_is_heard_while_a_slow_picture_is_waited_for(tmp_path, monkeypatch, temporary: Path) -> None:
    folder = labelled(tmp_path / "pictures", 60)
    hp = replace(BASE, dataset=f"image_folder:{folder}", sample="own_loading:wait_for_go", num_classes=3, batch_size=10)
    hp = replace(hp, model="faults:model", image_size=8)
    waits, go = (temporary / name for name in ("waits", "go"))
    go.touch()
    step, done = training.train_step, list[int]()

    def slow_after_three_steps(*args: Any) -> None:
        step(*args)
        done.append(1)
        if len(done) == 3:
            go.unlink()
            waits.unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train_step", slow_after_three_steps)
        stopping = when(waits, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(StoppedError, match=r"will go on after step \d+, which is saved") as caught:
            train(hp, tmp_path, quiet(tmp_path, loaders=2))
    stopping.join()
    assert caught.value.step >= 3
    assert children_of(os.getpid()) == []
