"""A user's own tasks under ``pyflyte run``, and as a user calls them."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli import Ended
from engines import RAY_ENVIRONMENT

from flyte_ddp.core.errors import UserError
from flyte_ddp.pods.profiles import ENGINES
from flytekitplugins.ddp import DDP

Run = Callable[..., Ended]


def records(tmp_path: Path, task: str) -> list[dict[str, object]]:
    [found] = (tmp_path / "runs").glob(f"own.{task}-*/metrics.jsonl")
    return [json.loads(line) for line in found.read_text().splitlines()]


@pytest.mark.slow
def test_rank_0s_values_are_the_outputs_and_the_runs_folder_has_the_records(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("a line")
    ended = run("train", "--start", "3", "--data", str(tmp_path / "data.txt"))
    assert ended.exit_code == 0, ended.output
    assert "Stats(total=7.0, ranks=2)" in ended.output
    [model] = (tmp_path / "runs").glob("own.train-*/model.txt")
    assert model.read_text() == "a line 7.0"
    assert (model.parent / "report.html").exists()
    assert re.search(r"own:train has run in .*/runs/own\.train-[\w-]+\n  report\.html ", ended.output), ended.output
    kinds = [(each["kind"], each.get("loss")) for each in records(tmp_path, "train")]
    assert kinds == [("start", None), ("record", 2.5), ("record", 1.25), ("end", None)]


@pytest.mark.slow
def test_after_a_mistake_in_the_outputs_mended_code_goes_on_from_the_saves(run: Run, tmp_path: Path) -> None:
    """If it is told to, and it is said how: at the mistake, and when the mended code begins anew."""
    for attempt in range(2):
        ended = run("measure")
        assert ended.exit_code == 1
        assert re.search("output o0 is 'high', of type str, but the task declares float", ended.output), ended.output
        assert ("going on after step 1" in ended.output) == bool(attempt)
    [checkpoints] = (tmp_path / "runs").glob("own.measure-*/checkpoints")
    name = checkpoints.parent.name
    fix = f"if only lines after the last save have changed, set FLYTE_DDP_GO_ON={name} to resume"
    assert f"step 2 of {checkpoints.parent} is saved; {fix}" in ended.output
    own = tmp_path / "project/own.py"
    own.write_text(own.read_text().replace('return "high"', "return 0.5"))
    anew = run("measure")
    assert f"{name}, with the same inputs and different code, has saved step 2: {fix}" in anew.output, anew.output
    assert "0.5" in anew.output.splitlines()
    assert checkpoints.exists()
    mended = run("measure", FLYTE_DDP_GO_ON=name)
    assert "going on after step 2" in mended.output
    assert "0.5" in mended.output.splitlines()
    assert not checkpoints.exists()
    start = json.loads((checkpoints.parent / "metrics.jsonl").read_text().splitlines()[-2])
    assert (start["resumed_after_step"], start["resumed_from_other_code"]) == (2, True)
    again = run("measure", FLYTE_DDP_GO_ON=name)
    assert f"{name} has no save to resume from; unset FLYTE_DDP_GO_ON" in again.output
    other = f"{name.rpartition('-')[0]}-another"
    assert f"{other} has no save to resume from" in run("measure", FLYTE_DDP_GO_ON=other).output
    assert not (checkpoints.parents[1] / other).exists()
    assert (
        f"FLYTE_DDP_GO_ON={name} is ignored: this run, own.square"
        in run("square", "--value", "3", FLYTE_DDP_GO_ON=name).output
    )


@pytest.mark.slow
def test_in_a_map_task(run: Run) -> None:
    assert "[1, 4, 9]" in run("squares", "--values", "[1, 2, 3]").output


@pytest.mark.slow
def test_flytes_cache_answers_and_leaves_out_what_it_is_told_to(run: Run, tmp_path: Path) -> None:
    first = run("learn", "--steps", "2", FLYTE_ATTEMPT_NUMBER="1")
    assert "[1, 2]" in first.output, first.output
    assert "ranks: 2" in first.output
    assert not [*(tmp_path / "runs").rglob("*.ckpt")], "no save stays when the outputs are written"
    again = run("learn", "--steps", "2", "--note", "other", FLYTE_ATTEMPT_NUMBER="1")
    assert "[1, 2]" in again.output, again.output
    assert "ranks: 2" not in again.output


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_on_this_machine(run: Run, engine: str) -> None:
    task = {"dask": "on_dask_here"}.get(engine, f"on_{engine}")
    ended = run(task, "--value", "5", **RAY_ENVIRONMENT)
    assert ended.exit_code == 0, ended.output
    assert "Stats(total=10.0, ranks=2)" in ended.output


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": "rya"}, r"unknown engine 'rya': did you mean 'ray'\? choose one of dask, elastic, ray"),
        ({"nodes": 2}, "nodes=2: several pods need an engine; choose one of elastic, ray, dask"),
        ({"num_ranks": "2"}, "num_ranks='2': must be a number of ranks"),
        ({"num_ranks": 3, "nodes": 2, "engine": "elastic"}, "num_ranks=3 on nodes=2: .*to a multiple of nodes"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DDP(**values)


def test_more_ranks_than_gpus_are_refused_before_there_is_a_pod() -> None:
    from flytekit import Resources, task

    with pytest.raises(UserError, match=r"num_ranks=6: the task requests 4 GPU\(s\), and each rank needs"):

        @task(task_config=DDP(num_ranks=6, nodes=2, engine="elastic"), requests=Resources(gpu="2"))
        def train(value: int) -> int:
            return value


@pytest.mark.parametrize("extra", ENGINES)
def test_a_missing_extra_says_what_to_install(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flytekit import task

    plugin = ENGINES[extra].flytekit_plugin
    for name in [name for name in sys.modules if name.startswith((plugin, f"flytekitplugins.ddp.{extra}"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, plugin, None)
    with pytest.raises(UserError, match=rf"{plugin}[.a-z]* is not installed: .*'\.\[{extra}\]'"):

        @task(task_config=DDP(nodes=2, engine=extra))
        def train(value: int) -> int:
            return value


def test_a_dynamic_task_has_no_ranks() -> None:
    from flytekit import dynamic

    with pytest.raises(UserError, match=r"@dynamic cannot run on ranks; call a @task\(task_config=DDP"):

        @dynamic(task_config=DDP(num_ranks=2))
        def train(value: int) -> int:
            return value


def test_importing_the_plugin_imports_little() -> None:
    """flytekit does so at each start."""
    code = """
import flytekit, sys
before = {*sys.modules}
for name in [name for name in before if name.startswith(("flytekitplugins.ddp", "flyte_ddp"))]:
    del sys.modules[name]
import flytekitplugins.ddp
print(sorted({*sys.modules} - before))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() in ("[]", "['flytekitplugins.ddp']")
