"""What save got last is what load gives, in this attempt and later ones, on all ranks; requests to stop save."""

import errno
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import own_functions
import own_training
import pytest
import torch
from engines import ELASTIC, SPAWN, Launch, Run, on
from faulty_runs import when
from interruptions import ended_before_each_change
from processes import wait_until
from training_runs import QUIET

from flyte_ddp import RankError, StoppedError, UserError, load_optimizer_state
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.rank import Rank
from flyte_ddp.core.loops import checkpoints
from flyte_ddp.core.loops.checkpoints import Checkpoints
from flyte_ddp.core.loops.in_rank import provide_current_rank
from flyte_ddp.core.machine.resources import Request, World
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import Identity
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.text.json_lines import read_records

pytestmark = pytest.mark.slow
TOTAL = {step: step * (step + 1) / 2 for step in range(30)}
NO_IDENTITY = Identity({})


def test_what_other_ranks_save_is_ignored_and_said_once(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """An attempt with several ranks that has saved cannot load: others than rank 0 do not have the state."""
    with pytest.raises(UserError, match="load: this attempt has already saved"):
        run(own_functions.save_on_all_ranks, num_ranks=2)
    assert capfd.readouterr().err.count("save: only rank 0's state is saved; ") == 1


def test_a_run_that_was_cut_off_goes_on(run: Run, tmp_path: Path) -> None:
    """From what was saved, on all ranks, with the records up to it; its files are there when it has returned."""
    folder = tmp_path / "run"
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as caught:
        run(own_functions.train, 10, 4)
    assert caught.value.step == 4
    (folder / "checkpoints/.a.ckpt.0123.tmp").write_text("of a rank that was killed")
    with pytest.raises(UserError, match="belongs to another run: steps=10, now 11"):
        run(own_functions.train, 11, 4)
    got = run(own_functions.train, 10, 4)
    assert got == {"sum": TOTAL[10], "begun": [(4, TOTAL[4])] * 2}
    records = read_records(folder / "metrics.jsonl")
    steps = [record["step"] for record in records if record["kind"] == "record"]
    assert steps == [*range(1, 11)]
    assert [record["total"] for record in records if record["kind"] == "record"] == [TOTAL[step] for step in steps]
    assert [record["resumed_after_step"] for record in records if record["kind"] == "start"] == [0, 4]
    assert records[-1]["kind"] == "end"
    assert (folder / "own/model.txt").read_text() == str(TOTAL[10])
    assert (folder / "results/maps/last.txt").read_text() == "3"
    assert {record["step"] for record in read_records(folder / "results/events.jsonl")} == {10}
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "own", "results", "report.html"}


