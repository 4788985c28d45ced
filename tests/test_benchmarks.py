"""Benchmarks whose peers crash lose nothing that was measured, and say what was run again."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli import ROOT

from benchmarks import __main__ as command
from benchmarks import gpu, measuring, rendering
from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import run_command


def measure(crashes: int) -> Callable[[Options], Result]:
    """A benchmark of two sides, one of which is a peer that crashes so many times."""

    def run(options: Options) -> Result:
        result, left = Result(settings={}), [None] * crashes

        def peer(_: int) -> None:
            result.add("peer: first", 1.0, "s")
            if left:
                left.pop()
                run_command([sys.executable, "-c", "import os; os.abort()"], {})
            result.add("peer", 2.0, "s")

        interleaved(options, result, {"peer": peer, "ours": lambda _: result.add("ours", 1.0, "s")}, 3)
        result.targets.append(Target("times faster", result.ratio("peer / ours", "peer", "ours"), "x"))
        return result

    return run


def benchmark(monkeypatch: pytest.MonkeyPatch, output: Path, measure: Callable[[Options], Result]) -> bool:
    monkeypatch.setattr(command, "description", lambda _: "A peer that crashes.")
    monkeypatch.setattr(command.importlib, "import_module", lambda _: SimpleNamespace(measure=measure))
    return command.run("crashing", argparse.Namespace(repeats=0, quick=True, against=None), output)


def test_a_peer_that_crashes_is_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crashes = measuring.TRIES - 1
    assert benchmark(monkeypatch, tmp_path, measure(crashes))
    found = json.loads((tmp_path / "crashing.json").read_text())
    assert {label: series["values"] for label, series in found["series"].items()} == {
        "peer: first": [1.0] * 3,
        "peer": [2.0] * 3,
        "ours": [1.0] * 3,
        "peer / ours": [2.0] * 3,
    }
    assert [row["value"] for row in found["targets"]] == [2.0]
    assert len(found["notes"]) == crashes
    for note in found["notes"]:
        assert note.startswith("peer, 1 of 3: SIGABRT of ")
        assert note.endswith("; it was measured again")
        assert f"- {note}" in (tmp_path / "README.md").read_text()
    assert not [*tmp_path.glob("*.partial")]


def test_the_page_of_results_is_made_of_its_files_and_names_those_without_a_program(tmp_path: Path) -> None:
    results = ROOT / "benchmarks/results"
    for path in results.glob("*.json"):
        shutil.copy(path, tmp_path)
    rendering.render(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert page == (results / "README.md").read_text()
    [settled] = [line for line in page.splitlines() if line.startswith("No program measures these any more")]
    assert "forks" in settled
    assert "epoch" not in settled


@pytest.mark.exhaustive
def test_all_that_is_measured_on_a_gpu_also_runs_on_a_cpu(tmp_path: Path) -> None:
    assert command.run("gpu", argparse.Namespace(repeats=0, quick=True, against=None), tmp_path)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["notes"] == []
    assert len(found["targets"]) == len(gpu.STEPS) + 4
    values = {row["what"].partition(":")[2].strip(): row["value"] for row in found["targets"]}
    assert values["weights are equal bit for bit"] == 1.0
    assert values["step after which it went on"] > 0
    assert values["largest difference of a loss"] < 1000
    assert all(found["series"][f"{name}: {side}"]["n"] == 1 for name in gpu.STEPS for side in ("ours", "bare"))
