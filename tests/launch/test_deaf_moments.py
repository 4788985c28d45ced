"""Moments in which a launcher or an agent once heard nothing, or took one failure for another."""

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from kept_checkpoints import IDENTITY
from processes import wait_until

from flyte_ddp.core.errors import OutOfMemoryError, StoppedError, UserError
from flyte_ddp.core.files import FilePiece
from flyte_ddp.core.launch.remote import proxy
from flyte_ddp.core.launch.remote import remote_handle as handles
from flyte_ddp.core.launch.remote.connection import WorkerConnection
from flyte_ddp.core.launch.remote.remote_handle import RemoteHandle
from flyte_ddp.core.launch.supervise import supervisor
from flyte_ddp.core.launch.supervise.failure_report import FailureReport, make_failure_report
from flyte_ddp.core.launch.supervise.failures import find_root_cause
from flyte_ddp.core.launch.supervise.messages import Assignment, Exited, Notice, RunOver, Save, Saved
from flyte_ddp.core.launch.supervise.rank_handle import ProcessHandle
from flyte_ddp.core.launch.supervise.stopping import StopRequest
from flyte_ddp.core.machine.resources import Request, World
from flyte_ddp.core.runs.checkpoint import Checkpoint
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.settings import Settings

Kind = TypeVar("Kind")
LIMIT = 30.0  # seconds; nothing here takes them


def work_in(folder: Path, **changes: Any) -> Work:
    return Work("", None, Request(1), folder, IDENTITY, Settings(), world=World(1), **changes)


def remote_handle(folder: Path) -> tuple[RemoteHandle, Connection]:
    pipe, agent = Pipe()
    worker = WorkerConnection(0, "127.0.0.1", folder, "code", pipe, "127.0.0.1", "127.0.0.1")
    return RemoteHandle(worker, "127.0.0.1", folder, folder), agent


@pytest.mark.parametrize("said", ["stop", "error"])
def test_what_came_before_supervision_does_not_wait_for_another_message(tmp_path: Path, said: str) -> None:
    """From an agent that stores the files of a run: of its disk, or of its host, which is to go."""
    (tmp_path / "weights.pt").touch()
    handle, agent = remote_handle(tmp_path)
    report = make_failure_report(UserError("make room"))
    agent.send(Notice.STOP if said == "stop" else report)
    agent.send(Notice.FILE_STORED if said == "stop" else Exited(1))
    with ThreadPoolExecutor(1) as pool:
        work = replace(
            work_in(tmp_path, files={"weights": tmp_path / "weights.pt"}), settings=Settings(save_seconds=0.0)
        )
        handle.send_work(work)
        supervising = pool.submit(supervisor.supervise_ranks, [handle], StopRequest(), work)
        with pytest.raises(StoppedError if said == "stop" else UserError):
            supervising.result(LIMIT)


def test_work_is_sent_when_the_rank_listens(tmp_path: Path) -> None:
    """Work that is larger than the pipe's buffer blocks a launcher, which then hears neither stop nor failure."""
    (pipe, rank), (stacks, _) = Pipe(), Pipe(duplex=False)
    process: Any = SimpleNamespace(sentinel=None, pid=os.getpid(), exitcode=None)
    handle = ProcessHandle(0, process, pipe, stacks)
    checkpoint = Checkpoint(1, 7, (), 0.0, IDENTITY, tmp_path / "a.ckpt", b"")
    work = replace(work_in(tmp_path, checkpoint=checkpoint), arguments=bytes(1 << 24))
    handle.queue_work(work)
    assert supervisor.request_checkpoint([handle], StopRequest(), LIMIT) == 7, "without asking, as it has no work yet"
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(rank.recv)
        rank.send(Notice.READY)
        supervisor.wait_and_handle_messages([handle], StopRequest(), LIMIT)
        assert pickle.loads(received.result(LIMIT).work) == work


def refuse() -> ProcessHandle:
    raise AssertionError("the rank is to start again")


class Agent:
    """An agent's half of a connection to a launcher, in this process, and its rank's pipe."""

    def __init__(self) -> None:
        self.pipe, self.launcher = Pipe()
        from_rank, self.rank = Pipe()
        stacks, _ = Pipe(duplex=False)
        process: Any = SimpleNamespace(sentinel=None, pid=os.getpid(), exitcode=None, kill=lambda: None)
        self.handle = ProcessHandle(0, process, from_rank, stacks)

    @contextmanager
    def talking(self, conversation: Callable[[], object]) -> Iterator[None]:
        """Have the launcher's side talk in a thread while the agent runs in this one."""
        with ThreadPoolExecutor(1) as pool:
            talk = pool.submit(conversation)
            yield
            talk.result(LIMIT)

    def send_work(self, work: Work) -> None:
        self.launcher.send(Assignment(pickle.dumps(work), 0, ""))

    def receive(self, kind: type[Kind]) -> Kind:
        while self.launcher.poll(LIMIT):
            if isinstance(message := self.launcher.recv(), kind):
                return message
        raise TimeoutError(kind)


def test_a_signal_to_an_agent_is_passed_on_while_its_rank_starts(tmp_path: Path) -> None:
    """A host is prepared for minutes, such as by a download of data; a pod has half a minute after SIGTERM."""
    agent = Agent()
    checkpoint = Checkpoint(1, 7, (), 0.0, IDENTITY, tmp_path / "a.ckpt", b"")

    def talk() -> None:
        agent.send_work(work_in(tmp_path, checkpoint=checkpoint))
        agent.launcher.send(Save(LIMIT))
        assert agent.receive(Saved).step == 7, "at once, though the rank is not there yet"
        wait_until(lambda: signal.getsignal(signal.SIGTERM) is not before)
        os.kill(os.getpid(), signal.SIGTERM)
        assert agent.receive(Notice) is Notice.STOP
        agent.launcher.send(RunOver(None))
        agent.handle.process.exitcode = 0
        agent.rank.close()

    before = signal.getsignal(signal.SIGTERM)
    with agent.talking(talk):
        assert proxy.proxy_rank(agent.handle, agent.pipe, tmp_path, refuse) is None


def test_an_agents_own_failure_is_reported_as_such(tmp_path: Path) -> None:
    """Not as a host that is lost, which would be tried again."""
    agent = Agent()
    (tmp_path / "checkpoints").write_text("in the way")
    agent.launcher.send(FilePiece("checkpoints/a.ckpt", b""))

    def talk() -> None:
        handle, _ = remote_handle(tmp_path)
        handle.handle_message(agent.receive(FailureReport))
        handle.handle_message(agent.receive(Exited))
        assert isinstance(find_root_cause([handle]), UserError)
        agent.launcher.send(RunOver(None))

    with agent.talking(talk):
        assert proxy.proxy_rank(agent.handle, agent.pipe, tmp_path, refuse) is None, "the agent itself has not failed"


def test_an_exit_code_that_comes_instead_of_a_stack_is_not_lost(tmp_path, monkeypatch) -> None:
    """Neither the launcher's next look nor the end of the rank waits for another message."""
    for name in ("STACK_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(handles, name, None)  # for ever
    handle, agent = remote_handle(tmp_path)
    agent.send(Exited(-9, out_of_memory=True))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handle.request_stack).result(LIMIT) == ""
        with pytest.raises(OutOfMemoryError):
            pool.submit(supervisor.supervise_ranks, [handle], StopRequest(), work_in(tmp_path)).result(LIMIT)
        pool.submit(handle.close).result(LIMIT)
