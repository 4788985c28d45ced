"""The rank that failed first is named with its own words, whatever the others wait in; nothing stays."""

import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import own_functions
import pytest
from engines import Run
from torch.distributed import DistNetworkError

from flyte_ddp import RankError
from flyte_ddp.core.errors import CollectiveError
from flyte_ddp.core.loops.in_rank import wait_until_all_have_ended

pytestmark = pytest.mark.slow


def test_the_rank_that_others_wait_for(run: Run, tmp_path: Path) -> None:
    words = r"(?s)^rank 1: ArithmeticError: own words\n\nTraceback .*in fail\n"
    with pytest.raises(RankError, match=words) as caught:
        run(own_functions.fail_in_backward)
    assert not caught.value.recoverable
    assert caught.value.step == 0
    assert caught.value.file == tmp_path / "run/traceback.txt"
    assert caught.value.file.read_text() == f"{caught.value}\n"


def test_a_rank_0_that_others_wait_for_is_named(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """It may be writing results, so its time has no limit."""
    assert run(own_functions.return_late, 2.0, timeout=1.0) == "late"
    assert capfd.readouterr().err.count("rank 0 has not returned 1 s after rank 1") == 1


def test_a_rank_that_lost_the_store_does_not_blame_rank_0_later(capfd: pytest.CaptureFixture[str]) -> None:
    info, settings = SimpleNamespace(rank=1, world_size=2), SimpleNamespace(timeout=0.2)
    store = Mock(**{"wait.side_effect": DistNetworkError("the connection is lost")})
    before = {*threading.enumerate()}
    with pytest.raises(CollectiveError):
        wait_until_all_have_ended(SimpleNamespace(info=info, work=SimpleNamespace(settings=settings)), store)
    for thread in {*threading.enumerate()} - before:
        thread.join()
    assert not capfd.readouterr().err
