"""The rank that failed first is named with its own words, whatever the others wait in; nothing stays."""

import socket
import time
from pathlib import Path

import own_functions
import pytest
from engines import Run
from own_functions import wait_for_failed

from flyte_ddp import RankError

pytestmark = pytest.mark.slow

RAISED = r"(?s)^rank 1: ArithmeticError: own words\n\nTraceback .*in fail\n"
KILLED = "^rank 1 was killed by SIGKILL$"
LEFT = r"^rank 1 ended with exit code 0 before it had finished$"
MORE = [
    ("all_reduce", "SIGKILL", "own port", KILLED),
    ("functional", "os._exit(0)", "own", LEFT),
    ("load", "SIGKILL", "join", KILLED),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("waits", "failure", "group", "words"),
    [("backward", "raise", "join", RAISED), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)],
)
def test_the_rank_that_others_wait_for(
    run: Run, tmp_path: Path, waits: str, failure: str, group: str, words: str
) -> None:
    began = time.monotonic()
    port = free_port() if group == "own port" else 0
    with pytest.raises(RankError, match=words) as caught:
        run(wait_for_failed, waits, failure, group, port=port)
    assert time.monotonic() - began < 30
    assert caught.value.recoverable == (failure == "SIGKILL")
    assert caught.value.step == 0
    if caught.value.details:
        assert caught.value.file == tmp_path / "run/traceback.txt"
        assert caught.value.file.read_text() == f"{caught.value}\n"


@pytest.mark.exhaustive
def test_rank_0_is_no_exception(run: Run) -> None:
    """Also where it alone fails, after others have returned."""
    with pytest.raises(RankError, match=r"(?s)^rank 0: ArithmeticError: own words\n"):
        run(own_functions.fail_alone, "raise", 0)


@pytest.mark.exhaustive
def test_a_rank_that_hangs_after_others_have_returned(run: Run) -> None:
    with pytest.raises(RankError, match=r"^rank 1 did not come where rank 0 waited for 2 s"):
        run(own_functions.fail_alone, "hang", timeout=2.0)


def test_a_rank_0_that_others_wait_for_is_named(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """It may be writing results, so its time has no limit."""
    assert run(own_functions.return_late, 2.0, timeout=1.0) == "late"
    assert capfd.readouterr().err.count("rank 0 has not returned 1 s after rank 1") == 1