@on(ELASTIC, without=[SPAWN])  # which restarts no rank
def test_an_engines_retry_goes_on_within_the_call(launch: Launch, run: Run, tmp_path: Path) -> None:
    marker = str(tmp_path / "marker")
    got = run(own_functions.train, 10, 4, marker=marker, launch=partial(launch, retries=1))
    assert got == {"sum": TOTAL[10], "begun": [(4, TOTAL[4])] * 2}
    records = read_records(tmp_path / "run/metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "record"] == [*range(1, 11)]
    assert not [*(tmp_path / "run").glob("*.ckpt")]


def test_a_step_that_is_done_again_draws_what_it_drew_and_other_ranks_other_numbers(run: Run) -> None:
    first, second = run(own_functions.draw, [3, 4, 4, 3])
    for drawn in (first, second):
        assert drawn[:2] == drawn[:1:-1]
    by_kind = [*zip(*first[:2], *second[:2], strict=True)]
    assert len(by_kind) == 4
    assert all(one != other for of in by_kind for place, one in enumerate(of) for other in of[:place])


def stop_when(marker: Path, number: signal.Signals) -> threading.Thread:
    return when(marker, lambda: os.kill(os.getpid(), number))


def stop_and_go_on(run: Run, folder: Path, kind: str, number: signal.Signals, **options: Any) -> None:
    """The next save counts, its step is named, and there the next run goes on."""
    marker = folder / "marker"
    told = stop_when(marker, number)
    expected = StoppedError if number == signal.SIGTERM else KeyboardInterrupt
    with pytest.raises(expected, match=r"will go on after step \d+, which is saved") as caught:
        run(own_functions.wait_for_stop, kind, str(marker), **options)
    told.join()
    assert time.time() - float(marker.read_text()) < 30
    step = checkpoint.find_newest_step(folder / "run")
    assert step >= 20
    assert f"after step {step}," in str(caught.value)
    assert run(own_functions.wait_for_stop, kind, str(marker), **options) == step


@on(SPAWN)
def test_a_request_to_stop_makes_a_save_due(launch: Launch, run: Run, tmp_path: Path) -> None:
    stop_and_go_on(run, tmp_path, "due", signal.SIGTERM, launch=launch)


def test_a_function_that_never_asks_has_8_seconds_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(checkpoints, "UNANNOUNCED_SECONDS", 0.5)
    saving = Checkpoints(tmp_path, NO_IDENTITY, None, 60.0)
    saving.save(1, {"step": 1})
    saving.wait_until_written()
    begin = time.monotonic()
    assert saving.save_last(60.0) == 1
    assert 0.5 <= time.monotonic() - begin < 30
    saving.close()


def test_a_function_that_does_not_save_in_time_is_ended(run: Run, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_SAVE_SECONDS", "1")
    marker = tmp_path / "marker"
    told = stop_when(marker, signal.SIGTERM)
    with pytest.raises(StoppedError, match="will go on after step 5, which is saved"):
        run(own_functions.wait_for_stop, "slow", str(marker), num_ranks=1)
    told.join()
    assert time.time() - float(marker.read_text()) < 6


def test_a_temporary_folder_promises_nothing(run: Run, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    told = stop_when(marker, signal.SIGTERM)
    with pytest.raises(StoppedError, match="will restart from scratch"):
        run(own_functions.wait_for_stop, "due", str(marker), num_ranks=1, folder=None)
    told.join()


def test_an_optimiser_goes_on_with_the_types_of_its_state(tmp_path: Path) -> None:
    """Saved and loaded in the middle of a loop, with fp64 and text in a list, it ends with the same bits."""
    (tmp_path / "metrics.jsonl").touch()
    saving = Checkpoints(tmp_path, NO_IDENTITY, None, 0.0)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = own_training.Precise([parameter], 0.1)

    def do_steps() -> torch.Tensor:
        for step in range(3):
            parameter.grad = torch.arange(3.0) / (7 + step)
            optimizer.step()
        return parameter.detach().clone()

    do_steps()
    saving.save(3, {"optimizer": optimizer.state_dict(), "parameter": parameter.detach()})
    expected = do_steps()
    state = saving.load()
    saving.close()
    assert state is not None
    parameter = torch.nn.Parameter(state["parameter"])
    optimizer = own_training.Precise([parameter], 0.1)
    load_optimizer_state(optimizer, state["optimizer"])
    assert torch.equal(do_steps(), expected)


def save_three_times(folder: Path) -> None:
    saving = Checkpoints(folder, NO_IDENTITY, None, 0.0)
    for step in range(1, 4):
        saving.save(step, {"step": step, "numbers": torch.full((1000,), float(step))})
        saving.wait_until_written()


def test_files_are_whole_whenever_all_is_killed(tmp_path: Path) -> None:
    """Before each change of a file: never a part of a state, nor one that was not saved."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    steps = []
    for folder in ended_before_each_change(tmp_path / "run", save_three_times):
        steps.append(checkpoint.find_newest_step(folder))
        if steps[-1]:
            step, state = newest_state(folder)
            assert steps[-1] == step == state["step"]
            assert {*state["numbers"].tolist()} == {float(step)}
    assert steps == sorted(steps)
    assert {*steps} == {0, 1, 2, 3}


def newest_state(folder: Path) -> tuple[int, dict[str, Any]]:
    found = checkpoint.find_newest_checkpoint(folder / "checkpoints")[0]
    assert found is not None
    return found.step, checkpoint.load_state(found)


def test_due_by_the_clock_and_while_saves_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").touch()
    now = time.monotonic()
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now)
    saving = Checkpoints(tmp_path, NO_IDENTITY, None, 60.0)
    assert not saving.due()
    now += 60
    assert saving.due()
    saving.save(1, {"step": 1})
    assert not saving.due()
    monkeypatch.undo()
    assert saving.load() == {"step": 1}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(saving.save_last, 30.0)
        wait_until(saving.due)
        saving.save(2, {"step": 2})
        assert asked.result() == 2
    saving.save(3, {"step": 3})
    saving.close()
    assert checkpoint.find_newest_step(tmp_path) == 2


def test_a_stop_waits_for_the_next_save_if_one_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    in_the_way = tmp_path / "checkpoints"
    in_the_way.touch()
    saving = Checkpoints(tmp_path, NO_IDENTITY, None, 60.0)
    saving.save(1, {"step": 1})
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(saving.save_last, 30.0)
        wait_until(saving.due)
        saving.save(2, {"step": 2})
        saving.wait_until_written()
        in_the_way.unlink()
        saving.save(3, {"step": 3})
        assert asked.result() == 3


def mapped(folder: Path) -> list[str]:
    """Return the files below the folder that this process maps, as Linux names those without a name: ... (deleted)."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.partition("/")[2] for line in lines if f"{folder}/" in line})


@pytest.mark.parametrize("can_link", [True, False])
def test_what_another_host_has_loaded_outlives_the_file(tmp_path: Path, monkeypatch, *, can_link: bool) -> None:
    """A file server drops a file that has no name any more, and kills who reads what they have mapped from it."""
    (tmp_path / "metrics.jsonl").touch()
    writer = Checkpoints(tmp_path, NO_IDENTITY, None, 0.0)
    writer.save(1, {"numbers": torch.full((1000,), 1.0)})
    writer.wait_until_written()
    elsewhere = Checkpoints(tmp_path, NO_IDENTITY, writer.newest, 0.0, link_name=".rank-3.tmp")
    if not can_link:
        monkeypatch.setattr(checkpoints.os, "link", refuse_links)
    state = [elsewhere.load(), elsewhere.load()][1]
    for step in (2, 3, 4):
        writer.save(step, {"numbers": torch.full((1000,), float(step))})
        writer.wait_until_written()
    files = mapped(tmp_path)
    assert len(files) == can_link
    assert not any(name.endswith("(deleted)") for name in files)
    assert state is not None
    assert {*state["numbers"].tolist()} == {1.0}
    for each in (writer, elsewhere):
        each.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["a.ckpt", "b.ckpt"]


@pytest.mark.parametrize(
    ("host", "sees_run_folder", "name"), [("b", True, ".rank-1.tmp"), ("a", True, None), ("b", False, None)]
)
def test_only_a_rank_that_reads_what_another_host_writes_keeps_a_name(
    tmp_path: Path, monkeypatch, host: str, name: str | None, *, sees_run_folder: bool
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    world = World(2, hosts=("a", host))
    work = Work("", None, Request(2), tmp_path, NO_IDENTITY, QUIET, world=world, sees_run_folder=sees_run_folder)
    rank = Rank(work, RankInfo(1, 2, 1, "", "cpu"), lambda _: None)
    with provide_current_rank(rank, None) as current:
        link = current._checkpoints.link
    assert (link and link.name) == name


def refuse_links(*_: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")  # as vfat


@on(SPAWN)
def test_ranks_that_load_a_state_share_one_copy(launch: Launch, run: Run) -> None:
    """At the moment at which each has filled its model, and at no time does a rank see more than one copy."""
    size = 64 << 20
    with pytest.raises(RankError, match="the first attempt fails"):
        run(own_functions.load_into_a_model, size, num_ranks=3, launch=launch)
    found = run(own_functions.load_into_a_model, size, num_ranks=3, launch=launch)
    taken, peaks, sums = zip(*found, strict=True)
    assert sums == (size / 4,) * 3
    assert sum(taken) < 1.2 * size + 3 * size  # their models, whose zeros had no memory before
    assert max(peaks) < 1.2 * size + size


def test_a_disk_that_is_full_is_told_once_and_the_function_goes_on(tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    saving = Checkpoints(tmp_path, NO_IDENTITY, None, 0.0)
    for step in range(3):
        saving.save(step, {})
        assert saving.load() is None
    saving.close()
    assert capfd.readouterr().err.count("checkpoint could not be written: ") == 1
