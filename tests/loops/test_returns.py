"""What a user's function finds on its ranks and returns, by name and by value; nothing stays."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import own_functions
import pytest
import torch
from cli import HELPERS
from engines import DASK, SPAWN, Launch, Run, on

from flyte_ddp import RankError


@pytest.mark.slow
@on(SPAWN, without=[DASK])  # whose agents are those of AGENTS
def test_ranks_find_their_place_and_torchruns_variables(launch: Launch, run: Run) -> None:
    found = run(own_functions.describe_place, launch=launch)
    assert [each["place"] for each in found] == [(0, 2, 0, "cpu"), (1, 2, 1, "cpu")]
    assert [each["group"] for each in found] == [(0, 2), (1, 2)]
    assert len({each["process"] for each in found} | {os.getpid()}) == 3
    for rank, each in enumerate(found):
        assert each["folder"]
        variables = {**each["environment"]}
        assert variables.pop("MASTER_ADDR")
        assert variables.pop("MASTER_PORT") == found[0]["environment"]["MASTER_PORT"]
        assert variables.pop("TORCHELASTIC_RUN_ID")
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        assert variables == {**place, "GROUP_RANK": "0", "NODE_RANK": "0"}


@pytest.mark.slow
def test_what_rank_0_returns_comes_back(run: Run, tmp_path: Path) -> None:
    returned = run(own_functions.give, "dataclass")
    assert (returned.step, returned.weights.tolist()) == (3, [1.0, 1.0])
    assert type(returned) is own_functions.Outcome
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_one_rank_in_this_process(run: Run, tmp_path: Path) -> None:
    assert run(own_functions.give_back, num_ranks=1, folder=None) is None
    assert run(own_functions.give, "tensor", num_ranks=1).tolist() == [0.0, 1.0, 2.0]
    assert run(partial(own_functions.give_back, 1, x=2), 3, num_ranks=1, y=4) == [1, 3, {"x": 2, "y": 4}]
    place = run(own_functions.describe_place, num_ranks=1)
    assert (place[0]["process"], place[0]["place"]) == (os.getpid(), (0, 1, 0, "cpu"))
    assert run(own_functions.make_groups, num_ranks=1) == [1.0] * 3


@pytest.mark.parametrize("then", ["return", "raise"])
def test_nothing_stays_in_this_process(run: Run, then: str) -> None:
    """A group, settings, variables: neither of a function that returns nor of one that raises."""
    if then == "return":
        run(own_functions.start_group, then, num_ranks=1)
        return
    with pytest.raises(RankError, match=r"^rank 0: ArithmeticError: own words$") as caught:
        run(own_functions.start_group, then, num_ranks=1)
    assert caught.value.file is not None
    assert "in start_group" in caught.value.file.read_text()


@pytest.mark.slow
def test_by_value_a_closure_and_a_function_without_a_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a notebook's functions are: of a main module without a file."""
    factor = torch.tensor(3.0)

    def multiply(by: int) -> float:
        return factor.item() * by

    assert run(multiply, 2) == 6.0
    assert run(lambda: factor, num_ranks=1).item() == 3.0
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    code = "import os\nclass Kept:\n    x = 1\ndef rank(y):\n    return Kept(), int(os.environ['RANK']) + y\n"
    exec(code, vars(notebook))
    kept, number = run(vars(notebook)["rank"], 5)
    assert (type(kept), number) == (vars(notebook)["Kept"], 5)


SCRIPT = """
import sys
from dataclasses import dataclass
from flyte_ddp import current_rank, run_ranks
import beside

@dataclass
class Outcome:
    size: int
    words: str

def train(words, *, more):
    return Outcome(current_rank().world_size, beside.join(words, more))

outcome = run_ranks(train, "some", more=["words"])  # without `if __name__ == "__main__"`
assert isinstance(outcome, Outcome)
print(outcome)
"""


@pytest.mark.slow
def test_a_script_runs_its_own_function(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("def join(words, more):\n    return ' '.join([words, *more])\n")
    environment = {**os.environ, "FLYTE_DDP_PROGRESS": "off", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(tmp_path / "script.py")]
    ended = subprocess.run(command, env=environment, cwd=HELPERS, capture_output=True, text=True, check=False)
    assert ended.stdout == "Outcome(size=2, words='some words')\n", ended.stderr
    assert ended.stderr == ""
    assert [*tmp_path.glob("flyte-ddp*")] == []


@pytest.mark.slow
def test_process_groups_one_after_the_other(run: Run) -> None:
    """Which under torchrun find the first one's addresses in the store."""
    assert run(own_functions.make_groups, 4) == [2.0] * 4


SAVING = """
from flyte_ddp import current_rank, run_ranks

def train():
    rank = current_rank()
    done = (rank.load() or {"step": 0})["step"]
    for step in range(done + 1, 4):
        rank.save(step, {"step": step})
    return (each for each in [done])

print(run_ranks(train, num_ranks=RANKS, folder="run"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_after_a_mistake_in_what_is_returned_mended_code_goes_on_if_it_is_told_to(tmp_path: Path, ranks: int) -> None:
    script, saving = tmp_path / "script.py", SAVING.replace("RANKS", str(ranks))

    def run_script(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script.write_text(code)
        environment = {**os.environ, "FLYTE_DDP_PROGRESS": "lines", **environment}
        command = [sys.executable, str(script)]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    fix = "if only lines after the last save have changed, set FLYTE_DDP_GO_ON=run to resume"
    ended = run_script(saving)
    assert "rank 0's return value cannot be pickled (TypeError: cannot pickle 'generator' object)" in ended.stderr
    assert f"step 3 of {tmp_path}/run is saved; {fix}" in ended.stderr
    mended = saving.replace("(each for each in [done])", "done")
    refused = run_script(mended)
    said = rf"[ab].ckpt belongs to another run: different user code .*; {fix}; else restore"
    assert re.search(said, refused.stderr), refused.stderr
    assert run_script(mended.replace('folder="run"', 'folder="other"'), FLYTE_DDP_GO_ON="run").stdout == "0\n"
    ended = run_script(mended, FLYTE_DDP_GO_ON="run")
    assert ended.stdout == "3\n", ended.stderr
    assert "was saved by different user code; resuming" in ended.stderr
