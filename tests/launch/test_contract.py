"""One contract for all launchers: what ranks find, what a run leaves, what is told of a fault; and nothing stays."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import agents
import faults
import pytest
import torch
from cli import HELPERS
from engines import AGENTS, DASK, ELASTIC, FRESH, RAY, SPAWN, Launch, everywhere, on
from faulty_runs import HP as FAULTY
from faulty_runs import INTRODUCED as HP
from faulty_runs import equal, nothing_like_a_result, saved, weights, when
from processes import processes_with

from flyte_ddp.errors import RankError, StoppedError
from flyte_ddp.json_lines import read_records
from flyte_ddp.launch import elastic, spawn
from flyte_ddp.models.artifacts import read_sidecar
from flyte_ddp.run import Result, run_training
from flyte_ddp.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("temporary", "unchanged")]


@pytest.fixture(scope="module")
def stopped(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three spawned ranks that was stopped."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)
        patch.setenv("TMPDIR", str(folder))
        faults.inject(patch, folder / "marker", rank=2, at="training", kind="SIGTERM", **{"pass": 3})
        hp = replace(HP, num_ranks=3)
        with pytest.raises(StoppedError, match=r"will go on after step \d+, which is saved"):
            run_training(hp, digits, folder / "run", Settings(progress="off", wandb_mode="disabled"))
    return folder / "run"


@pytest.fixture
def unchanged(launch: Launch) -> Iterator[None]:
    """Of the launching process: environment, folder, handlers of signals, threads' number."""

    def now() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
        # Those of the tests, of Ray, where we connect, and of joblib, when it is imported.
        other = {"PYTEST_CURRENT_TEST", "FAULTS", "RAY_CLIENT_MODE", "PYTHONBREAKPOINT", "KMP_INIT_AT_FORK"}
        environment = {name: os.environ[name] for name in os.environ.keys() - other}
        return environment, Path.cwd(), [*sys.path], handlers, torch.get_num_threads()

    before = now()
    yield
    for then, here in zip(before, now(), strict=True):
        assert here == then


def nothing_is_left(run: Path, temporary: Path) -> None:
    """No process that a rank or an agent was, none of their files, nothing that looks like a result."""
    ranks = [
        command
        for command in processes_with(str(temporary)).values()
        if "flyte_ddp" in command or "spawn_main" in command
    ]
    assert ranks == []
    assert [path for path in temporary.iterdir() if path.name.startswith("flyte-ddp")] == []
    nothing_like_a_result(run)


def losses(result: Result) -> list[float]:
    return [record["loss"] for record in read_records(result.metrics) if record["kind"] == "train"]


@pytest.mark.cold
@everywhere
def test_the_same_weights_as_from_spawned_ranks(
    launch: Launch, expected: Result, digits: Path, tmp_path: Path, temporary: Path, quiet: Settings
) -> None:
    """Bit for bit, with all that a run leaves."""
    found = run_training(HP, digits, tmp_path / "run", quiet, launch=launch)
    assert equal(expected.run_folder, found.run_folder)
    assert losses(expected) == losses(found)
    assert read_sidecar(found.sidecar) == read_sidecar(expected.sidecar)
    (start,) = [record for record in read_records(found.metrics) if record["kind"] == "start"]
    assert (start["num_ranks"], start["num_nodes"]) == (2, 1)
    assert {path.name for path in expected.run_folder.iterdir()} == {path.name for path in found.run_folder.iterdir()}
    assert [path for path in temporary.iterdir() if path.name.startswith("flyte-ddp")] == []
    about = {"ranks": 2, "sum": 11.0, "threads": 1, "in the main thread": True, "may have children": True}
    assert {path.name: json.loads(path.read_text()) for path in temporary.glob("rank *")} == {
        "rank 0": about,
        "rank 1": about,
    }
    handed_in = found.run_folder / "results"
    assert [json.loads((handed_in / f"ranks/{rank}.json").read_text()) for rank in (0, 1)] == [about, about]
    events = [json.loads(line) for line in (handed_in / "events.jsonl").read_text().splitlines()]
    # Each builds the model to train it, and once more to look at the saved one.
    assert sorted((event["rank"], event["introduced"]) for event in events) == [(0, True)] * 2 + [(1, True)] * 2


@on(AGENTS, exhaustive=(SPAWN, FRESH, ELASTIC, DASK, RAY))
def test_a_run_that_others_began_goes_on(
    launch: Launch, expected: Result, stopped: Path, digits: Path, tmp_path: Path, quiet: Settings
) -> None:
    """With another number of ranks, which in fp32 shows in the last bits."""
    shutil.copytree(stopped, tmp_path / "run")
    found = run_training(HP, digits, tmp_path / "run", quiet, launch=launch)
    starts = [record for record in read_records(found.metrics) if record["kind"] == "start"]
    assert [start["num_ranks"] for start in starts] == [3, 2]
    assert starts[1]["resumed_after_step"] >= 3
    mine, other = weights(found.run_folder), weights(expected.run_folder)
    assert all(torch.allclose(mine[name], other[name], rtol=1e-3, atol=1e-5) for name in other)


