"""The pipe between a rank and its launcher, and who is to blame by what comes through it."""

import os
import queue
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flyte_ddp.core.errors import CollectiveError, CollectiveTimeoutError, PeerGoneError, UserError
from flyte_ddp.core.launch.supervise.failure_report import Cause, FailureReport, classify_error, make_failure_report
from flyte_ddp.core.launch.supervise.failures import find_first_failure
from flyte_ddp.core.launch.supervise.link import Link
from flyte_ddp.core.launch.supervise.messages import Notice, Save, Saved
from flyte_ddp.core.launch.supervise.rank_handle import RankHandle
from flyte_ddp.core.launch.supervise.stopping import StopRequest
from flyte_ddp.core.launch.supervise.supervisor import await_checkpoint
from flyte_ddp.core.parallel import distributed
from flyte_ddp.core.parallel.distributed import translate_collective_errors

OPEN: list[Connection] = []  # a rank ends with its launcher's end of the pipe, and this process must not


def make_pipe() -> Connection:
    """A rank's end; the launcher's is the last of OPEN."""
    ours, theirs = Pipe()
    OPEN.append(ours)
    return theirs


def test_rank_0_that_does_not_come_is_not_waited_for_without_end() -> None:
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 did not publish .*address within 0.05 s"):
        Link(make_pipe()).receive_address(0.05)


def raised_from(error: Exception, origin: Exception) -> Exception:
    error.__cause__ = origin
    return error


OWN = KeyError("loss")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("no such file"), Cause.MISTAKE),
        (PeerGoneError("rank 1 has ended"), Cause.PEER),
        (CollectiveTimeoutError("rank 1 did not come"), Cause.TIMEOUT),
        (CollectiveError("Connection reset by peer"), Cause.PEER),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), Cause.PEER),
        (torch.distributed.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1"), Cause.TIMEOUT),
        (torch.distributed.DistNetworkError("Connection reset by peer"), Cause.PEER),
        (raised_from(KeyError("loss"), CollectiveTimeoutError("rank 1 did not come")), Cause.TIMEOUT),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4711"), Cause.CODE),
        (raised_from(OWN, OWN), Cause.CODE),  # as of ``raise error from error``
    ],
)
def test_causes(error: Exception, expected: Cause) -> None:
    assert classify_error(error) is expected


@pytest.mark.parametrize(("seconds_ago", "expected"), [(50.0, Cause.PEER), (60.0, Cause.TIMEOUT)])
def test_only_who_has_waited_for_the_time_limit_says_so(monkeypatch, seconds_ago: float, expected: Cause) -> None:
    """Whatever the error's own words are."""
    monkeypatch.setattr(distributed, "timeout_seconds", 60.0)
    with pytest.raises(CollectiveError) as caught, translate_collective_errors(time.monotonic() - seconds_ago):
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")
    assert classify_error(caught.value) is expected


class MuteError(RuntimeError):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise ArithmeticError


LONG = ValueError("head" + "." * 1_000_000 + "tail")
SHORTENED = f"head{'.' * 9996}\n...\n{'.' * 9996}tail"


@pytest.mark.parametrize(("error", "message"), [(MuteError(), "<exception str() failed>"), (LONG, SHORTENED)])
def test_an_error_of_any_kind_is_reported(error: BaseException, message: str) -> None:
    report = make_failure_report(error)
    assert (report.type, report.cause, report.message) == (type(error).__name__, Cause.CODE, message)
    assert len(report.traceback) < 30_000


