"""Nights of a user's table through ``pyflyte run``: what is released, and that each figure is the served model's."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from cli import HELPERS, ROOT, Ended, pyflyte
from own_tables import write_plans

pytestmark = pytest.mark.slow
HP = {
    "dataset": "own_tables:Plans", "data_source": "plans.csv", "model": "own_tables:Model", "epochs": 6, "num_ranks": 1,
    "batch_size": 64, "optimizer": "adamw", "learning_rate": 0.03,
}  # fmt: skip


def run(folder: Path, file: str, *arguments: str) -> Ended:
    where = {"home": folder / "home", "runs": folder / "runs", "directory": folder}
    variables = {"PYTHONPATH": str(HELPERS), "FLYTE_DDP_PROGRESS": "off"}
    return pyflyte("run", str(ROOT / f"workflows/{file}.py"), *arguments, **where, **variables)


def release(folder: Path, policy: dict[str, object] | None = None, **hp: object) -> Ended:
    given = (
        "--hp",
        json.dumps({**HP, **hp}),
        "--policy",
        json.dumps({"export": "off", "max_conflicts": 1, **(policy or {})}),
    )
    return run(folder, "release", "release_wf", "--model_name", "plans", *given)


def outcome(ended: Ended) -> str:
    assert ended.exit_code == 0, ended.output
    return re.findall(r"outcome=(['\"])(.*?)\1", ended.output)[-1][1]


def served_accuracy(folder: Path, *given: str) -> float:
    """Of the champion on rows that ``predict_wf`` reads by ``given``, by the truth in its table."""
    ended = run(folder, "prediction", "predict_wf", "--model_name", "plans", *given)
    assert ended.exit_code == 0, ended.output
    table = max(folder.glob("runs/predictions-*/predictions.csv"), key=lambda path: path.stat().st_mtime)
    rows = [*csv.DictReader(table.read_text().splitlines())]
    return float(np.mean([row["prediction"] == row["truth"] for row in rows]))


@pytest.mark.exhaustive
def test_moved_categories_a_changed_unit_and_a_worse_model(tmp_path: Path) -> None:
    write_plans(tmp_path / "plans.csv")
    assert outcome(release(tmp_path)).startswith("promoted: there is no champion yet")
    of_dataset = "--dataset", HP["dataset"], "--data_source", "plans.csv"
    first = served_accuracy(tmp_path, *map(str, of_dataset))

    write_plans(tmp_path / "plans.csv", first="a")  # each code moves by one
    second = release(tmp_path, model="own_tables:Crippled")
    served = served_accuracy(tmp_path, *map(str, of_dataset))
    assert outcome(second).startswith("kept: ")
    shown = re.findall(
        r"the champion \w{12} has (\S+) % on these samples and had (\S+) % at its release", outcome(second)
    )
    assert shown == [(f"{100 * served:.2f}", f"{100 * first:.2f}")]
    assert served > 0.85

    lines = [line.split(",") for line in (tmp_path / "plans.csv").read_text().splitlines()]
    metres = [lines[0], *([name, plan, f"{float(size) * 1000}", y] for name, plan, size, y in lines[1:])]
    (tmp_path / "plans.csv").write_text("".join(",".join(line) + "\n" for line in metres))
    third = release(tmp_path, {"max_shift": 0.2})
    assert third.exit_code != 0
    assert "max_shift=0.2: training split: column size differs from the champion's in 100% of samples" in third.panel
    assert not re.findall("test accuracy", third.output), "nothing was trained"
    fourth = release(tmp_path)
    assert "warning: training split: column size differs from the champion's" in fourth.output
    assert "column size differs from the champion's in 100% of samples" in outcome(fourth)
    assert outcome(fourth).startswith("kept: the champion has ")
    assert "inputs or labels of the same samples have changed" in outcome(fourth)
    watched = run(tmp_path, "monitor", "monitor_wf", "--model_name", "plans", "--window", '{"table": "plans.csv"}')
    assert "row size (1.00)" in watched.output
    judged = run(tmp_path, "release", "evaluate_wf", "--model_name", "plans", *map(str, of_dataset))
    assert judged.exit_code == 0, judged.output
    now = served_accuracy(tmp_path, *map(str, of_dataset))
    page = max(tmp_path.glob("runs/verdicts-*/verdict.html"), key=lambda path: path.stat().st_mtime).read_text()
    assert f"{100 * now:.2f}" in page, "the page of the evaluation has the served model's figure"
