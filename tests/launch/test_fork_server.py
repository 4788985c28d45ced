"""The server of spawned ranks, which imports torch for all of them."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faulty_runs import HP, in_spawned_processes, nothing_is_left, when
from kept_checkpoints import IDENTITY
from trials import Trial

from benchmarks.running import descendants, process_name
from flyte_ddp.core.errors import RankError, RankLostError, StoppedError
from flyte_ddp.core.launch import spawn
from flyte_ddp.core.launch.supervise import supervisor
from flyte_ddp.core.launch.supervise.fork_server import SERVER
from flyte_ddp.core.launch.supervise.rank_handle import RankHandle
from flyte_ddp.core.launch.supervise.rank_starter import ForkedHandle
from flyte_ddp.core.launch.supervise.stopping import StopRequest
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.settings import Settings

pytestmark = pytest.mark.cold

CALM = """
import random
import numpy.random  # before the fork, as numpy 1 does when torch imports it
from flyte_ddp.core.launch.supervise import rank_process
fork, run_and_report = os.fork, rank_process.run_and_report
def note(*what):
    with open(os.environ["NOTED"], "a") as file:
        print(*what, file=file, sep=",")
def fork_and_note():
    note("threads", len(os.listdir("/proc/self/task")))
    return fork()
def run_and_note(info, link):
    from torch import cuda
    name = open("/proc/self/comm").read().strip()
    note(name, cuda._is_in_bad_fork(), numpy.random.random(), random.random())
    return run_and_report(info, link)
os.fork, rank_process.run_and_report = fork_and_note, run_and_note
"""
IMPORT_HANGS = """
import sys
class Hang:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            open(os.environ["NOTED"], "w").close()
            while True:
                time.sleep(0.01)
sys.meta_path.insert(0, Hang())
"""


@pytest.mark.slow
def test_forks_are_what_fresh_processes_are(trial: Trial, tmp_path: Path) -> None:
    """When the server forks, nothing goes on that a fork would not have; ranks have names and numbers of their own."""
    noted = in_spawned_processes(trial.patch, tmp_path, CALM)
    trial.patch.setenv("OPENBLAS_NUM_THREADS", "1")  # numpy's ends its threads itself
    trial.train()
    lines = sorted(line.split(",") for line in noted.read_text().splitlines())
    assert [line[:2] for line in lines] == [["rank 0", "False"], ["rank 1", "False"], *[["threads", "1"]] * 2]
    assert len({number for line in lines[:2] for number in line[2:]}) == 4


@pytest.mark.slow
def test_a_killed_server_takes_its_ranks_along(trial: Trial) -> None:
    """Ranks that are stopped, so that none of them can end itself."""
    ranks: list[int] = []

    def kill() -> None:
        server, *found = [pid for pid in descendants(os.getpid()) if process_name(pid).startswith("rank ")]
        assert process_name(server) == SERVER
        ranks.extend(found)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)

    trial.inject("hang")
    killing = trial.when_failing(kill)
    with pytest.raises(RankError, match="rank 0 was killed by SIGKILL") as caught:
        trial.train()
    killing.join()
    assert caught.value.recoverable
    assert len(ranks) == HP.num_ranks
    assert [pid for pid in ranks if process_name(pid).startswith("rank ")] == []
    nothing_is_left(trial.folder, trial.temporary)


def test_a_stop_while_torch_is_imported_does_not_wait_for_it(trial: Trial, tmp_path: Path) -> None:
    noted = in_spawned_processes(trial.patch, tmp_path, IMPORT_HANGS)
    told = when(noted, lambda: os.kill(os.getpid(), signal.SIGTERM))

    def launch(work: Work) -> None:
        spawn.launch(replace(work, files={"x" * (1 << 22): tmp_path}))  # which no pipe takes before it is read

    with pytest.raises(StoppedError) as caught:
        trial.train(launch=launch)
    told.join()
    assert caught.value.step == 0, "as is known without asking a rank, which would be in vain"
    nothing_is_left(trial.folder, trial.temporary)


@pytest.mark.slow
def test_an_import_of_torch_that_hangs_is_named_with_its_stack(trial: Trial, tmp_path: Path) -> None:
    in_spawned_processes(trial.patch, tmp_path, IMPORT_HANGS)
    trial.patch.setattr(supervisor, "START_SECONDS", 2.0)
    words = r"(?s)rank 0 did not start within 2 s.*its process is at:.* in find_spec"
    with pytest.raises(RankError, match=words) as caught:
        trial.train()
    assert caught.value.recoverable
    nothing_is_left(trial.folder, trial.temporary)


def test_an_exit_code_that_comes_just_after_the_end_of_its_rank_was_seen(tmp_path, monkeypatch) -> None:
    """Once in some thousand ends the supervisor slept through it, until rank 0's collective timed out."""
    server: Any = SimpleNamespace(exitcode=None, sentinel=None, pid=None)
    pipe, its_pipe = Pipe()
    stacks, _ = Pipe(duplex=False)
    exit_pipe, its_exit_pipe = Pipe(duplex=False)
    work = Work("", None, Request(1), tmp_path, IDENTITY, Settings())
    its_exit_pipe.send(os.getpid())
    its_pipe.close()
    wait, waits = supervisor.wait_and_handle_messages, []

    def wait_then_send(group: Sequence[RankHandle], *args: Any, **options: Any) -> None:
        assert [waitable for handle in group for waitable in handle.waitables()]
        wait(group, *args, **options)
        waits.append(group[0].listening)
        if waits == [False]:
            its_exit_pipe.send(-signal.SIGKILL)

    monkeypatch.setattr(supervisor, "wait_and_handle_messages", wait_then_send)
    with pytest.raises(RankLostError, match=r"^rank 0 was killed by SIGKILL$"):
        supervisor.supervise_ranks([ForkedHandle(0, server, pipe, stacks, exit_pipe)], StopRequest(), work)
    assert waits == [False, False]
