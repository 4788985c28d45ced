"""A run that stops at rungs goes on as if it had not: model and metrics are those of a direct run, to the last bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import faults
import pytest
from training_runs import QUIET, cut_off, records_of, train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.core.runs.checkpoint import find_newest_checkpoint
from flyte_ddp.core.runs.run_folder import OUTPUTS, RUNG, UNFINISHED
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.core.training import train as training
from flyte_ddp.run import read_run_result, run_training_fraction

# 1,350 samples: 14 steps an epoch. The model has BatchNorm and dropout.
BASE = Hyperparameters(model="faults:model", epochs=2, batch_size=100, num_ranks=2, precision="fp32", log_interval=4)
TIMED = ("time", "samples_per_second", "seconds", "notes")

pytestmark = pytest.mark.usefixtures("user_models")


def figures(path: Path) -> list[dict[str, Any]]:
    """All records but those of starts, without times."""
    return [
        {key: value for key, value in record.items() if key not in TIMED}
        for record in read_records(path)
        if record["kind"] != "start"
    ]


def rung_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / UNFINISHED / RUNG).read_text())


def fail_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Let a single rank run out of memory after so many steps of this part."""
    compute, left = training.compute_gradients, iter(range(steps))

    def fail(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise MemoryError
        return compute(*arguments)

    patch.setattr(training, "compute_gradients", fail)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"keep": "ema", "ema_decay": 0.9}, (4, 10)),
        # The second rung ends with the first epoch.
        ({"epochs": 3, "keep": "best", "num_ranks": 1}, (5, 14)),
        ({"epochs": 3, "eval_interval": 2, "accumulation_steps": 2, "select_by": "accuracy", "num_ranks": 1}, (5, 14)),
    ],
)
def test_a_trial_killed_in_each_rung_ends_as_a_direct_run(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], steps: tuple[int, int]
) -> None:
    """Ranks are killed, and a single rank fails at the same places."""
    hp, folder = replace(BASE, **changes), tmp_path / "run"
    direct = train_in(tmp_path / "direct", hp, digits)

    def train_killed(steps_divisor: int, **fault: Any) -> None:
        with monkeypatch.context() as patch:
            if hp.num_ranks > 1:
                faults.inject(patch, tmp_path / f"marker-{steps_divisor}", kind="SIGKILL", **fault)
            elif fault["at"] == "evaluation":
                patch.delattr(training, "compute_split_columns")
            else:
                fail_after(fault["pass"], patch)
            with pytest.raises(RankError, match=r"killed by SIGKILL|NameError|MemoryError"):
                run_training_fraction(hp, digits, folder, steps_divisor, QUIET, threads=1)
        run_training_fraction(hp, digits, folder, steps_divisor, QUIET, threads=1)

    for steps_divisor, step, fault in (
        (9, steps[0], {"rank": 1, "at": "training", "pass": 2}),
        (3, steps[1], {"rank": 0, "at": "evaluation", "pass": 0}),  # of the rung or of the epoch that ends there
    ):
        train_killed(steps_divisor, **fault)
        rung = rung_of(folder)
        assert rung["step"] == step
        assert not [name for name in OUTPUTS if (folder / name).exists() or (folder / UNFINISHED / name).exists()]
        found, _ = find_newest_checkpoint(folder / UNFINISHED / "checkpoints")
        assert found is not None
        assert found.step == step
    if steps[1] == 14 and hp.eval_interval == 1:  # a direct run evaluates there, too
        [first] = [each for each in figures(direct.metrics) if each["kind"] == "evaluation" and each["step"] == 14]
        assert rung["value"] == pytest.approx(first[f"validation_{hp.select_by}"], rel=1e-12)
    train_killed(1, rank=1, at="training", **{"pass": 5})
    result = read_run_result(folder)
    assert result.model.read_bytes() == direct.model.read_bytes()
    assert figures(result.metrics) == figures(direct.metrics)
    assert not (folder / UNFINISHED).exists()


@pytest.mark.slow
def test_a_rung_is_a_prefix_of_the_run(digits: Path, tmp_path: Path) -> None:
    """The value is what a run would have found that is evaluated there; no step beyond is computed."""
    hp = replace(BASE, model="small_cnn", num_ranks=1, schedule="constant")
    run_training_fraction(hp, digits, tmp_path / "run", 2, QUIET, threads=1)
    short = train_in(tmp_path / "short", replace(hp, max_steps=14), digits)
    [evaluation] = records_of(short, "evaluation")
    assert rung_of(tmp_path / "run") == {"step": 14, "value": evaluation["validation_loss"]}
    trained = [each for each in figures(tmp_path / "run" / UNFINISHED / "metrics.jsonl") if each["kind"] == "train"]
    assert [each["step"] for each in trained] == [4, 8, 12]


@pytest.mark.slow
def test_what_is_kept_decides_the_value(digits: Path, tmp_path: Path) -> None:
    """With keep=best it is that of the best evaluation so far, here of the first one: the rate is far too high."""
    hp = replace(BASE, model="small_cnn", num_ranks=1, epochs=4, schedule="constant", learning_rate=0.6)
    run_training_fraction(replace(hp, keep="best"), digits, tmp_path / "best", 2, QUIET, threads=1)
    evaluations = figures(tmp_path / "best" / UNFINISHED / "metrics.jsonl")
    losses = [each["validation_loss"] for each in evaluations if each["kind"] == "evaluation"]
    assert len(losses) == 2
    assert rung_of(tmp_path / "best")["value"] == losses[0] < losses[1]


@pytest.mark.slow
def test_a_checkpoint_beyond_the_rung_counts_where_it_is(digits: Path, tmp_path: Path) -> None:
    hp = replace(BASE, model="small_cnn", num_ranks=1)
    cut_off(lambda: train_in(tmp_path / "run", hp, digits), at=9)
    run_training_fraction(hp, digits, tmp_path / "run", 9, QUIET, threads=1)
    assert rung_of(tmp_path / "run")["step"] == 9
    result = train_in(tmp_path / "run", hp, digits)
    assert result.model.read_bytes() == train_in(tmp_path / "direct", hp, digits).model.read_bytes()


@pytest.mark.slow
def test_a_run_that_stops_early_is_complete(digits: Path, tmp_path: Path) -> None:
    hp = replace(BASE, model="small_cnn", num_ranks=1, epochs=9, early_stop_patience=1)
    hp = replace(hp, learning_rate=1e-9, select_by="accuracy")  # no evaluation is better than the first
    run_training_fraction(hp, digits, tmp_path / "run", 3, QUIET, threads=1)
    assert read_run_result(tmp_path / "run").model.exists()
    assert len([each for each in figures(tmp_path / "run/metrics.jsonl") if each["kind"] == "evaluation"]) == 2


def test_fewer_steps_than_a_part_needs_are_refused(digits: Path, tmp_path: Path) -> None:
    hp = replace(BASE, model="small_cnn", num_ranks=1, max_steps=8)
    with pytest.raises(UserError, match=r"has 8 steps.* 1/9 .* at least 9 steps; .* or max_steps$"):
        run_training_fraction(hp, digits, tmp_path / "run", 9, QUIET, threads=1)
