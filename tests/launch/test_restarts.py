"""Ranks that are lost start again in place, from the last step that a rank which lives has done."""

import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dying
import pytest
from engines import AGENTS, DASK, ELASTIC, RAY, SPAWN, Launch
from faulty_runs import INTRODUCED as HP
from faulty_runs import equal
from kept_checkpoints import IDENTITY
from training_runs import losses, records_of
from trials import Trial, starts

from benchmarks.running import descendants, process_name
from flyte_ddp import run_ranks
from flyte_ddp.core.errors import OutOfMemoryError, RankError, RankLostError, StoppedError, UserError
from flyte_ddp.core.files import list_files
from flyte_ddp.core.launch.remote.rendezvous import rewind_work
from flyte_ddp.core.launch.supervise.fork_server import SERVER
from flyte_ddp.core.launch.supervise.restarts import Restarts, run_with_restarts
from flyte_ddp.core.launch.supervise.stopping import StopRequest
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import Checkpoint
from flyte_ddp.core.runs.metrics import EvaluationRecord, TrainRecord, parse_metrics
from flyte_ddp.core.runs.run_folder import METRICS
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import format_record, parse_records
from flyte_ddp.core.training.recording import rebuild_lost_metrics
from flyte_ddp.engines import elastic, elastic_node
from flyte_ddp.run import Result


