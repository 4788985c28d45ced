"""Where the time goes, by the host's clock and by that of a device which the host does not wait for."""

from __future__ import annotations

import threading

import pytest
import torch

from flyte_ddp.clock import Clock, make_clock


class Device:
    """A stand-in for a GPU: work is handed over at once, and takes its time after what was handed over before."""

    def __init__(self) -> None:
        self.now = 0.0  # of the host
        self.free_at = 0.0

    def work(self, seconds: float) -> None:
        self.free_at = max(self.now, self.free_at) + seconds

    def wait(self) -> None:
        self.now = max(self.now, self.free_at)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at = max(self.device.now, self.device.free_at)

    def query(self) -> bool:
        return self.device.now >= self.at

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query(), "torch raises for an event that has not come"
        return (other.at - self.at) * 1000.0


def step(clock: Clock, device: Device, *, host: float) -> None:
    """As training does it: the host waits outside every clock, for the loss of the step before."""
    with clock("data"):
        device.now += host
    with clock("forward_backward"):
        device.now += 0.001
        device.work(0.5)
    with clock("communication"):
        device.work(0.25)
    device.wait()


def test_work_of_a_device_counts_for_what_it_was_handed_over() -> None:
    device = Device()
    clock = Clock(lambda: Event(device))
    for _ in range(4):
        step(clock, device, host=0.125)
    found = clock.seconds
    assert found["data"] == pytest.approx(4 * 0.125)
    assert found["forward_backward"] == pytest.approx(4 * 0.501), "with the host's part, for which the device waits"
    assert found["communication"] == pytest.approx(4 * 0.25)
    assert sum(found.values()) == pytest.approx(device.now)


def test_what_the_host_does_meanwhile_counts_for_nothing() -> None:
    device = Device()
    clock = Clock(lambda: Event(device))
    with clock("forward_backward"):
        device.work(1.0)
    with clock("data"):
        device.now += 0.75
    assert clock.seconds["data"] == 0.0, "what has not come yet is not waited for"
    device.wait()
    assert clock.seconds == {"forward_backward": pytest.approx(1.0), "data": pytest.approx(0.0)}


def test_events_of_many_steps_do_not_pile_up_and_other_threads_may_ask() -> None:
    device = Device()
    clock = Clock(lambda: Event(device))
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            dict(clock.seconds)

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(500):
        step(clock, device, host=0.0)
        assert len(clock.pending) <= 4
    done.set()
    asking.join()
    assert clock.seconds["forward_backward"] == pytest.approx(500 * 0.501)


def test_evaluation_and_work_of_a_cpu_need_no_events() -> None:
    """An evaluation ends by waiting for the device; the rate of the next steps is without it."""
    clock = Clock(lambda: pytest.fail("needs no event"))
    with clock("evaluation"):
        pass
    assert clock.seconds["evaluation"] > 0.0
    assert not clock.pending
    on_cpu = make_clock(torch.device("cpu"))
    with pytest.raises(ArithmeticError), on_cpu("data"):
        raise ArithmeticError
    assert 0.0 < on_cpu.seconds["data"] <= on_cpu.total(), "a block that raises is counted"
