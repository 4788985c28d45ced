"""The port that agents come to: who else comes there holds nothing up and is not listened to."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flyte_ddp.errors import OutOfMemoryError, RankError, RankLostError, StoppedError
from flyte_ddp.launch import elastic_rank
from flyte_ddp.launch.remote import arrivals
from flyte_ddp.launch.remote.arrivals import Arrival
from flyte_ddp.launch.remote.rendezvous import JoinTicket, RemoteHandle, Rendezvous, join, open_rendezvous
from flyte_ddp.launch.supervise import link, rank_handle
from flyte_ddp.launch.supervise.failures import first_failure
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.rank_info import RankInfo
from flyte_ddp.launch.supervise.stopping import StopRequest
from flyte_ddp.launch.supervise.supervisor import listen


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[Rendezvous]:
    job: Any = SimpleNamespace(run_folder=tmp_path, checkpoint=None)
    with open_rendezvous(job, "127.0.0.1") as found:
        yield found


@pytest.fixture
def connections() -> Iterator[ExitStack]:
    """Closed in the end."""
    with ExitStack() as stack:
        yield stack


def gathered(rendezvous: Rendezvous, num_ranks: int, stop: StopRequest | None = None) -> list[RankHandle]:
    """The ranks that came, closed."""
    group: list[RankHandle] = []
    try:
        rendezvous.gather(group, num_ranks, stop or StopRequest(), lambda: None)
    finally:
        for handle in group:
            handle.pipe.close()
    return group


def in_a_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def agent(rendezvous: Rendezvous, connections: ExitStack, rank: int, num_ranks: int) -> Connection:
    """Comes as an agent does; returns when it has said who it is."""
    return connections.enter_context(join(rendezvous.ticket(RankInfo(rank, num_ranks, local_rank=0)))[0])


def strangers(rendezvous: Rendezvous, connections: ExitStack, number: int) -> list[socket.socket]:
    """They are in the queue before anybody else is, and say nothing."""
    address = ("127.0.0.1", rendezvous.ticket(RankInfo(0, 1, 0)).port)
    return [connections.enter_context(socket.create_connection(address)) for _ in range(number)]


def knows_the_key(rendezvous: Rendezvous, connections: ExitStack) -> Connection:
    """Somebody who proves that, and has not said yet who he is."""
    (stranger,) = strangers(rendezvous, connections, 1)
    pipe = connections.enter_context(Connection(os.dup(stranger.fileno())))
    answer_challenge(pipe, rendezvous.key)
    deliver_challenge(pipe, rendezvous.key)
    return pipe


def is_turned_away(stranger: socket.socket | Connection) -> bool:
    """Waits until the other side has ended the connection."""
    try:
        while stranger.recv(1 << 16) if isinstance(stranger, socket.socket) else stranger.recv_bytes():
            pass
    except (EOFError, ConnectionError):
        pass
    return True


@pytest.mark.slow
def test_slow_strangers_hold_nobody_up(
    rendezvous: Rendezvous, connections: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They send a byte now and then, so that no single wait is long; each is turned away after some time in all."""
    monkeypatch.setattr(arrivals, "HELLO_SECONDS", 0.8)
    slow = strangers(rendezvous, connections, 3)
    for each in slow:
        each.send((200).to_bytes(4, "big"))  # bytes are to follow
    begin = time.monotonic()
    done = threading.Event()

    def talk() -> None:
        while not done.wait(0.1):
            for each in slow:
                try:
                    each.send(b"\0")
                except OSError:
                    return

    talking = in_a_thread(talk)
    came = in_a_thread(lambda: agent(rendezvous, connections, 0, 2))
    late = in_a_thread(lambda: is_turned_away(slow[0]) and agent(rendezvous, connections, 1, 2))
    assert [handle.rank for handle in gathered(rendezvous, 2)] == [0, 1]
    assert 0.5 < time.monotonic() - begin < 10
    done.set()
    for thread in (talking, came, late):
        thread.join()


def test_more_strangers_than_are_listened_to_at_once(
    rendezvous: Rendezvous, connections: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "HELLO_SECONDS", 0.2)
    monkeypatch.setattr(arrivals, "MOST_AT_ONCE", 2)
    strangers(rendezvous, connections, 5)
    came = in_a_thread(lambda: agent(rendezvous, connections, 0, 1))
    assert len(gathered(rendezvous, 1)) == 1
    came.join()


