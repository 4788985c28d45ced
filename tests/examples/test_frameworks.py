"""Lightning and Accelerate on our ranks: as under torchrun, killed and resumed; and what they need to find there."""

import os
from types import SimpleNamespace

import framework_programs
import pytest
import torch
from cli import ROOT
from engines import Launch
from killed_ranks import call_and_kill

import flyte_ddp
from flyte_ddp.core.launch import spawn
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.loops.in_rank import set_torchrun_variables
from flyte_ddp.core.runs.work import World
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.engines import elastic

SCRIPTS = {name: ROOT / f"examples/{name}/{name}_digits.py" for name in ("lightning", "accelerate")}


def is_same(measures: dict[str, float], others: dict[str, float]) -> bool:
    return measures == pytest.approx(others, rel=1e-3)  # 75 steps in fp32, on another number of threads


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "launch", "at", "every"),
    [
        ("accelerate", spawn.launch, 48, 10),  # in the middle of an epoch, and so is what was saved
        ("lightning", elastic.launch, 50, 15),
    ],
)
def test_a_killed_rank(name: str, launch: Launch, at: int, every: int, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS[name].parent)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    arguments = framework_programs.train, 1, at, str(tmp_path / "marker"), f"{name}_digits"
    options = {"folder": tmp_path / "run", "launch": launch}
    expected = flyte_ddp.run_ranks(framework_programs.train, f"{name}_digits", folder=tmp_path / "undisturbed")
    with pytest.raises(flyte_ddp.RankError, match=r"^rank 1 was killed by SIGKILL"):
        flyte_ddp.run_ranks(call_and_kill, *arguments, **options)
    assert is_same(flyte_ddp.run_ranks(call_and_kill, *arguments, **options), expected)
    starts = [each for each in read_records(tmp_path / "run/metrics.jsonl") if each["kind"] == "start"]
    first, second = [start["resumed_after_step"] for start in starts]
    assert first == 0
    assert 0 < second < at
    assert second % every == 0


@pytest.mark.slow
@pytest.mark.canary
def test_lightning_waits_for_ranks_as_long_as_we_do() -> None:
    assert flyte_ddp.run_ranks(framework_programs.timeout_of_lightning, timeout=77, launch=spawn.launch) == 77


@pytest.mark.slow
@pytest.mark.canary
def test_accelerate_finds_all_ranks_and_forgets_a_single_one() -> None:
    assert flyte_ddp.run_ranks(framework_programs.processes_of_accelerate, num_ranks=2) == 2
    for _ in range(2):  # in this process
        assert flyte_ddp.run_ranks(framework_programs.processes_of_accelerate, num_ranks=1) == 1


def test_devices_times_nodes_of_lightning_are_the_gpus_that_ranks_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = World(4, device_type="cuda", hosts=("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"))
    rank = SimpleNamespace(info=RankInfo(3, 4, 1), work=SimpleNamespace(world=world))
    variables = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    before = dict(os.environ)
    with set_torchrun_variables(rank, port=1234):
        assert variables.items() <= os.environ.items()
        assert (os.environ["MASTER_ADDR"], os.environ["RANK"]) == ("10.0.0.1", "3")
    assert dict(os.environ) == before
