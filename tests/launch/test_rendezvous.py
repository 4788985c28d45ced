"""The port that agents come to: strangers there cost neither time nor trust; files are sent once a host."""

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from kept_checkpoints import IDENTITY
from torch.distributed import HashStore
from traps import MakesFolder

from flyte_ddp.core.errors import OutOfMemoryError, RankError, RankLostError, StoppedError, UserError
from flyte_ddp.core.launch.remote import connection
from flyte_ddp.core.launch.remote.connection import JoinTicket, WorkerConnection, connect_to_launcher, receive_work
from flyte_ddp.core.launch.remote.remote_handle import RemoteHandle
from flyte_ddp.core.launch.remote.rendezvous import Rendezvous, open_rendezvous
from flyte_ddp.core.launch.supervise import rank_handle
from flyte_ddp.core.launch.supervise.failure_report import make_failure_report
from flyte_ddp.core.launch.supervise.failures import find_first_failure
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.rank_handle import RankHandle
from flyte_ddp.core.launch.supervise.stopping import StopRequest
from flyte_ddp.core.launch.supervise.supervisor import wait_and_handle_messages
from flyte_ddp.core.machine.resources import Request, World
from flyte_ddp.core.runs.checkpoint import Checkpoint
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.settings import Settings
from flyte_ddp.engines import elastic_node


@dataclass
class Meeting:
    """A rendezvous, and those who come to it."""

    rendezvous: Rendezvous
    connections: ExitStack  # closed in the end

    def gather(self, num_ranks: int, stop: StopRequest | None = None) -> list[RankHandle]:
        """The ranks that came, closed in the end."""
        group: list[RankHandle] = []
        self.expect(num_ranks)
        self.rendezvous.gather_agents(group, stop or StopRequest(), lambda: None)
        for handle in group:
            self.connections.callback(handle.pipe.close)
        return group

    def expect(self, num_ranks: int) -> None:
        self.rendezvous.work = replace(self.rendezvous.work, world=World(num_ranks))

    def agent(self, rank: int, folder: Path | None = None) -> Connection:
        """Comes as an agent does; returns when it has said who it is."""
        ticket = self.rendezvous.make_ticket(RankInfo(rank, 2, local_rank=0))
        return self.connections.enter_context(connect_to_launcher(ticket, folder or ticket.output_folder))

    def strangers(self, number: int) -> list[socket.socket]:
        """They are in the queue before anybody else is, and say nothing."""
        address = ("127.0.0.1", self.rendezvous.make_ticket(RankInfo(0, 1, 0)).port)
        return [self.connections.enter_context(socket.create_connection(address)) for _ in range(number)]


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    work = Work("", None, Request(1), tmp_path, IDENTITY, Settings())
    with open_rendezvous(work, "127.0.0.1") as found, ExitStack() as stack:
        yield Meeting(found, stack)


def start_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def is_turned_away(stranger: socket.socket | Connection) -> bool:
    """Waits until the other side has ended the connection."""
    with suppress(EOFError, ConnectionError):
        while stranger.recv(1 << 16) if isinstance(stranger, socket.socket) else stranger.recv_bytes():
            pass
    return True


def test_a_request_to_stop_is_heard_while_a_stranger_says_nothing(meeting: Meeting) -> None:
    [silent] = meeting.strangers(1)
    stop = StopRequest()
    # As soon as the stranger has been asked for the key.
    start_thread(lambda: silent.recv(1) and stop.make_request(signal.SIGTERM))
    begin = time.monotonic()
    with pytest.raises(StoppedError):
        meeting.gather(1, stop)
    assert time.monotonic() - begin < connection.HELLO_SECONDS / 2


def test_many_strangers_keep_no_agent_away_and_hold_few_threads(meeting: Meeting) -> None:
    crowd = meeting.strangers(3 * connection.MOST_UNPROVED)
    came = start_thread(lambda: meeting.agent(0))
    meeting.gather(1)
    came.join()
    assert sum(thread.name == "agent" for thread in threading.enumerate()) <= connection.MOST_UNPROVED
    assert is_turned_away(crowd[0]), "before its ten seconds are over"


