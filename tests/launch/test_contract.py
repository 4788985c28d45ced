"""One contract for all launchers: what ranks find, what a run leaves, what is told of a fault; and nothing stays."""

import json
from collections.abc import Iterator

import pytest
import ray as engine
from engines import AGENTS, DASK, ELASTIC, FRESH, RAY, SPAWN, Launch, on
from faulty_runs import INTRODUCED as HP
from faulty_runs import equal, nothing_like_a_result, saved, state_of_process
from processes import processes_with
from training_runs import losses
from trials import Trial, starts

from flyte_ddp.core.errors import RankError, StoppedError, UnreachableError, UserError
from flyte_ddp.core.launch import spawn
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.engines import elastic, ray
from flyte_ddp.run import Result

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchanged")]


@pytest.fixture
def unchanged(launch: Launch) -> Iterator[None]:
    """Of the launching process: environment, folder, handlers of signals, threads' number."""
    before = state_of_process()
    yield
    assert state_of_process() == before


def nothing_is_left(trial: Trial) -> None:
    """No process that a rank or an agent was, none of their files, nothing that looks like a result."""
    commands = processes_with(str(trial.temporary)).values()
    assert [command for command in commands if "flyte_ddp" in command or "spawn_main" in command] == []
    assert [*trial.temporary.glob("flyte-ddp*")] == []
    nothing_like_a_result(trial.folder)


HANG_LIKE = "^rank 1: RuntimeError: label service timed out: Connection closed by peer\n\n.*in fail_like_a_hang"
EXITED = "rank 1 ended with exit code 0 before it had finished"


@pytest.mark.parametrize(
    ("launch", "kind", "at", "words", "recoverable"),
    [
        (SPAWN, "RuntimeError", "training", HANG_LIKE, False),
        (ELASTIC, "SIGKILL", "training", "rank 1 was killed by SIGKILL$", True),
        (DASK, "os._exit", "data", EXITED, False),
        (RAY, "ArithmeticError", "training", "rank 1: ArithmeticError: the rank's own words\n\n.*in fail", False),
        pytest.param(
            AGENTS, "SIGKILL", "checkpoint", "rank 0 was killed by SIGKILL$", True, marks=pytest.mark.exhaustive
        ),
        pytest.param(FRESH, "os._exit", "data", EXITED, False, marks=pytest.mark.exhaustive),
    ],
    indirect=["launch"],
)
def test_a_rank_that_fails_is_named_and_the_next_run_has_the_weights_of_an_undisturbed_one(
    launch: Launch, expected: Result, trial: Trial, kind: str, at: str, words: str, recoverable: bool
) -> None:
    """Bit for bit, as from spawned ranks, with all that a run leaves."""
    trial.inject(kind, rank=int(at != "checkpoint"), at=at, after=3 * (at == "training"))
    with pytest.raises(RankError, match=f"(?s){words}") as caught:
        trial.train(HP, launch=launch)
    assert trial.seconds_since_fault() < 30
    assert caught.value.recoverable == recoverable
    nothing_is_left(trial)

    found = trial.train(HP, launch=launch)
    assert equal(expected.run_folder, found.run_folder)
    assert losses(expected) == losses(found)
    start = starts(found.run_folder)[-1]
    # Where rank 0 was lost while it wrote the first epoch's checkpoint, rank 1 has saved.
    step = {"training": 3, "checkpoint": 14}.get(at, 0)
    assert (start["resumed_after_step"], start["num_ranks"], start["num_nodes"]) == (step, 2, 1)
    assert {path.name for path in expected.run_folder.iterdir()} == {path.name for path in found.run_folder.iterdir()}
    assert [*trial.temporary.glob("flyte-ddp*")] == []
    about = {"ranks": 2, "sum": 11.0, "threads": 1, "in the main thread": True, "may have children": True}
    for folder, name in ((trial.temporary, "rank {}"), (found.run_folder / "results/ranks", "{}.json")):
        assert [json.loads((folder / name.format(rank)).read_text()) for rank in (0, 1)] == [about, about]
    events = read_records(found.run_folder / "results/events.jsonl")
    assert {(event["rank"], event["introduced"]) for event in events} == {(0, True), (1, True)}


@on(ELASTIC, without=[SPAWN])  # test_faults.py has it
def test_sigterm_saves_the_last_step(launch: Launch, trial: Trial) -> None:
    """A rank hangs, so that the other sits in a collective, when the launcher gets SIGTERM."""
    trial.inject("hang")
    told = trial.signal_when_failing()
    with pytest.raises(StoppedError, match="the same run will go on after step 3, which is saved"):
        trial.train(HP, launch=launch)
    told.join()
    nothing_is_left(trial)


@on(SPAWN, without=[AGENTS, DASK])  # with AGENTS it took too long, DASK was not tried
def test_a_rank_that_hangs_is_named_with_its_stack(launch: Launch, trial: Trial) -> None:
    trial.inject("hang in C")
    seconds = 3.0 if launch in (spawn.launch, elastic.launch) else 8.0  # where ranks start in turn
    with pytest.raises(RankError) as caught:
        trial.train(launch=launch, timeout=seconds)
    words = f"rank 1 did not reach the collective operation in which rank 0 waited for {seconds:g} s"
    assert words in str(caught.value)
    assert "in hang_in_c" in str(caught.value)
    assert saved(trial.folder).step == 3, "what was done before is saved"
    nothing_is_left(trial)


@pytest.mark.parametrize("launch", [SPAWN], indirect=True)  # for the check that nothing has changed
def test_how_many_ranks_a_ray_cluster_has_room_for(launch: Launch, ray_address: str, monkeypatch, capsys) -> None:
    """That of an address; on one that is made for a run, fewer ranks are an error."""
    engine.shutdown()
    with monkeypatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv(ray.ADDRESS, ray_address)
        with ray.connected():
            assert ray.plan_world(Request(9)).num_ranks == 4
            assert "num_ranks=9: the Ray cluster has 4 CPUs; starting 4 ranks\n" in capsys.readouterr().err
            found = ray.plan_world(Request(2), 1, 60)
            assert (found.num_ranks, found.threads) == (2, 2)
            with pytest.raises(UserError, match="num_ranks=5: the Ray cluster has 4 CPUs, and each rank needs one"):
                ray.plan_world(Request(5), 1, 60)
            with pytest.raises(UnreachableError, match="1 of 2 nodes of the Ray cluster"):
                ray.plan_world(Request(2), 2, 0)
            with pytest.raises(UserError, match="backend='nccl': the Ray cluster has no GPU"):
                ray.plan_world(Request(backend="nccl"))