def nothing_was_done_twice(found: Result, expected: Result, *steps: int) -> None:
    """Assert that a run that restarted after these steps has each step once, and the weights of an undisturbed one."""
    assert equal(expected.run_folder, found.run_folder)
    assert losses(found) == losses(expected)
    for kind in ("train", "evaluation"):
        assert [each["step"] for each in records_of(found, kind)] == [
            each["step"] for each in records_of(expected, kind)
        ]
    assert [start["resumed_after_step"] for start in starts(found.run_folder)] == [0, *steps]
    assert [each["step"] for each in records_of(found, "restart")] == [*steps]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "rank"),
    [
        *((launcher, 0) for launcher in (SPAWN, AGENTS, ELASTIC)),
        (SPAWN, 1),
        *(
            pytest.param(launcher, rank, marks=pytest.mark.exhaustive)
            for launcher, rank in ((AGENTS, 1), (ELASTIC, 1), *itertools.product((DASK, RAY), (0, 1)))
        ),
    ],
    indirect=["launch"],
)
def test_a_killed_rank_costs_no_step(
    launch: Launch, rank: int, expected: Result, trial: Trial, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whichever it is: where it was rank 0, another rank saves, also on a host that does not see the run's folder."""
    trial.inject("SIGKILL", rank=rank, after=3)
    found = trial.train(HP, launch=launch, restarts=1, progress="lines")
    nothing_was_done_twice(found, expected, 3)
    [line] = [line for line in capfd.readouterr().err.splitlines() if "restarted" in line]
    assert line.startswith(f"rank {rank} was killed by SIGKILL")
    assert "; restarted from step 3, in " in line
    assert line.endswith(" s (1 of 1)")
    [record] = records_of(found, "restart")
    assert line.startswith(f"{record['reason']};")
    assert 0 < record["seconds"] < trial.seconds_since_fault()
    assert record["reason"] in found.report.read_text()
    assert [*trial.temporary.glob("flyte-ddp*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lost device", "hang"])
def test_what_a_retry_may_mend_is_mended_in_place(kind: str, expected: Result, trial: Trial) -> None:
    trial.inject(kind, after=5)
    nothing_was_done_twice(trial.train(HP, restarts=1, timeout=2.0), expected, 5)


@pytest.mark.slow
@pytest.mark.cold
def test_a_killed_rank_server_is_replaced(expected: Result, trial: Trial) -> None:
    def kill_server() -> None:
        [server] = [pid for pid in descendants(os.getpid()) if process_name(pid) == SERVER]
        os.kill(server, signal.SIGKILL)

    trial.inject("slow", after=7)
    killing = trial.when_failing(kill_server)
    found = trial.train(HP, restarts=1, checkpoint_seconds=0.01)
    killing.join()
    assert equal(expected.run_folder, found.run_folder)
    assert "was killed by SIGKILL" in records_of(found, "restart")[0]["reason"]


@pytest.mark.slow
def test_a_rank_that_is_lost_before_the_first_step_is_replaced(expected: Result, trial: Trial) -> None:
    trial.inject("SIGKILL", rank=0, at="import", after=0)
    found = trial.train(HP, restarts=1)
    assert equal(expected.run_folder, found.run_folder)
    assert records_of(found, "restart")[0]["step"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_lost_while_results_are_written(rank: int, expected: Result, trial: Trial) -> None:
    """Or at an evaluation, in which ranks that are left have the state of its beginning."""
    trial.inject("SIGKILL", rank=rank, at="results" if rank == 0 else "evaluation", after=0 if rank == 0 else 1)
    found = trial.train(HP, restarts=1)
    assert equal(expected.run_folder, found.run_folder)
    assert losses(found) == losses(expected)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_models: None) -> Callable[..., Any]:
    """Return a function that runs another one on two ranks, or on so many, with so many restarts."""

    def run(restarts: int, function: Callable[..., Any], *args: Any, num_ranks: int = 2) -> Any:
        monkeypatch.setenv("FLYTE_DDP_RESTARTS", str(restarts))
        monkeypatch.setenv("FLYTE_DDP_PROGRESS", "lines")
        return run_ranks(function, *args, str(tmp_path), num_ranks=num_ranks, folder=tmp_path / "run")

    return run


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


@pytest.mark.slow
def test_a_function_of_users_goes_on_from_its_last_save(run, tmp_path: Path, capfd) -> None:
    """Progress in between resets the count of restarts, of which one is allowed."""
    assert run(1, dying.count_to, 9, [2, 4, 8]) == (9, 45)
    assert calls(tmp_path) == 4
    lines = [line for line in capfd.readouterr().err.splitlines() if "restarted" in line]
    assert [line.partition("; restarted from ")[2].partition(",")[0] for line in lines] == [
        "step 2",
        "step 4",
        "step 8",
    ]
    assert all(line.endswith("(1 of 1)") for line in lines)


@pytest.mark.slow
def test_processes_of_a_lost_rank_hold_nobody_up(run, tmp_path: Path) -> None:
    """They have its connections, in which the other rank waits for it; the launcher would wait for the other's save."""
    assert run(1, dying.leave_a_process) == "went on"
    assert (tmp_path / "noticed").exists()


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 2])
def test_without_progress_the_run_ends(restarts: int, run, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run(restarts, dying.be_killed)
    why = "; restarted 2 times before the first checkpoint without progress (FLYTE_DDP_RESTARTS)"
    assert caught.value.message == f"rank 1 was killed by SIGKILL{why if restarts else ''}"
    assert caught.value.recoverable
    assert calls(tmp_path) == 1 + restarts


@pytest.mark.slow
def test_an_error_of_the_code_is_not_tried_again(run, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="ArithmeticError: its own words"):
        run(3, dying.fail)
    assert calls(tmp_path) == 1


@pytest.mark.slow
def test_a_killed_process_of_torchs_data_loader_is_a_failure_of_the_machine(run, tmp_path: Path) -> None:
    assert run(1, dying.lose_a_loader) == [0, 1]
    assert calls(tmp_path) == 2
    (tmp_path / "killed").unlink()
    with pytest.raises(RankError, match="DataLoader worker") as caught:
        run(1, dying.lose_a_loader, num_ranks=1)
    assert caught.value.recoverable


LOST = RankLostError("rank 1 was killed by SIGKILL", recoverable=True)
OUT_OF_MEMORY, OF_RANK_0 = (
    OutOfMemoryError(f"rank {rank} was killed by SIGKILL, as memory ran out", recoverable=True) for rank in (1, 0)
)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    (tmp_path / METRICS).touch()
    return Work("", None, Request(2), tmp_path, IDENTITY, Settings(restarts=3))


def save(work: Work, step: int) -> None:
    path = work.output_folder / checkpoint.FOLDER / checkpoint.SLOTS[0]
    checkpoint.write_checkpoint(Checkpoint(0, step, (), 1.0, IDENTITY, path, b""), {})


def raise_in_turn(errors: list[Exception], _: Work) -> None:
    if errors:
        raise errors.pop(0)


def test_memory_that_runs_out_twice_at_one_step_ends_the_run(work: Work) -> None:
    """Of whichever rank, as the kernel chooses one of them. With progress in between it may be another cause."""
    save(work, 1204)
    with pytest.raises(OutOfMemoryError, match=r"ran out, for the second time after step 1,204; give the ranks more"):
        run_with_restarts(work, partial(raise_in_turn, [OF_RANK_0, OUT_OF_MEMORY]), StopRequest())
    restarts = Restarts(3)
    restarts.rewind(work, OUT_OF_MEMORY)
    save(work, 1205)
    assert restarts.find_reason_to_end(work.output_folder, OUT_OF_MEMORY) is None


def test_a_stop_that_comes_between_two_starts_is_obeyed(work: Work) -> None:
    stop = StopRequest()

    def fail(_: Work) -> None:
        assert stop.signal is None, "it has started again"
        stop.make_request(signal.SIGTERM)
        raise LOST

    save(work, 7)
    with pytest.raises(StoppedError) as caught:
        run_with_restarts(work, fail, stop)
    assert caught.value.step == 7


def test_a_stop_while_elastic_starts_is_obeyed(work: Work, monkeypatch) -> None:
    connect = elastic_node.get_rendezvous_handler

    def be_stopped(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return connect(*args)

    save(work, 7)
    monkeypatch.setattr(elastic_node, "get_rendezvous_handler", be_stopped)
    with pytest.raises(StoppedError) as caught:
        elastic.launch(replace(work, request=Request(2, "gloo")))
    assert caught.value.step == 7


def test_checkpoints_that_cannot_be_read_end_the_run(work: Work) -> None:
    save(work, 7)
    path = work.output_folder / checkpoint.FOLDER / checkpoint.SLOTS[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="cannot read the run's checkpoints"):
        run_with_restarts(work, partial(raise_in_turn, [LOST]), StopRequest())


@pytest.mark.parametrize("rewind", [Restarts(3).rewind, lambda work, error, keep: rewind_work(work, str(error), keep)])
def test_a_restart_removes_what_killed_ranks_have_left(rewind: Callable[..., Work], work: Work) -> None:
    """But for the file by which agents find out that they see the run's folder."""
    left = [".returned.pickle.1.tmp", ".shared-1.tmp", "checkpoints/.a.ckpt.1.tmp", "results/maps/.1.png.1.tmp"]
    kept = ["metrics.jsonl", ".shared-2.tmp", "results/maps/0.png"]
    for name in (*left, *kept):
        (work.output_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (work.output_folder / name).touch()
    save(work, 1)
    rewind(work, LOST, keep=".shared-2.tmp")
    files = {path.relative_to(work.output_folder).as_posix() for path in list_files(work.output_folder)}
    assert files == {*kept, "checkpoints/a.ckpt"}


def test_restarts_are_counted_from_the_last_progress(work: Work) -> None:
    """As the next start records them all, after its checkpoint."""
    restarts, numbers = Restarts(3), []
    for step in (1, 1, 2, 2, 2):
        save(work, step)
        assert restarts.find_reason_to_end(work.output_folder, LOST) is None
        numbers.append([each.number for each in restarts.rewind(work, LOST).restarts])
    assert numbers == [[1], [1, 2], [1], [1, 2], [1, 2, 3]]
    assert restarts.find_reason_to_end(work.output_folder, LOST) is not None
    assert Restarts(0).find_reason_to_end(work.output_folder, LOST) is LOST
    assert restarts.find_reason_to_end(work.output_folder, RankError("its own")) is not None


FIRST, SECOND = TrainRecord(epoch=0, step=1, loss=0.5), TrainRecord(epoch=0, step=2, loss=0.25)
EVALUATION = EvaluationRecord(epoch=1, step=2, test={"loss": 0.75})


@pytest.mark.parametrize(
    ("of_rank_0", "others", "position", "expected"),
    [
        ([FIRST, SECOND], [FIRST, SECOND], (0, 2), [FIRST, SECOND]),
        ([FIRST, SECOND], [FIRST], (0, 1), [FIRST]),
        ([FIRST], [FIRST, SECOND], (0, 2), [FIRST, SECOND]),
        ([FIRST, SECOND, EVALUATION], [FIRST, SECOND], (0, 2), [FIRST, SECOND]),
        ([FIRST, SECOND], [SECOND, EVALUATION], (1, 2), [FIRST, SECOND, EVALUATION]),
    ],
    ids=["equal", "rank 0 ahead", "rank 0 behind", "rank 0 has evaluated", "rank 0 has not evaluated"],
)
def test_records_of_a_lost_rank_0_end_where_the_other_rank_is(of_rank_0, others, position, expected) -> None:
    start = b'{"kind": "start"}\n'
    metrics = start + b"".join(format_record(each.to_json_value()) + b"\n" for each in of_rank_0) + b'{"kind": "tra'
    completed = rebuild_lost_metrics(metrics, others, *position)
    assert completed.startswith(start)
    assert [*parse_metrics([*parse_records(completed.splitlines())][1:], "metrics")] == expected
    assert completed.endswith(b"}\n")