def test_strangers_whose_threads_end_slowly_are_few_at_a_time(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: a connection that was shut counts until its thread has ended."""
    there, most, ending = set[socket.socket](), list[int](), threading.Event()

    @contextmanager
    def end_slowly(connected: socket.socket, *_: object) -> Iterator[None]:
        there.add(connected)
        most.append(len(there))
        connected.recv(1)  # until the connection is shut
        ending.wait()
        there.remove(connected)
        raise EOFError
        yield

    monkeypatch.setattr(connection, "authenticated_pipe", end_slowly)
    monkeypatch.setattr(connection, "CROWD_SECONDS", 0.0)
    monkeypatch.setattr(connection, "MOST_UNPROVED", 4)
    crowd = meeting.strangers(8)
    for stranger in crowd[:4]:
        assert is_turned_away(stranger)
    crowd[4].settimeout(0.5)
    with pytest.raises(TimeoutError):  # nobody has time for it yet
        crowd[4].recv(1)
    ending.set()
    assert max(most) == 4


def test_strangers_are_turned_away_when_the_meeting_is_over(tmp_path: Path) -> None:
    """So that no thread waits for them for ever."""
    work = Work("", None, Request(1), tmp_path, IDENTITY, Settings())
    with ExitStack() as stack:
        with open_rendezvous(work, "127.0.0.1") as found:
            [silent] = Meeting(found, stack).strangers(1)
            assert silent.recv(1)
        silent.settimeout(connection.HELLO_SECONDS)
        assert is_turned_away(silent)


def test_an_agent_reads_its_library_before_it_takes_the_launchers_time(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where strangers are many, an agent has a second, and a slow disk takes longer."""
    order = list[str]()
    connect, digest = socket.create_connection, connection.package_digest
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: (order.append("connect"), connect(*a, **k))[1])
    monkeypatch.setattr(connection, "package_digest", lambda: (order.append("read"), digest())[1])
    meeting.agent(0)
    assert order[:2] == ["read", "connect"]


