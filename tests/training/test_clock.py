"""Where the time goes, by the host's clock and by that of a device which the host does not wait for."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flyte_ddp.config import Hyperparameters
from flyte_ddp.hardware import Hardware
from flyte_ddp.machine.clock import WORK, Clock, make_clock
from flyte_ddp.training.recording import Recorder, describe_waiting

WAITS = ("waiting_data", "waiting_launches")


class Device:
    """A stand-in for a GPU: work is handed over at once, and takes its time after what was handed over before."""

    def __init__(self, queue: int = 1000) -> None:
        self.now = 0.0  # of the host
        self.free_at = 0.0
        self.spun = 0.0
        self.busy: Counter[str] = Counter()  # what is to be found
        self.queue: deque[float] = deque(maxlen=queue)  # when the newest kernels end

    def work(self, seconds: float) -> None:
        """Take the work; if the queue is full the host waits for its oldest."""
        if len(self.queue) == self.queue.maxlen:
            self.now = max(self.now, self.queue[0])
        self.free_at = max(self.now, self.free_at) + seconds
        self.queue.append(self.free_at)

    def spin(self, seconds: float) -> None:
        self.spun += seconds
        self.work(seconds)

    def launch(self, name: str, kernels: int, host: float, seconds: float) -> None:
        for _ in range(kernels):
            self.now += host
            self.work(seconds)
        self.busy[name] += kernels * seconds

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


def make_device(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Device, Clock]:
    device = Device(**options)
    monkeypatch.setattr("flyte_ddp.machine.clock.time", SimpleNamespace(perf_counter=lambda: device.now))
    return device, Clock(lambda: Event(device), device.spin)


def train(
    device: Device, clock: Clock, steps: int, *, host: float, kernel: float, kernels: int = 60, load: float = 0.0
) -> float:
    """Train as the library does: the host waits for the loss of the step before. Return the seconds from step 2 on."""
    last, begin = 0.0, 0.0
    for step in clock.time_steps(range(steps)):
        if step == 1:
            device.busy.clear()
            begin = device.now
        elif not step:
            device.now += 30.0  # the first step compiles
        with clock("data"):
            device.now += load
            device.launch("data", 2, host, kernel)
        with clock("forward_backward"):
            device.launch("forward_backward", kernels, host, kernel)
        with clock("communication"):
            device.launch("communication", 1, host, kernel)
        device.now, last = max(device.now, last), device.free_at
        with clock("optimizer"):
            device.launch("optimizer", 3, host, kernel)
    seconds = device.now - begin
    device.wait()
    return seconds


def check_parts(device: Device, clock: Clock, seconds: float) -> dict[str, float]:
    """Check that each activity has the device's own busy seconds, and waits the rest; return the seconds."""
    found = clock.seconds
    assert found["steps"] == pytest.approx(seconds)
    assert [found[name] for name in WORK] == [pytest.approx(device.busy[name], rel=1e-6) for name in WORK]
    assert sum(found[name] for name in (*WORK, *WAITS)) == pytest.approx(seconds, rel=0.01)
    device.now += 5.0  # writes results
    parts = Recorder.seconds_by_activity(SimpleNamespace(clock=clock))  # type: ignore[arg-type]
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total) == pytest.approx(device.now)
    assert parts["other"] >= 35.0, "with the first step"
    return found


def test_a_device_that_is_the_limit_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device, clock = make_device(monkeypatch)
    seconds = train(device, clock, 200, host=1e-4, kernel=1e-3)
    found = check_parts(device, clock, seconds)
    assert sum(found[name] for name in WAITS) < 0.01 * seconds
    assert not device.spun


