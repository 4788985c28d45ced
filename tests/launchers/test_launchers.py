"""One contract for all launchers: what a run leaves, what is told of a fault, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import agents
import distributed
import faults
import pytest
import torch
from faulty_runs import HP, nothing_like_a_result, when
from processes import living_with

from flyte_ddp import checkpoint
from flyte_ddp.errors import RankError, StoppedError, UserError
from flyte_ddp.job import Job
from flyte_ddp.launch import single, spawn
from flyte_ddp.run import RESULTS, Result, run_training
from flyte_ddp.settings import Settings
from flyte_ddp.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("temporary")]

Launch = Callable[..., None]
AGENTS, DASK = "agents that share nothing", "dask"
only_agents = pytest.mark.parametrize("launch", [AGENTS], indirect=True)


@pytest.fixture(scope="module")
def dask_client() -> Iterator[object]:
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "host": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TMPDIR")  # which tells the processes of a test from others
        cluster = distributed.LocalCluster(**options)
    with cluster, distributed.Client(cluster) as client:
        yield client


@pytest.fixture(params=[AGENTS, DASK])
def launch(request: pytest.FixtureRequest) -> Launch:
    if request.param == AGENTS:
        return agents.launch
    client = request.getfixturevalue("dask_client")
    from flyte_ddp.launch import dask

    def run(job: Job, *, num_ranks: int) -> None:
        environment = {"FAULTS": os.environ.get("FAULTS", "{}"), "TMPDIR": os.environ["TMPDIR"]}
        client.run(set_environment, environment, str(Path.cwd()))
        dask.launch(job, num_ranks=num_ranks, client=client)

    return run


def set_environment(values: dict[str, str], folder: str) -> None:
    os.environ.update(values)
    os.chdir(folder)


@pytest.fixture
def quiet(tmp_path: Path) -> Settings:
    return Settings(progress="off", wandb_mode="disabled", cache_folder=tmp_path / "cache")


def nothing_is_left(run: Path, temporary: Path) -> None:
    """No process that a rank or an agent was, none of their files, nothing that looks like a result."""
    ranks = [command for command in living_with(str(temporary)) if "flyte_ddp" in command or "spawn_main" in command]
    assert [command for command in ranks if "dask" not in command] == []
    assert [path for path in temporary.iterdir() if path.name.startswith("flyte-ddp")] == []
    nothing_like_a_result(run)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)


def losses(result: Result) -> list[float]:
    return [record["loss"] for record in read_metrics(result.metrics) if record["kind"] == "train"]


def equal(here: Path, there: Path) -> bool:
    mine, other = weights(here), weights(there)
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def test_the_same_weights_as_from_spawned_ranks(
    launch: Launch, digits: Path, tmp_path: Path, temporary: Path, quiet: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with all that a run leaves; also of one that was stopped here and goes on with spawned ranks."""
    expected = run_training(HP, digits, tmp_path / "spawned", quiet, launch=spawn.launch)
    found = run_training(HP, digits, tmp_path / "run", quiet, launch=launch)
    assert equal(expected.run_folder, found.run_folder)
    assert losses(expected) == losses(found)
    assert {path.name for path in expected.run_folder.iterdir()} == {path.name for path in found.run_folder.iterdir()}
    assert [path for path in temporary.iterdir() if path.name.startswith("flyte-ddp")] == []
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="SIGTERM", **{"pass": 3})
    with pytest.raises(StoppedError, match=r"stopped by SIGTERM; the same run will go on after step \d+"):
        run_training(HP, digits, tmp_path / "stopped", quiet, launch=launch)
    nothing_is_left(tmp_path / "stopped", temporary)
    run_training(HP, digits, tmp_path / "stopped", quiet, launch=spawn.launch)
    assert equal(expected.run_folder, tmp_path / "stopped")


@only_agents
def test_a_run_of_spawned_ranks_that_was_stopped_goes_on(
    launch: Launch, digits: Path, tmp_path: Path, quiet: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_training(HP, digits, tmp_path / "undisturbed", quiet, launch=spawn.launch)
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="SIGTERM", **{"pass": 3})
    with pytest.raises(StoppedError):
        run_training(HP, digits, tmp_path / "run", quiet, launch=spawn.launch)
    run_training(HP, digits, tmp_path / "run", quiet, launch=launch)
    assert equal(expected.run_folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "at", "rank", "words", "recoverable"),
    [
        ("SIGKILL", "import", 1, "rank 1 was killed by SIGKILL, which is often the kernel's out-of-memory", True),
        ("os._exit", "data", 1, "rank 1 ended with exit code 0 before it had finished", False),
        ("ArithmeticError", "training", 1, "rank 1: ArithmeticError: the rank's own words\n\n.*in fail", False),
    ],
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
    rank: int,
    words: str,
    recoverable: bool,
) -> None:
    faults.inject(monkeypatch, tmp_path / "marker", rank=rank, at=at, kind=kind)
    with pytest.raises(RankError, match=f"(?s){words}") as caught:
        run_training(HP, digits, tmp_path / "run", quiet, launch=launch)
    assert caught.value.recoverable == recoverable
    nothing_is_left(tmp_path / "run", temporary)