def test_strangers_at_the_limit_of_threads_do_not_end_the_accepting(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a pod's limit of processes is reached, which the kernel does not apply to root."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for stranger in meeting.strangers(3):
            assert is_turned_away(stranger)
    came = start_thread(lambda: meeting.agent(0))
    meeting.gather(1)
    came.join()


def test_of_two_agents_of_one_rank_the_later_counts(meeting: Meeting) -> None:
    """The engine has sent it because the other one is gone."""
    group: list[RankHandle] = []
    one_is_in = threading.Event()
    gone: list[bool] = []

    def three_come() -> None:
        first = meeting.agent(1)
        one_is_in.wait()  # else the launcher may hear the second one's hello before the first one's
        meeting.agent(1)
        gone.append(is_turned_away(first))
        meeting.agent(0)

    came = start_thread(three_come)
    meeting.expect(2)
    meeting.rendezvous.gather_agents(group, StopRequest(), lambda: one_is_in.set() if group else None)
    assert [handle.rank for handle in group] == [0, 1]
    came.join()
    assert gone == [True]
    for handle in group:
        handle.pipe.close()


def test_what_a_stranger_says_is_not_unpickled(meeting: Meeting, tmp_path: Path) -> None:

    def two_come() -> None:
        [stranger] = meeting.strangers(1)
        pipe = meeting.connections.enter_context(Connection(os.dup(stranger.fileno())))
        with suppress(ConnectionError):  # the launcher may have turned it away after the first one
            for _ in range(2):
                pipe.send_bytes(pickle.dumps(MakesFolder(tmp_path / "unpickled")))
        is_turned_away(pipe)
        meeting.agent(0)

    came = start_thread(two_come)
    meeting.gather(1)
    came.join()
    assert not (tmp_path / "unpickled").exists()


def test_files_are_sent_once_a_host(meeting: Meeting, tmp_path: Path) -> None:
    """Ranks 0 and 1 are on a host that does not see the run folder, and rank 2 on one that does."""
    names = {"a.ckpt": b"checkpoint" * 1000, "weights.pt": b"weights", "metrics.jsonl": b"{}\n"}
    for name, content in names.items():
        (tmp_path / name).write_bytes(content)
    checkpoint = Checkpoint(1, 7, (), 0.0, IDENTITY, tmp_path / "a.ckpt", b"")
    work = replace(meeting.rendezvous.work, checkpoint=checkpoint, files={"weights": tmp_path / "weights.pt"})
    folders = [tmp_path / "first", tmp_path / "second", None]
    with ThreadPoolExecutor(3) as pool:
        coming = [pool.submit(meeting.agent, rank, folder) for rank, folder in enumerate(folders)]
        group = meeting.gather(3)
        pipes = [each.result() for each in coming]
        receiving = [pool.submit(receive_work, *ends) for ends in zip(pipes, [*folders[:2], tmp_path], strict=True)]
        for handle in group:
            handle.send_work(work)
        received = [each.result()[0] for each in receiving]
    assert {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()} == names
    assert not (tmp_path / "second").exists()
    for found, where in zip(received, [tmp_path / "first", tmp_path / "first", tmp_path], strict=True):
        assert found.output_folder == where
        assert found.checkpoint == replace(checkpoint, path=where / "a.ckpt")
        assert found.files == {"weights": where / "weights.pt"}
        assert found.sees_run_folder == (where == tmp_path)


def test_an_agent_of_another_build_is_told_to_be_like_this_one(meeting: Meeting) -> None:
    """Whatever it says of itself."""

    def old_one_comes() -> None:
        [other] = meeting.strangers(1)
        with connection.authenticated_pipe(other, meeting.rendezvous.key, connection.AGENT) as pipe:
            pipe.send({"rank": 0, "host": "h", "code": "another", "clock": 1.0})
        is_turned_away(pipe)

    came = start_thread(old_one_comes)
    with pytest.raises(UserError, match=r"runs library sources .*install the same flyte-ddp"):
        meeting.gather(1)
    came.join()


def worker(rank: int, pipe: Connection, host: str = "127.0.0.1") -> WorkerConnection:
    return WorkerConnection(rank, host, None, "code", pipe, host, "127.0.0.1")


@pytest.mark.parametrize(("host", "first"), [("127.0.0.1", 1), ("10.0.0.2", 0)])
def test_which_rank_failed_first_is_not_told_by_its_hosts_clock(tmp_path: Path, host: str, first: int) -> None:
    """But on the launcher's host it is, where rank 1 fails first: that rank 0's report is read first says nothing."""
    group = []
    for rank, time_of_host in enumerate((2.0, 1.0)):
        pipe, agent = Pipe()
        group.append(RemoteHandle(worker(rank, pipe, host), host, tmp_path, tmp_path))
        agent.send(replace(make_failure_report(ValueError("of a rank")), time=time_of_host))
    wait_and_handle_messages(group, StopRequest())
    assert str(find_first_failure(group, 600.0)).startswith(f"rank {first}: ValueError: of a rank")


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", OutOfMemoryError), ("10.0.0.2", RankLostError)])
def test_of_a_rank_that_is_lost_on_the_launchers_host_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, expected: type[RankError]
) -> None:
    """An agent that was killed with its rank cannot say how; another host's memory is not known."""
    counted = [3]
    monkeypatch.setattr(rank_handle, "count_out_of_memory_kills", lambda: counted[0])
    pipe, theirs = Pipe()
    handle = RemoteHandle(worker(1, pipe, host), host, tmp_path, tmp_path)
    counted[0] += 1
    theirs.close()
    wait_and_handle_messages([handle], StopRequest())
    error = find_first_failure([handle], 600.0)
    assert (type(error), getattr(error, "recoverable", None)) == (expected, True)
    pipe.close()


def test_a_ticket_in_elastics_store_holds_no_key(tmp_path: Path) -> None:
    """Nor is another rendezvous's key the same, or that of another secret. The launcher's host has rank 0."""
    worker = RankInfo(1, 2, local_rank=0)
    work = Work("function", None, Request(2), tmp_path, IDENTITY, Settings(), world=World(2, "cpu"))

    def key(store: HashStore, secret: bytes = b"run") -> bytes:
        ticket = elastic_node.find_ticket(store, worker, secret, "host")
        mark = ticket.visibility_file
        info = RankInfo(0, 2, 0, "function", "cpu")
        assert ticket == JoinTicket(info, ("host", "127.0.0.1"), ticket.port, ticket.key, tmp_path, mark)
        assert ticket.key.hex() not in store.get(elastic_node.TICKET).decode()
        return ticket.key

    stores = [HashStore(), HashStore()]
    for store in stores:
        assert elastic_node.find_ticket(store, worker, b"run") is None
        with open_rendezvous(work, "127.0.0.1", secret=b"run") as opened:
            elastic_node.publish_ticket(store, opened, first_rank=1)
            assert key(store) == opened.key
    assert len({*map(key, stores), key(stores[0], b"secret")}) == 3