@on(ELASTIC, DASK, exhaustive=(SPAWN, FRESH, AGENTS, RAY))
def test_sigterm_saves_the_last_step_and_others_go_on(
    launch: Launch,
    expected: Result,
    digits: Path,
    tmp_path: Path,
    temporary: Path,
    quiet: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank hangs, so that the other sits in a collective, when the launcher gets SIGTERM."""
    marker = tmp_path / "marker"
    faults.inject(monkeypatch, marker, rank=1, at="training", kind="hang", **{"pass": 3})
    told = when(marker, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError, match="the same run will go on after step 3, which is saved"):
        run_training(HP, digits, tmp_path / "run", quiet, launch=launch)
    told.join()
    nothing_is_left(tmp_path / "run", temporary)
    run_training(HP, digits, tmp_path / "run", quiet, launch=spawn.launch)
    assert equal(expected.run_folder, tmp_path / "run")


KILLED = ("SIGKILL", "import", "rank 1 was killed by SIGKILL$", True)
LEFT = ("os._exit", "data", "rank 1 ended with exit code 0 before it had finished", False)
RAISED = ("ArithmeticError", "training", "rank 1: ArithmeticError: the rank's own words\n\n.*in fail", False)
LIKE_A_HANG = (
    "RuntimeError",
    "training",
    "^rank 1: RuntimeError: label service timed out: Connection closed by peer\n\n.*in fail_like_a_hang",
    False,
)
ONCE_EACH = [
    *((SPAWN, LIKE_A_HANG), (ELASTIC, KILLED), (ELASTIC, RAISED), (DASK, LEFT), (RAY, RAISED)),
]
FAULTS = (KILLED, LEFT, RAISED, LIKE_A_HANG)
ALL = [(launcher, fault) for fault in FAULTS for launcher in (SPAWN, ELASTIC, DASK, RAY)]


@pytest.mark.parametrize(
    ("launch", "kind", "at", "words", "recoverable"),
    [
        pytest.param(
            *(launcher, *fault),
            id=f"{fault[0]}-{launcher}",
            marks=[] if (launcher, fault) in ONCE_EACH else pytest.mark.exhaustive,
        )
        for launcher, fault in ALL
    ],
    indirect=["launch"],
)
def test_a_rank_that_fails_is_named_and_takes_the_others_along(
    launch: Launch,
    digits: Path,
    tmp_path: Path,
    temporary: Path,
    quiet: Settings,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    at: str,
    words: str,
    recoverable: bool,
) -> None:
    if launch is elastic.launch and kind == "os._exit":  # which Elastic itself does not notice at all
        words, recoverable = "rank 1 exited without reporting an error before it had finished .*, or its host 127", True
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at=at, kind=kind)
    with pytest.raises(RankError, match=f"(?s){words}") as caught:
        run_training(FAULTY, digits, tmp_path / "run", quiet, launch=launch)
    assert caught.value.recoverable == recoverable
    nothing_is_left(tmp_path / "run", temporary)


@on(AGENTS, exhaustive=(ELASTIC, DASK, RAY))  # for spawned ranks see test_faults.py
def test_a_rank_that_hangs_is_named_with_its_stack(
    launch: Launch, digits: Path, tmp_path: Path, temporary: Path, quiet: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "hang" if launch is elastic.launch else "hang in C"  # where Elastic's cannot say more
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind=kind, **{"pass": 3})
    seconds = 3.0 if launch in (agents.launch, elastic.launch) else 8.0  # where ranks start one after the other
    with pytest.raises(RankError) as caught:
        run_training(FAULTY, digits, tmp_path / "run", replace(quiet, timeout=seconds), launch=launch)
    assert f"rank 1 did not come where rank 0 waited for {seconds:g} s" in str(caught.value)
    assert f"in {kind.replace(' ', '_').lower()}" in str(caught.value)
    found = saved(tmp_path / "run")
    assert found is not None
    assert found.step == 3, "what was done before is saved"
    nothing_is_left(tmp_path / "run", temporary)


@on(SPAWN, exhaustive=(ELASTIC, DASK, RAY))
def test_what_rank_0_does_alone_at_the_end_may_take_longer_than_the_limit(
    launch: Launch, digits: Path, tmp_path: Path, quiet: Settings
) -> None:
    """It loads the model's file, which takes 4 seconds, while the others wait for it."""
    hp = replace(HP, model="unusual_models:SlowToLoad", epochs=1)
    result = run_training(hp, digits, tmp_path / "run", replace(quiet, timeout=3.0), launch=launch)
    assert read_records(result.metrics)[-1]["kind"] == "end"


@on(SPAWN, exhaustive=(ELASTIC, DASK, RAY))
def test_several_at_once(launch: Launch, expected: Result, digits: Path, tmp_path: Path, quiet: Settings) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(run_training, HP, digits, tmp_path / name, quiet, launch=launch) for name in ("one", "other")
        ]
        assert all(equal(expected.run_folder, run.result().run_folder) for run in runs)