def test_too_many_open_files_cost_a_connection_and_no_place(
    rendezvous: Rendezvous, connections: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # pytest's would fail the test for the wrong reason
    refusals, dup = iter(range(3)), os.dup

    def dup_or_fail(number: int) -> int:
        if threading.current_thread().name == "arrival" and next(refusals, None) is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return dup(number)

    monkeypatch.setattr(os, "dup", dup_or_fail)
    strangers(rendezvous, connections, 3)
    came = in_a_thread(lambda: agent(rendezvous, connections, 0, 1))
    assert len(gathered(rendezvous, 1)) == 1
    came.join()


def test_a_request_to_stop_is_heard_while_a_stranger_says_nothing(
    rendezvous: Rendezvous, connections: ExitStack
) -> None:
    (silent,) = strangers(rendezvous, connections, 1)
    stop = StopRequest()
    in_a_thread(lambda: silent.recv(1) and stop.make(signal.SIGTERM))  # as soon as it has been asked for the key
    begin = time.monotonic()
    with pytest.raises(StoppedError):
        gathered(rendezvous, 1, stop)
    assert time.monotonic() - begin < arrivals.HELLO_SECONDS / 2
    assert is_turned_away(silent)


def test_of_two_agents_of_one_rank_the_later_counts(rendezvous: Rendezvous, connections: ExitStack) -> None:
    """The engine has sent it because the other one is gone."""
    group: list[RankHandle] = []
    one_is_in = threading.Event()
    gone: list[bool] = []

    def three_come() -> None:
        first = agent(rendezvous, connections, 1, 2)
        one_is_in.wait()  # else the launcher may hear the second one's hello before the first one's
        agent(rendezvous, connections, 1, 2)
        gone.append(is_turned_away(first))
        agent(rendezvous, connections, 0, 2)

    came = in_a_thread(three_come)
    rendezvous.gather(group, 2, StopRequest(), lambda: one_is_in.set() if group else None)
    assert [handle.rank for handle in group] == [0, 1]
    came.join()
    assert gone == [True]
    for handle in group:
        handle.pipe.close()


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


HELLO = {"rank": 0, "host": "127.0.0.1", "shares": True, "code": "code", "clock": 0.0}


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"\xff\xfe",
        b"[" * 4000,
        json.dumps([HELLO]).encode(),
        json.dumps({**HELLO, "rank": "0"}).encode(),
        json.dumps({**HELLO, "rank": True}).encode(),
        json.dumps({**HELLO, "rank": -1}).encode(),
        json.dumps({**HELLO, "rank": 7}).encode(),
        json.dumps({**HELLO, "host": None}).encode(),
        json.dumps({**HELLO, "clock": "0"}).encode(),
        json.dumps({**HELLO, "host": "a" * (1 << 22)}).encode(),
    ],
    ids=lambda hello: hello[:40].decode(errors="replace"),
)
@pytest.mark.usefixtures("no_collection")
def test_a_hello_that_is_none(rendezvous: Rendezvous, connections: ExitStack, hello: bytes) -> None:
    rendezvous.code = "code"

    def two_come() -> None:
        pipe = knows_the_key(rendezvous, connections)
        try:
            pipe.send_bytes(hello)
        except OSError:  # nobody reads so much
            assert len(hello) > arrivals.HELLO_BYTES
        assert is_turned_away(pipe)
        knows_the_key(rendezvous, connections).send_bytes(json.dumps(HELLO).encode())

    came = in_a_thread(two_come)
    assert [handle.rank for handle in gathered(rendezvous, 1)] == [0]
    came.join()


@pytest.mark.parametrize("skew", [-3600.0, 0.2, 3600.0])
def test_which_rank_failed_first_is_not_told_by_its_hosts_clock(
    rendezvous: Rendezvous, connections: ExitStack, monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    """Rank 1 fails first, on a host whose clock is ahead or behind, and is heard last."""
    clocks = (time.monotonic, lambda: time.monotonic() + skew)
    pipes: list[Connection] = []

    def two_come() -> None:
        for rank, clock in enumerate(clocks):
            pipe = knows_the_key(rendezvous, connections)
            pipe.send_bytes(json.dumps({**HELLO, "rank": rank, "clock": clock()}).encode())
            pipes.append(pipe)

    rendezvous.code = HELLO["code"]
    group: list[RankHandle] = []
    came = in_a_thread(two_come)
    rendezvous.gather(group, 2, StopRequest(), lambda: None)
    came.join()
    reports = []
    for rank in (1, 0):
        monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=clocks[rank], time=clocks[rank]))
        reports.append(link.described(ValueError(f"of rank {rank}")))
        begin = time.monotonic()
        while time.monotonic() < begin + 0.05:  # between the two
            pass
    pipes[0].send(reports[1])
    pipes[1].send(reports[0])
    while not all(handle.error for handle in group):
        listen(group, StopRequest())
    assert str(first_failure(group, 600.0)).startswith("rank 1: ValueError: of rank 1")
    for handle in group:
        handle.pipe.close()