@pytest.mark.parametrize("error", [OSError("no room"), ValueError("no number")])
def test_a_checkpoint_that_cannot_be_saved_is_reported(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an OSError, although the same class shows that the pipe has ended."""
    ended = queue.SimpleQueue[int]()

    def end(code: int) -> None:
        ended.put(code)
        threading.Event().wait()  # the link's thread does no more

    def fail(_: float) -> int:
        raise error

    monkeypatch.setattr(os, "_exit", end)
    Link(make_pipe()).offer_saving(fail)
    OPEN[-1].send(Save(1.0))
    assert OPEN[-1].poll(60)
    report = OPEN[-1].recv()
    assert (report.type, report.message) == (type(error).__name__, str(error))
    assert ended.get(timeout=60) == 1


def handle(rank: int, exit_code: int | None = None, kind: str = "", time: float = 0.0, **values: Any) -> Any:
    report = FailureReport(Cause[kind], "E", f"of {rank}", "", time) if kind else None
    values = {"exitcode": exit_code, "report": report, "completed": False, "lost": False, "host": "h", **values}
    return SimpleNamespace(rank=rank, ran_out_of_memory=lambda: False, **values)


@pytest.mark.parametrize(("writing", "expected"), [([], None), ([True], 7), ([True, False], None)])
def test_a_rank_that_writes_a_checkpoint_is_waited_for(writing: list[bool], expected: int | None) -> None:
    """Here the time for its answer is over at once, but while it writes."""
    ours, theirs = Pipe()
    leader = RankHandle(0, ours, "host")
    for begins in writing:
        leader.handle_message(Notice.WRITING if begins else Notice.WRITTEN)
    with ThreadPoolExecutor(1) as pool:
        limits = {"seconds": 0.0, "most_seconds": 60.0}
        saved = pool.submit(await_checkpoint, [leader], StopRequest(), leader, Save(0.0), **limits)
        assert theirs.recv() == Save(0.0)
        if expected is None:
            assert saved.result() is None
        theirs.send(Saved(7))
        assert saved.result() == expected


HANGING = handle(1, request_stack=lambda: "its stack")
AT, LIMIT = "\n\nrank 1 is at:\nits stack\n\n", "600 s (FLYTE_DDP_TIMEOUT)"
ABSENT = "rank 1 did not reach the collective operation in which"


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ([handle(0, 1, "PEER"), handle(1, -signal.SIGKILL)], "rank 1 was killed by SIGKILL"),
        ([handle(0, -signal.SIGABRT), handle(1, -signal.SIGSEGV)], "rank 1 was killed by SIGSEGV"),
        ([handle(0, -signal.SIGABRT), handle(1, lost=True)], "rank 1 exited without reporting"),
        ([handle(0, -signal.SIGABRT), handle(1, 0)], "rank 1 ended with exit code 0"),
        ([handle(0, -signal.SIGABRT), handle(1, 1, "CODE")], "rank 1: E: of 1"),
        ([handle(0, 1, "PEER"), handle(1, -signal.SIGABRT)], "rank 1 was killed by SIGABRT"),
        ([handle(0, 1, "CODE", 2.0), handle(1, 1, "CODE", 1.0)], "rank 1: E: of 1"),
        ([handle(0, 1, "PEER"), handle(1, 1, "MISTAKE")], "of 1"),
        ([handle(0, 1, "PEER"), handle(1, lost=True)], "rank 1 exited without reporting an error before it had finish"),
        ([handle(0, 1, "PEER"), handle(1, 1, "PEER", 1.0)], "rank 0: E: of 0"),
        ([handle(0, 1, "TIMEOUT"), HANGING], f"{ABSENT} rank 0 waited for {LIMIT}{AT}rank"),
        ([handle(0, 1, "PEER"), HANGING], f"rank 0: E: of 0{AT}rank 0: E: of 0"),
        ([handle(0, 1, "TIMEOUT"), handle(1, 1, "TIMEOUT")], f"ranks 0 and 1 waited for {LIMIT}, in different"),
    ],
)
def test_the_first_to_fail_is_blamed(group: list[Any], words: str) -> None:
    assert str(find_first_failure(group, 600.0)).startswith(words)


@pytest.mark.parametrize(("hosts", "worth_another_try"), [(("a", "a"), False), (("a", "b"), True)])
def test_collectives_that_fail_on_all_ranks_at_once_may_be_the_networks_fault(
    hosts: tuple[str, str], worth_another_try: bool
) -> None:
    group = [handle(rank, 1, "PEER", host=host) for rank, host in enumerate(hosts)]
    assert find_first_failure(group, 600.0).recoverable == worth_another_try
