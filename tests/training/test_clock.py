"""Where the time goes, by the host's clock and by that of a device which the host does not wait for."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from flyte_ddp.core.hardware import Hardware
from flyte_ddp.core.machine.clock import STEPS, Clock, make_clock
from flyte_ddp.core.training.recording import Recorder, describe_waiting_for_data


class Device:
    """A stand-in for a GPU: work is handed over at once, and takes its time after what was handed over before."""

    def __init__(self) -> None:
        self.now = 0.0  # of the host
        self.free_at = 0.0

    def launch(self, kernels: int, host: float, seconds: float) -> None:
        for _ in range(kernels):
            self.now += host
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


def make_device(monkeypatch: pytest.MonkeyPatch) -> tuple[Device, Clock]:
    device = Device()
    monkeypatch.setattr("flyte_ddp.core.machine.clock.time", SimpleNamespace(perf_counter=lambda: device.now))
    return device, Clock(lambda: Event(device))


def train(device: Device, clock: Clock, steps: int, *, host: float, kernel: float, load: float = 0.0) -> float:
    """Train as the library does: the host waits for the loss of the step before. Return the seconds from step 2 on."""
    last, begin = 0.0, 0.0
    for step in clock.iterate_and_time_steps(range(steps)):
        if step == 1:
            begin = device.now
        elif not step:
            device.now += 30.0  # the first step compiles
        with clock("data"):
            device.now += load
            device.launch(2, host, kernel)
        with clock("forward_backward"):
            device.launch(60, host, kernel)
        device.now, last = max(device.now, last), device.free_at
        with clock("optimizer"):
            device.launch(3, host, kernel)
    seconds = device.now - begin
    device.wait()
    return seconds


def check_parts(device: Device, clock: Clock, seconds: float) -> None:
    """Check that the parts make up all of the time."""
    assert clock.seconds[STEPS] == pytest.approx(seconds)
    device.now += 5.0  # writes results
    parts = asdict(Recorder.seconds_by_activity(SimpleNamespace(clock=clock)))  # type: ignore[arg-type]
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total) == pytest.approx(device.now)
    assert parts["other"] >= 35.0, "with the first step"


def test_a_device_that_is_the_limit_has_the_seconds_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host loads a batch while the device works, so the device waits for no data."""
    device, clock = make_device(monkeypatch)
    seconds = train(device, clock, 200, host=1e-4, kernel=1e-3, load=0.03)
    check_parts(device, clock, seconds)
    found = clock.seconds
    assert found["forward_backward"] == pytest.approx(199 * 60 * 1e-3)
    assert found["data"] == pytest.approx(199 * 2 * 1e-3, rel=0.02)
    assert not describe_waiting_for_data(found, ON_16, 15, pictures=True)


def test_batches_that_are_late_are_waits_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    device, clock = make_device(monkeypatch)
    seconds = train(device, clock, 100, host=1e-4, kernel=1e-3, load=0.5)
    check_parts(device, clock, seconds)
    idle = 99 * (0.5 - 63 * (1e-3 - 1e-4))  # without what the device has still to do of the step before
    assert clock.seconds["data"] == pytest.approx(idle, rel=0.02)
    assert describe_waiting_for_data(clock.seconds, ON_16, 15, pictures=True).startswith("The GPU waited 8")


def test_a_resumed_run_has_the_time_of_both_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    device, clock = make_device(monkeypatch)
    train(device, clock, 100, host=1e-3, kernel=1e-4)
    earlier, total = dict(clock.seconds), clock.total()
    device, clock = make_device(monkeypatch)
    clock.add_earlier_seconds(earlier, total)
    assert clock.seconds == earlier
    train(device, clock, 100, host=1e-3, kernel=1e-4)
    assert clock.seconds == {name: pytest.approx(2 * seconds) for name, seconds in earlier.items()}
    assert clock.total() == pytest.approx(2 * total)


def test_evaluation_and_work_of_a_cpu_need_no_events() -> None:
    """An evaluation ends by waiting for the device."""
    clock = Clock(lambda: pytest.fail("needs no event"))
    with clock("evaluation"):
        pass
    assert clock.seconds["evaluation"] > 0.0
    assert not clock.pending
    on_cpu = make_clock(torch.device("cpu"))
    with pytest.raises(ArithmeticError), on_cpu("data"):
        raise ArithmeticError
    assert 0.0 < on_cpu.seconds["data"] <= on_cpu.total(), "a block that raises is counted"
    assert [*on_cpu.iterate_and_time_steps("ab")] == ["a", "b"]
    assert on_cpu.seconds.keys() == {"data"}, "a CPU waits for nobody"


ON_16 = Hardware(1, "cuda", 16, precision="bf16", channels_last=True)


def waits(loading: float, data: float) -> dict[str, float]:
    return {STEPS: 10.0, "loading": loading, "data": data}


def test_waits_of_more_than_a_fifth_are_reported() -> None:
    assert not describe_waiting_for_data(waits(1.0, 0.99), ON_16, 15, pictures=True)
    assert describe_waiting_for_data(waits(1.0, 1.01), ON_16, 15, pictures=True)
    assert not describe_waiting_for_data({"data": 5.0}, ON_16, 15, pictures=True), "as a CPU's clock says"


def test_a_wait_comes_with_what_to_do() -> None:
    told = describe_waiting_for_data(waits(8.0, 0.5), ON_16, 15, pictures=True)
    assert told == (
        "The GPU waited 85 % of the training time for data: 15 loader process(es) on 16 core(s); use more "
        "cores, smaller stored pictures, or a smaller image_size."
    )
    of_four = describe_waiting_for_data(waits(8.0, 0.5), replace(ON_16, num_ranks=4), 3, pictures=False)
    assert "3 loader process(es) on 16 core(s), for each rank; use FLYTE_DDP_LOADERS=15, or faster functions" in of_four
    assert "memory for the data" in describe_waiting_for_data(waits(8.0, 0.5), ON_16, 0, pictures=True)