@pytest.mark.parametrize(
    ("host", "kills", "expected"),
    [
        ("127.0.0.1", 1, OutOfMemoryError),
        ("127.0.0.1", 0, RankLostError),
        ("10.0.0.2", 1, RankLostError),  # whose memory is another
    ],
)
def test_of_a_rank_that_is_lost_on_the_launchers_host_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, host: str, kills: int, expected: type[RankError]
) -> None:
    """Of Elastic's ranks no agent says how they have ended."""
    counted = [3]
    monkeypatch.setattr(rank_handle, "out_of_memory_kills", lambda: counted[0])
    group: list[RankHandle] = []
    with ExitStack() as stack:
        for rank in (0, 1):
            ours, theirs = (stack.enter_context(end) for end in Pipe())
            clock = time.monotonic()
            arrival = Arrival(
                rank, host, True, "code", clock, ours, seen_at=host, reached_at="127.0.0.1", heard_at=clock
            )
            group.append(RemoteHandle(arrival, host, None))
        counted[0] += kills
        theirs.close()
        listen(group, StopRequest())
        error = first_failure(group, 600.0)
    assert (type(error), getattr(error, "recoverable", None)) == (expected, True)
    assert str(error).startswith("rank 1 ")


def test_what_a_stranger_says_is_not_unpickled(rendezvous: Rendezvous, connections: ExitStack, tmp_path: Path) -> None:
    """Neither at the port nor in Elastic's store, whoever knows the key."""
    bomb = pickle.dumps(Bomb(tmp_path / "unpickled"))

    def two_come() -> None:
        pipe = knows_the_key(rendezvous, connections)
        pipe.send_bytes(bomb)
        is_turned_away(pipe)
        agent(rendezvous, connections, 0, 1)

    came = in_a_thread(two_come)
    gathered(rendezvous, 1)
    came.join()
    assert elastic_rank.ticket_from_json(bomb, RankInfo(0, 1, 0)) is None
    assert not (tmp_path / "unpickled").exists()


def test_what_listens_in_the_launchers_place_is_not_unpickled_either(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "unpickled"))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            guest, _ = server.accept()
            with guest, Connection(os.dup(guest.fileno())) as pipe:
                pipe.send_bytes(bomb)
                is_turned_away(guest)

        served = in_a_thread(serve)
        ticket = JoinTicket(RankInfo(0, 1, 0), ("127.0.0.1",), server.getsockname()[1], b"key", tmp_path, "mark")
        with pytest.raises((OSError, EOFError, AuthenticationError)):
            join(ticket)
        served.join()
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b"{}", b'"x"', b"\xff", b"[" * 100_000],
    ids=lambda text: text[:9].decode(errors="replace"),
)
@pytest.mark.usefixtures("no_collection")
def test_tickets_that_are_none(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host")
    assert elastic_rank.ticket_from_json(text, RankInfo(0, 1, 0)) is None


def test_a_ticket_holds_no_key(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is another rendezvous's key the same, or that of a run whose user has given it a secret."""
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv(elastic_rank.RUN_ID, "run")
    info = RankInfo(1, 2, 0)
    key = elastic_rank.key_of("nonce")
    given = replace(rendezvous.ticket(info), key=key, hosts=("10.0.0.1",))
    text = elastic_rank.ticket_as_json(given, "nonce")
    assert key.hex() not in text
    assert elastic_rank.ticket_from_json(text.encode(), info) == replace(given, hosts=("host", "10.0.0.1"))
    assert elastic_rank.key_of("other") != key
    monkeypatch.setenv(elastic_rank.KEY_VARIABLE, "secret")
    assert elastic_rank.key_of("nonce") != key