@pytest.mark.parametrize("load", [0.0, 0.5])
def test_busy_time_is_told_from_waits_for_launches_and_for_data(monkeypatch: pytest.MonkeyPatch, load: float) -> None:
    """The spins take next to no time: the device had nothing to do."""
    device, clock = make_device(monkeypatch)
    seconds = train(device, clock, 200, host=1e-3, kernel=1e-4, load=load)
    found = check_parts(device, clock, seconds)
    waited = seconds - sum(device.busy.values())
    share = (load + 0.002) / (load + 0.066)  # of the host's time: the load, and the data's own 2 of 66 launches
    assert found["waiting_data"] == pytest.approx(share * waited, rel=0.01)
    assert found["waiting_launches"] == pytest.approx((1 - share) * waited, rel=0.01)
    assert device.spun
    alone = Device()
    monkeypatch.setattr("flyte_ddp.machine.clock.time", SimpleNamespace(perf_counter=lambda: alone.now))
    without = train(alone, Clock(), 200, host=1e-3, kernel=1e-4, load=load)
    assert seconds < 1.001 * without


def test_batches_that_are_late_and_longer_than_a_spin_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    device, clock = make_device(monkeypatch)
    train(device, clock, 100, host=1e-4, kernel=1e-3, load=4.0)
    found = clock.seconds
    assert found["forward_backward"] == pytest.approx(device.busy["forward_backward"])
    assert found["data"] < 0.01 * found["steps"]
    assert found["waiting_data"] > 0.95 * found["steps"]


def test_a_resumed_run_has_the_time_of_both_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    device, clock = make_device(monkeypatch)
    train(device, clock, 100, host=1e-3, kernel=1e-4)
    earlier, total = dict(clock.seconds), clock.total()
    device, clock = make_device(monkeypatch)
    clock.add_earlier(earlier, total)
    assert clock.seconds == earlier
    train(device, clock, 100, host=1e-3, kernel=1e-4)
    assert clock.seconds == {name: pytest.approx(2 * seconds) for name, seconds in earlier.items()}
    assert clock.total() == pytest.approx(2 * total)


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
    assert [*on_cpu.time_steps("ab")] == ["a", "b"]
    assert on_cpu.seconds.keys() == {"data"}, "a CPU waits for nobody"


HP = Hyperparameters(batch_size=48)
ON_16 = Hardware(1, "cuda", 16, precision="bf16", channels_last=True)


def waits(data: float, launches: float) -> dict[str, float]:
    return {"steps": 10.0, "waiting_data": data, "waiting_launches": launches}


def test_waits_of_more_than_a_fifth_are_told() -> None:
    assert not describe_waiting(waits(1.0, 0.99), HP, ON_16, 15, pictures=True)
    assert describe_waiting(waits(1.0, 1.01), HP, ON_16, 15, pictures=True)
    assert not describe_waiting({"data": 5.0}, HP, ON_16, 15, pictures=True), "as a CPU's clock says"


def test_what_a_gpu_waits_for_most_decides_what_to_do() -> None:
    told = describe_waiting(waits(8.0, 0.5), HP, ON_16, 15, pictures=True)
    assert told == (
        "The GPU waited 85 % of the training time, mostly for data: 15 loader process(es) on 16 core(s); use more "
        "cores, smaller stored pictures, or a smaller image_size."
    )
    of_four = describe_waiting(waits(8.0, 0.5), HP, replace(ON_16, num_ranks=4), 3, pictures=False)
    assert "3 loader process(es) on 16 core(s), for each rank; use FLYTE_DDP_LOADERS=15, or faster functions" in of_four
    assert "room for them" in describe_waiting(waits(8.0, 0.5), HP, ON_16, 0, pictures=True)
    for_host = describe_waiting(waits(0.5, 8.0), HP, ON_16, 15, pictures=True)
    assert "launch" in for_host
    assert for_host.endswith("use a larger batch_size (now 48), or compile=true.")
    compiled = describe_waiting(waits(0.5, 8.0), replace(HP, compile=True), ON_16, 15, pictures=True)
    assert compiled.endswith("use a larger batch_size (now 48).")
