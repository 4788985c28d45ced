"""Each mistake of a user is a sentence with what to do, within seconds; nothing stays."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import own_functions
import pytest
from engines import Run

from flyte_ddp import UserError
from flyte_ddp.calls import pickle_call
from flyte_ddp.core.launch import spawn


@pytest.mark.parametrize(
    ("function", "arguments", "options", "words"),
    [
        (5, (), {}, "5 is of type int, not callable"),
        (own_functions.train, (), {}, "own_functions:train: missing a required argument: 'steps'"),
        (own_functions.fail, (3,), {}, "own_functions:fail: too many positional arguments; pass arguments"),
        (own_functions.fail, (), {"lr": 1}, "own_functions:fail: got an unexpected keyword argument 'lr'; pass"),
        (own_functions.give_back, (threading.Lock(),), {}, "give_back or its arguments cannot be sent to ranks"),
        (own_functions.fail, (), {"num_ranks": -1}, "num_ranks=-1: must be a whole number of ranks, or 0"),
        (own_functions.fail, (), {"timeout": 0}, "timeout=0: must be a number of seconds above 0"),
        (own_functions.fail, (), {"folder": Path("/proc/nowhere/run")}, "run folder /proc/nowhere/run: .*must be"),
    ],
)
def test_before_there_are_ranks(run: Run, function: Any, arguments: Any, options: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run(function, *arguments, **options)


def wait_in(path: str = "", timeout: float = 3.0) -> tuple[str, float]:
    return path, timeout


def test_async_functions_are_refused(run: Run) -> None:
    async def train() -> None:
        pass

    with pytest.raises(UserError, match=r"train: is an async function; .*asyncio.run"):
        run(train)


def test_generator_functions_are_refused(run: Run) -> None:
    def train() -> Iterator[int]:
        yield 1

    with pytest.raises(UserError, match=r"train: is a generator function, .*; return a "):
        run(train)


def test_a_parameter_with_the_name_of_one_of_run_ranks(run: Run) -> None:
    """Which of the two a keyword is for cannot be known."""
    with pytest.raises(UserError, match=r"wait_in: timeout= goes to run_ranks, .*also has a parameter timeout"):
        run(wait_in, num_ranks=1, timeout=20)
    assert run(wait_in, num_ranks=1) == ("", 3.0)
    assert run(wait_in, "x", 5.0, num_ranks=1, timeout=20) == ("x", 5.0)
    assert run(partial(wait_in, timeout=4.0), num_ranks=1, timeout=20) == ("", 4.0)


def test_a_second_run_in_the_folder(run: Run, tmp_path: Path) -> None:
    def again() -> None:
        with pytest.raises(UserError, match=r"run folder .*/run: another run is writing into it"):
            run(own_functions.fail, num_ranks=1)

    run(call_here, num_ranks=1, launch=lambda work: (again(), spawn.launch(work)))


def test_a_folder_that_is_no_runs(run: Run, tmp_path: Path) -> None:
    """Whose results would be removed."""
    own = tmp_path / "run/results/mine.txt"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    with pytest.raises(UserError, match=r"run folder .*/run: its results/ belongs to no run; move it"):
        run(call_here, num_ranks=1)
    assert own.read_text() == "mine"


def call_here() -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("function", "argument", "words"),
    [
        (own_functions.step_back, "save", "save: step 2 comes after step 3, .*must not decrease"),
        (own_functions.step_back, "record", "record: step 2 comes after step 3, .*must not decrease"),
        (own_functions.save_wrong, "list", "save: the state is a list; give a dict, such as"),
        (own_functions.save_wrong, "inner", r"torch.load\(weights_only=True\) rejects state\['model'\]"),
        (own_functions.save_wrong, "later", r"torch.load\(weights_only=True\) rejects state\['best'\]"),
    ],
)
def test_in_one_rank(run: Run, function: Any, argument: str, words: str) -> None:
    """Also in the next attempt, which goes on from what was saved."""
    for _ in range(2):
        with pytest.raises(UserError, match=words):
            run(function, argument, num_ranks=1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": 1}, "record: 'kind' is a reserved key"),
        ({"loss": "low"}, "record: loss is of type str; must be a number"),
    ],
)
def test_records_that_are_no_numbers(run: Run, values: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run(partial(own_functions.record, **values), num_ranks=1)


def test_a_checkpoint_of_other_arguments_or_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="steps must not decrease"):
        run(own_functions.step_back, "save", num_ranks=1)
    with pytest.raises(UserError, match="belongs to another run: what='save', now 'record'; restore what has changed"):
        run(own_functions.step_back, "record", num_ranks=1)
    monkeypatch.setattr("flyte_ddp.core.user_code.source.compute_user_code_digest", lambda _: "other")
    with pytest.raises(UserError, match=r"belongs to another run: different user code .*; else restore"):
        run(own_functions.step_back, "save", num_ranks=1)


def test_what_tells_calls_apart() -> None:
    """The same in each process; other values, in whatever way they come, are another call."""

    def shown(function: Any, *args: Any, **kwargs: Any) -> Any:
        return pickle_call(function, args, kwargs).shown

    def closure(value: Any) -> Any:
        return lambda: value

    give_back = own_functions.give_back
    assert shown(give_back, {"b", "a", "c"}) == {"value": ["a", "b", "c"]}
    assert shown(partial(give_back, x=1), 2, y=3) == shown(give_back, 2, x=1, y=3)
    assert shown(closure(1)) != shown(closure(2))
    assert shown(own_functions.Outcome(1, []).__eq__, 1) != shown(own_functions.Outcome(2, []).__eq__, 1)
    assert shown(give_back, partial(give_back, 1)) != shown(give_back, partial(give_back, 2))
    assert shown(print, 1) == {"args": [1]}
