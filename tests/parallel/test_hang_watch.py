"""A rank whose host waits for others without a time limit of its own, as with NCCL, still says so in time."""

import queue
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from array_sources import images_in_memory
from ranks import run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flyte_ddp.core.launch.supervise.failure_report import Cause, make_failure_report
from flyte_ddp.core.machine.clock import Clock
from flyte_ddp.core.parallel.distributed import broadcast_object, copy_from_rank_0, gather_objects, sum_over_ranks
from flyte_ddp.core.parallel.hang_watch import HangWatch, start_hang_watch
from flyte_ddp.core.parallel.strategies import create_gradient_sync
from flyte_ddp.core.parallel.training_pass import TrainingPass
from flyte_ddp.datasets.encoded.streams import StreamImages

META = torch.device("meta")
KINDS = ((8, 8, 1), torch.uint8), ((), torch.int64)  # of images and labels


class Event:
    """A CUDA event that comes after so many looks; without a number, never."""

    def __init__(self, looks: float = float("inf")) -> None:
        self.looks, self.recorded = looks, False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        assert self.recorded
        self.looks -= 1
        return self.looks < 0


def test_a_device_that_does_not_end_is_reported_with_the_place_of_the_host() -> None:
    reported: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    watch = HangWatch(0.05, reported.put, Event)
    with watch.in_collective():
        pass
    watch.watch_until_overdue()
    error = reported.get_nowait()
    report = make_failure_report(error)
    assert report.cause is Cause.TIMEOUT
    assert report.message.startswith("the GPU waited for other ranks for 0.05 s")
    assert "in test_a_device_that_does_not_end" in report.traceback


def test_what_ends_is_forgotten_and_what_is_young_is_waited_for() -> None:
    watch = HangWatch(60.0, pytest.fail, lambda: Event(looks=2))
    with watch.in_collective():
        pass
    with suppress(ArithmeticError), watch.in_collective():
        raise ArithmeticError
    assert [watch.has_overdue_collective() for _ in range(2)] == [False, False]
    assert len(watch.entered) == 2
    assert not watch.has_overdue_collective()
    assert not watch.entered
    with watch.in_collective():
        assert not watch.has_overdue_collective()
        assert watch.entered


def test_a_device_that_fails_ends_the_watch_without_a_report() -> None:
    """The rank's own thread meets the same error."""

    class Failing(Event):
        def query(self) -> bool:
            raise RuntimeError("CUDA error: device-side assert triggered")

    watch = HangWatch(0.0, pytest.fail, Failing)
    with watch.in_collective():
        pass
    watch.watch_until_overdue()


def collectives() -> dict[str, Callable[[], object]]:
    """All that a rank may wait for others in; each is done by both ranks in turn."""
    model = nn.Linear(2, 2)
    of_ddp = create_gradient_sync(nn.Linear(2, 2), "ddp", Clock())
    hooks = create_gradient_sync(nn.Linear(2, 2), "hooks", Clock())

    def step(sync):
        with sync.micro_batch(last=True):
            sync(torch.ones(1, 2)).sum().backward()
        sync.average_gradients(torch.zeros(2))

    return {
        "sum": lambda: sum_over_ranks(torch.zeros(3)),
        "copies": lambda: copy_from_rank_0(model.parameters()),
        "object": lambda: broadcast_object("value"),
        "objects": lambda: gather_objects("value"),
        "making DDP": lambda: create_gradient_sync(nn.Linear(2, 2), "ddp", Clock()),
        "the backward pass of DDP": lambda: step(of_ddp),
        "hooks": lambda: step(hooks),
    }


def come_late(_: Path) -> None:
    """Rank 1 comes to each collective only when rank 0 has reported that it does not come."""
    store = dist.distributed_c10d._get_default_store()
    for name, collective in collectives().items():
        if dist.get_rank() == 0:
            start_hang_watch(0.1, lambda error, name=name: store.set(name, str(error)), lambda: Event(looks=0))
        else:
            store.wait([name])
            assert store.get(name) == b"the GPU waited for other ranks for 0.1 s"
        collective()


@pytest.mark.slow
def test_every_collective_is_watched(tmp_path: Path) -> None:
    """gloo's own limit is a minute, in which rank 0 waits inside torch."""
    assert run_ranks(come_late, tmp_path, 2) == [0, 0]


class Copies(TorchDispatchMode):
    """Collects the copies from the host to the device: from page-locked memory or not, waited for or not."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()
        self.found: list[tuple[bool, bool]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and kwargs.get("device") == META and args[0].device != META:
            self.found.append((args[0].data_ptr() in self.pinned, kwargs.get("non_blocking", False)))
        return function(*args, **kwargs)


@pytest.mark.slow
def test_the_host_does_not_wait_for_the_device_to_copy_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that computes nothing in the place of a GPU."""
    copies, samples = Copies(), np.arange(4)

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        copies.pinned.add(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    images, labels = (torch.zeros(9, *shape, dtype=kind, device=META) for shape, kind in KINDS)
    on_host = images_in_memory(*(torch.zeros(9, *shape, dtype=kind) for shape, kind in KINDS), META)
    stream = StreamImages(SimpleNamespace(loader=SimpleNamespace(sizes=[(8, 8, 3)]), workers=0), META)
    stream.samples = iter([(np.zeros((8, 8, 3), np.uint8), 0)] * 4)
    with copies:
        for source in (images_in_memory(images, labels, META, augment="crop_flip"), on_host, stream):
            batch = source.load_batch(samples, 0)
            assert (batch.inputs.device, batch.targets.device) == (META, META)
        this_pass = TrainingPass()
        this_pass.has_dropout = True
        this_pass.begin_pass(0, 0, samples, META)
    assert copies.found == [(True, True)] * 9  # rows; places of two axes; images and targets, twice; dropout, twice
