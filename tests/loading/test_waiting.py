"""A limit for waits: blocks within blocks, code that catches the error, forks, and timers of the user's own."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from flyte_ddp import arrays, on_demand
from flyte_ddp.core.errors import MachineError
from flyte_ddp.core.loading.user_functions import Augmentation, UserFunction
from flyte_ddp.core.machine import waiting
from flyte_ddp.core.machine.waiting import limit_wait
from flyte_ddp.datasets.items import ItemLoader, Items

LIMIT = 1.0  # seconds


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(waiting, "limit_seconds", LIMIT)
    yield
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def wait() -> None:
    threading.Event().wait()


def use_seconds(seconds: float) -> None:
    """Return after so much time that no block's own limit is reached."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_the_innermost_block_is_named_with_the_stack() -> None:
    def load() -> None:
        with limit_wait("a batch"):
            with limit_wait("sample 1"):
                pass
            with limit_wait("sample 2"):
                wait()

    with pytest.raises(MachineError, match=r"^sample 2 was not ready within 1 s") as caught:
        load()
    assert "in wait" in caught.value.__notes__[0]


def test_each_block_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "limit_seconds", 3.0)
    with limit_wait("a batch"):
        for sample in range(3):
            with limit_wait(f"sample {sample}"):
                use_seconds(1.1)


def test_an_outer_block_is_limited_after_its_inner_blocks() -> None:
    def load() -> None:
        with limit_wait("a batch"):
            with limit_wait("a sample"):
                pass
            wait()

    with pytest.raises(MachineError, match=r"^a batch was not ready"):
        load()


def test_code_that_catches_the_error_is_interrupted_again() -> None:
    caught = []

    def load() -> None:
        with limit_wait("a sample"):
            try:
                wait()
            except Exception as error:
                caught.append(error)
            wait()

    with pytest.raises(MachineError, match=r"^a sample was not ready"):
        load()
    assert len(caught) == 1


def test_a_fork_has_no_limit_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "limit_seconds", 60.0)
    with limit_wait("a sample"):
        if not (child := os.fork()):
            with limit_wait("of the child"):  # which sets the timer itself
                pass
            os._exit(signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL)
        assert os.waitpid(child, 0)[1] == 0


def test_a_timer_of_the_users_own_goes_on() -> None:
    heard = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: heard.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 2 * LIMIT)
        with limit_wait("a sample"):
            assert heard.wait(30)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_sample_after_one_that_uses_the_timer_is_limited() -> None:
    def load() -> None:
        with limit_wait("a batch"):
            with limit_wait("sample 1"):
                before = signal.signal(signal.SIGALRM, lambda *_: None)
                signal.setitimer(signal.ITIMER_REAL, 60)
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            with limit_wait("sample 2"):
                wait()

    with pytest.raises(MachineError, match=r"^sample 2 was not ready"):
        load()


def test_a_length_that_never_comes_is_an_error() -> None:
    class Endless(list):  # type: ignore[type-arg]
        def __len__(self) -> int:
            wait()
            return 1

    with pytest.raises(MachineError, match=r"^train: len\(\) of a Endless was not ready"):
        on_demand(Endless([1]), [1])


@pytest.mark.parametrize("setting", ["augment", "collate"])
def test_a_function_that_never_returns_is_named(setting: str) -> None:
    spec = "item_sets:wait_for_ever"
    UserFunction(setting, spec).load()  # imports it, which takes longer than the limit on a busy machine
    loader = ItemLoader(
        Items(arrays((np.zeros((4, 2)), np.zeros(4)), (np.zeros((1, 2)), np.zeros(1))), "train"),
        spec if setting == "collate" else "stacked",
        0,
        augmentation=Augmentation(function=UserFunction("augment", spec) if setting == "augment" else None),
    )
    with pytest.raises(MachineError, match=f"^{setting}='{spec}' on train sample 2.* was not ready within 1 s"):
        loader.load_items([2, 3], 0)