@only_agents
def test_a_rank_that_hangs_is_named_with_its_stack(
    launch: Launch, digits: Path, tmp_path: Path, temporary: Path, quiet: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="hang in C", **{"pass": 3})
    with pytest.raises(RankError) as caught:
        run_training(HP, digits, tmp_path / "run", replace(quiet, timeout=3.0), launch=launch)
    assert "rank 1 did not come where rank 0 waited for 3 s" in str(caught.value)
    assert "in hang_in_c" in str(caught.value)
    found = checkpoint.newest_of(tmp_path / "run" / checkpoint.FOLDER)
    assert found is not None
    assert found.step == 3, "what was done before is saved"
    nothing_is_left(tmp_path / "run", temporary)


def test_sigterm_to_the_launcher_saves_the_last_step(
    launch: Launch, digits: Path, tmp_path: Path, temporary: Path, quiet: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank hangs, so that the other sits in a collective, when SIGTERM comes."""
    marker = tmp_path / "marker"
    faults.inject(monkeypatch, marker, rank=1, at="training", kind="hang", **{"pass": 3})
    told = when(marker, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError, match="the same run will go on after step 3, which is saved"):
        run_training(HP, digits, tmp_path / "run", quiet, launch=launch)
    told.join()
    nothing_is_left(tmp_path / "run", temporary)


def in_this_process(monkeypatch: pytest.MonkeyPatch, marker: Path, kind: str) -> None:
    """Injects a fault after three steps."""
    fault = {"rank": 0, "at": "training", "kind": kind, "pass": 3, "marker": marker}
    monkeypatch.setattr(faults, "FAULT", fault)
    monkeypatch.setattr(faults, "passed", {})


class TestOneRankInThisProcess:
    """Without another process, and otherwise the same."""

    HP = replace(HP, num_ranks=1)

    def test_the_same_weights_as_from_a_spawned_rank(self, digits: Path, tmp_path: Path, quiet: Settings) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        expected = run_training(self.HP, digits, tmp_path / "spawned", quiet, launch=spawn.launch)
        found = run_training(replace(self.HP, deterministic=True), digits, tmp_path / "run", quiet)
        assert torch.get_num_threads() == 1
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        torch.set_num_threads(threads)
        assert equal(expected.run_folder, found.run_folder)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_saves_and_stops(
        self, digits: Path, tmp_path: Path, quiet: Settings, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
    ) -> None:
        expected = run_training(self.HP, digits, tmp_path / "undisturbed", quiet)
        before = signal.getsignal(number)
        in_this_process(monkeypatch, tmp_path / "marker", "signal")
        monkeypatch.setitem(faults.KINDS, "signal", lambda: os.kill(os.getpid(), number))
        with pytest.raises((StoppedError, KeyboardInterrupt)) as caught:
            run_training(self.HP, digits, tmp_path / "run", quiet)
        assert caught.type is (StoppedError if number == signal.SIGTERM else KeyboardInterrupt)
        assert signal.getsignal(number) is before
        found = checkpoint.newest_of(tmp_path / "run" / checkpoint.FOLDER)
        assert found is not None
        assert found.step >= 3
        assert not [name for name in RESULTS if (tmp_path / "run" / name).exists()]
        run_training(self.HP, digits, tmp_path / "run", quiet)
        assert equal(expected.run_folder, tmp_path / "run")

    @pytest.mark.parametrize(
        ("kind", "words", "cause"),
        [
            ("ArithmeticError", "rank 0: ArithmeticError: the rank's own words", ArithmeticError),
            ("sys.exit", "rank 0 ended with exit code 0 before it had finished training", SystemExit),
        ],
    )
    def test_a_failure_is_told_with_its_cause(
        self,
        digits: Path,
        tmp_path: Path,
        quiet: Settings,
        monkeypatch: pytest.MonkeyPatch,
        kind: str,
        words: str,
        cause: type[BaseException],
    ) -> None:
        in_this_process(monkeypatch, tmp_path / "marker", kind)
        with pytest.raises(RankError, match=words) as caught:
            run_training(self.HP, digits, tmp_path / "run", quiet)
        assert isinstance(caught.value.__cause__, cause)

    def test_a_mistake_stays_one(self, digits: Path, tmp_path: Path, quiet: Settings) -> None:
        with pytest.raises(UserError, match=r"twelve_classes.*returned"):
            run_training(replace(self.HP, model="user_models:twelve_classes"), digits, tmp_path / "run", quiet)

    def test_more_ranks_are_refused(self) -> None:
        with pytest.raises(ValueError, match="num_ranks=2: one rank at most runs in this process"):
            single.launch(None, num_ranks=2)
