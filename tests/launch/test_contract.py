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
from engines import AGENTS, DASK, ELASTIC, FRESH, RAY, SPAWN, Launch, on
from faulty_runs import INTRODUCED as HP
from faulty_runs import equal, nothing_like_a_result, saved
from processes import processes_with
from training_runs import train_in
from trials import Trial, close, starts

from flyte_ddp.errors import RankError, StoppedError
from flyte_ddp.launch import elastic, spawn
from flyte_ddp.models.artifacts import read_model_json
from flyte_ddp.run import Result
from flyte_ddp.text.json_lines import read_records

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchanged")]


@pytest.fixture(scope="module")
def stopped(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three spawned ranks that was stopped."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)
        patch.setenv("TMPDIR", str(folder))
        faults.inject(patch, folder / "marker", rank=2, at="training", kind="SIGTERM", **{"pass": 3})
        with pytest.raises(StoppedError, match=r"will go on after step \d+, which is saved"):
            train_in(folder / "run", replace(HP, num_ranks=3), digits)
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


def nothing_is_left(trial: Trial) -> None:
    """No process that a rank or an agent was, none of their files, nothing that looks like a result."""
    commands = processes_with(str(trial.temporary)).values()
    assert [command for command in commands if "flyte_ddp" in command or "spawn_main" in command] == []
    assert [*trial.temporary.glob("flyte-ddp*")] == []
    nothing_like_a_result(trial.folder)


@on(FRESH, ELASTIC, DASK, RAY, exhaustive=(SPAWN, AGENTS))
def test_the_same_weights_as_from_spawned_ranks(launch: Launch, expected: Result, trial: Trial) -> None:
    """Bit for bit, with all that a run leaves."""
    found = trial.train(HP, launch=launch)
    assert equal(expected.run_folder, found.run_folder)
    losses, others = (
        [record["loss"] for record in read_records(run.metrics) if record["kind"] == "train"]
        for run in (expected, found)
    )
    assert losses == others
    assert read_model_json(found.sidecar) == read_model_json(expected.sidecar)
    [start] = starts(found.run_folder)
    assert (start["num_ranks"], start["num_nodes"]) == (2, 1)
    assert {path.name for path in expected.run_folder.iterdir()} == {path.name for path in found.run_folder.iterdir()}
    assert [*trial.temporary.glob("flyte-ddp*")] == []
    about = {"ranks": 2, "sum": 11.0, "threads": 1, "in the main thread": True, "may have children": True}
    for folder, name in ((trial.temporary, "rank {}"), (found.run_folder / "results/ranks", "{}.json")):
        assert [json.loads((folder / name.format(rank)).read_text()) for rank in (0, 1)] == [about, about]
    events = [json.loads(line) for line in (found.run_folder / "results/events.jsonl").read_text().splitlines()]
    # Each builds the model to train it, and once more to look at the saved one.
    assert sorted((event["rank"], event["introduced"]) for event in events) == [(0, True)] * 2 + [(1, True)] * 2


@on(AGENTS, exhaustive=(SPAWN, FRESH, ELASTIC, DASK, RAY))
def test_a_run_that_others_began_goes_on(launch: Launch, expected: Result, stopped: Path, trial: Trial) -> None:
    """With another number of ranks, which in fp32 shows in the last bits."""
    shutil.copytree(stopped, trial.folder)
    trial.train(HP, launch=launch)
    first, second = starts(trial.folder)
    assert (first["num_ranks"], second["num_ranks"]) == (3, 2)
    assert second["resumed_after_step"] >= 3
    assert close(trial.folder, expected.run_folder)


@on(ELASTIC, exhaustive=(SPAWN, FRESH, AGENTS, DASK, RAY))
def test_sigterm_saves_the_last_step_and_others_go_on(launch: Launch, expected: Result, trial: Trial) -> None:
    """A rank hangs, so that the other sits in a collective, when the launcher gets SIGTERM."""
    trial.inject("hang")
    told = trial.signal_when_failing()
    with pytest.raises(StoppedError, match="the same run will go on after step 3, which is saved"):
        trial.train(HP, launch=launch)
    told.join()
    nothing_is_left(trial)
    trial.train(HP, launch=spawn.launch)
    assert equal(expected.run_folder, trial.folder)


HANG_LIKE = "^rank 1: RuntimeError: label service timed out: Connection closed by peer\n\n.*in fail_like_a_hang"


@pytest.mark.parametrize(
    ("launch", "kind", "at", "words", "recoverable"),
    [
        (ELASTIC, "SIGKILL", "import", "rank 1 was killed by SIGKILL$", True),
        (SPAWN, "SIGKILL", "checkpoint", "rank 0 was killed by SIGKILL$", True),
        (DASK, "os._exit", "data", "rank 1 ended with exit code 0 before it had finished", False),
        (RAY, "ArithmeticError", "training", "rank 1: ArithmeticError: the rank's own words\n\n.*in fail", False),
        (SPAWN, "RuntimeError", "training", HANG_LIKE, False),
    ],
    indirect=["launch"],
)
def test_a_rank_that_fails_is_named_and_takes_the_others_along(
    launch: Launch, trial: Trial, kind: str, at: str, words: str, recoverable: bool
) -> None:
    trial.inject(kind, rank=int(at != "checkpoint"), at=at, after=0)
    with pytest.raises(RankError, match=f"(?s){words}") as caught:
        trial.train(launch=launch)
    assert trial.seconds_since_fault() < 30
    assert caught.value.recoverable == recoverable
    nothing_is_left(trial)


@pytest.mark.exhaustive
@on(ELASTIC)
def test_elastic_does_not_notice_a_rank_that_leaves(launch: Launch, trial: Trial) -> None:
    trial.inject("os._exit", at="data", after=0)
    with pytest.raises(RankError, match="rank 1 exited without reporting an error before it had finished, or its host"):
        trial.train(launch=launch)


@on(SPAWN, ELASTIC, exhaustive=(AGENTS, RAY))
def test_a_rank_that_hangs_is_named_with_its_stack(launch: Launch, trial: Trial) -> None:
    kind = "hang" if launch is elastic.launch else "hang in C"  # where Elastic's cannot say more
    trial.inject(kind)
    seconds = 8.0 if launch not in (spawn.launch, agents.launch, elastic.launch) else 3.0  # where ranks start in turn
    with pytest.raises(RankError) as caught:
        trial.train(launch=launch, timeout=seconds)
    assert f"rank 1 did not come where rank 0 waited for {seconds:g} s" in str(caught.value)
    assert f"in {kind.replace(' ', '_').lower()}" in str(caught.value)
    assert saved(trial.folder).step == 3, "what was done before is saved"
    nothing_is_left(trial)


@on(SPAWN, exhaustive=(ELASTIC, RAY))
def test_what_rank_0_does_alone_at_the_end_may_take_longer_than_the_limit(launch: Launch, trial: Trial) -> None:
    """It loads the model's file twice, for 2 seconds each, while the others wait for it."""
    trial.train(replace(HP, model="unusual_models:SlowToLoad", epochs=1), launch=launch, timeout=3.0)


@on(SPAWN, exhaustive=(ELASTIC, DASK))
def test_several_at_once(launch: Launch, expected: Result, trial: Trial, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(trial.train, HP, launch=launch, folder=tmp_path / name) for name in ("one", "other")]
        assert all(equal(expected.run_folder, run.result().run_folder) for run in runs)
