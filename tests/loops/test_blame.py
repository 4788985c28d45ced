"""The rank that failed first is named with its own words, whatever the others wait in; nothing stays."""

import socket
import time
from functools import partial
from pathlib import Path

import own_functions
import pytest
from engines import AGENTS, DASK, ELASTIC, RAY, SPAWN, Launch, Run, on
from own_functions import wait_for_failed

from flyte_ddp import RankError
from flyte_ddp.launch import elastic

pytestmark = pytest.mark.slow
again = pytest.mark.exhaustive

RAISED = r"(?s)^rank 1: ArithmeticError: own words\n\nTraceback .*in fail\n"
KILLED = "^rank 1 was killed by SIGKILL$"
LEFT = r"^rank 1 ended with exit code {} before it had finished$"
CALLED_EXIT = r"^rank 1: RuntimeError: called sys.exit\(0\); return, or raise an exception, instead\n"
WORDS = {
    "raise": RAISED,
    "SIGKILL": KILLED,
    "os._exit(0)": LEFT.format(0),
    "os._exit(3)": LEFT.format(3),
    "sys.exit(0)": CALLED_EXIT,
    "unpicklable": "^rank 1: UnpicklableError: <exception str\\(\\) failed>\n\nTraceback",
}
ONCE_EACH = [
    ("backward", "raise", "join"),
    ("all_reduce", "SIGKILL", "own port"),
    ("functional", "os._exit(0)", "own"),
    ("backward", "os._exit(3)", "own port"),
    ("receive", "sys.exit(0)", "own"),
    ("all_reduce", "unpicklable", "join"),
    ("all_reduce", "SIGKILL", "never"),
]
GROUPS = ("join", "own", "own port", "never")
EACH_PAIR = [
    (waits, failure, GROUPS[(row + column) % len(GROUPS)])
    for row, waits in enumerate(own_functions.WAITS)
    for column, failure in enumerate(WORDS)
    if waits != "load" or failure == "SIGKILL"  # rank 0 has 8 s to save, and sits in load
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("waits", "failure", "group"),
    [*ONCE_EACH, *(pytest.param(*case, marks=again) for case in EACH_PAIR if case not in ONCE_EACH)],
)
def test_the_rank_that_others_wait_for(run: Run, tmp_path: Path, waits: str, failure: str, group: str) -> None:
    began = time.monotonic()
    port = free_port() if group == "own port" else 0
    with pytest.raises(RankError, match=WORDS[failure]) as caught:
        run(wait_for_failed, waits, failure, group, port=port)
    assert time.monotonic() - began < 30
    assert caught.value.recoverable == (failure == "SIGKILL")
    assert caught.value.step == 0
    if caught.value.details:
        assert caught.value.file == tmp_path / "run/traceback.txt"
        assert caught.value.file.read_text() == f"{caught.value}\n"


@on(exhaustive=(AGENTS, ELASTIC, DASK, RAY))
@pytest.mark.parametrize("failure", ["SIGKILL", "os._exit(3)"])
def test_on_each_launcher(launch: Launch, run: Run, failure: str) -> None:
    words = WORDS[failure]
    if launch is elastic.launch and failure == "os._exit(3)":
        words = "rank 1 (exited without reporting|ended with exit code 3)"
    with pytest.raises(RankError, match=words):
        run(wait_for_failed, "backward", failure, "join", launch=launch)


@pytest.mark.parametrize("who", [0, 1])
def test_rank_0_is_no_exception(run: Run, who: int) -> None:
    """Also where it alone fails, after others have returned."""
    with pytest.raises(RankError, match=rf"(?s)^rank {who}: ArithmeticError: own words\n"):
        run(own_functions.fail_alone, "raise", who)


HANGS = [("backward", "join"), ("load", "join"), ("all_reduce", "own"), ("all_reduce", "never"), ("functional", "own")]


@pytest.mark.parametrize(
    ("waits", "group", "port"),
    [
        *((waits, group, False) for waits, group in HANGS[:4]),
        ("all_reduce", "never", True),
        pytest.param("functional", "own", True, marks=again),
    ],
)
def test_a_rank_that_hangs(run: Run, waits: str, group: str, port: bool) -> None:
    """By the run's limit, which is also that of a process group of the function's own."""
    with pytest.raises(RankError, match=r"(?s)^rank 1 did not come where rank 0 waited for 2 s.*in hang\n") as caught:
        run(wait_for_failed, waits, "hang", group, port=free_port() if port else 0, timeout=2.0)
    assert caught.value.recoverable


@on(exhaustive=(SPAWN, RAY))
def test_a_rank_that_hangs_after_others_have_returned(launch: Launch, run: Run) -> None:
    with pytest.raises(RankError, match=r"^rank 1 did not come where rank 0 waited for 5 s"):
        run(own_functions.fail_alone, "hang", timeout=5.0, launch=launch)


def test_several_runs_in_one_process_blame_each_their_own(run: Run) -> None:
    for failure, who in (("raise", 0), ("SIGKILL", 1), ("raise", 1)):
        with pytest.raises(RankError, match=f"^rank {who}(:| was)"):
            partial(run, folder=None)(own_functions.wait_for_failed, "all_reduce", failure, "own", who)


def test_a_rank_0_that_others_wait_for_is_named(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """It may be writing results, so its time has no limit."""
    assert run(own_functions.return_late, 3.0, timeout=1.0) == "late"
    assert capfd.readouterr().err.count("rank 0 has not returned 1 s after rank 1") == 1
