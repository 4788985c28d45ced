"""Who goes on to the next rung, what a trial's failure is, and what is not trained a second time."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from report_page import records
from training_runs import QUIET

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import (
    BusyError,
    OutOfMemoryError,
    RankError,
    RankLostError,
    StoppedError,
    UnreachableError,
    UserError,
)
from flyte_ddp.core.runs.run_folder import lock_run_folder
from flyte_ddp.run import run_training, run_training_fraction
from flyte_ddp.sweep.halving import TrialResult, pick_winner, plan_rung, rank_trials, run_rung
from flyte_ddp.sweep.space import Sweep

BASE = Hyperparameters(num_ranks=1, epochs=2, batch_size=50)
SWEEP = Sweep(space='{"learning_rate": {"from": 0.001, "to": 0.1, "log": true}}')


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_RUNS", str(tmp_path / "runs"))


def rung(trial: int, value: float | None, **changes: Any) -> TrialResult:
    return TrialResult(trial, BASE, "run", 9, value=value, failed="" if value is not None else "why", **changes)


@pytest.mark.parametrize(
    ("values", "higher", "promoted"),
    [
        ([5.0, 4.0, 3.0, 2.0, 1.0, 0.0], False, [5, 4]),
        ([5.0, 4.0, 3.0, 2.0, 1.0, 0.0], True, [0, 1]),
        ([1.0, 1.0, 0.0, 1.0, 1.0, 1.0], False, [2, 0]),
        ([1.0, 1.0, 0.0, 1.0, 1.0, 1.0], True, [0, 1]),
        ([None, 2.0, None, 1.0, None, None], False, [3, 1]),
        ([None, None, 7.0, None, None, None], True, [2]),
        ([2.0, 1.0], False, [1]),
        ([3.0] * 10, False, [0, 1, 2]),
    ],
)
def test_the_best_third_goes_on(values: list[float | None], higher: bool, promoted: list[int]) -> None:
    sweep = replace(SWEEP, trials=len(values), rungs=3)
    done = [
        replace(each, value=value, higher=higher, failed="" if value is not None else "why", step=3, steps=27)
        for each, value in zip(plan_rung(sweep, BASE, "data", []), values, strict=True)
    ]
    following = plan_rung(sweep, BASE, "data", done)
    assert [each.trial for each in following] == promoted
    assert following == [TrialResult(each.trial, each.hp, each.run, 3) for each in following], (
        "nothing is known of it yet"
    )


@pytest.mark.parametrize("sampler", ["qmc", "tpe"])
def test_a_small_space_is_tried_whole_and_fewer_trials_are_printed(capsys, sampler: str) -> None:
    sweep = Sweep(space='{"learning_rate": [0.1, 0.2, 0.3], "epochs": [1, 2]}', trials=18, sampler=sampler)
    first = plan_rung(sweep, BASE, "data", [])
    assert {(each.hp.learning_rate, each.hp.epochs) for each in first} == {*product((0.1, 0.2, 0.3), (1, 2))}
    assert capsys.readouterr().out == "6 of 18 trials: the space has 6 combinations\n"
    assert plan_rung(replace(sweep, trials=6), BASE, "data", []) == first
    assert capsys.readouterr().out == ""


def test_where_all_have_failed_the_reason_of_most_is_told() -> None:
    reasons = ["odd", "loss is nan", "loss is nan"]
    with pytest.raises(UserError, match=r"^no trial has reached 1/9 of its steps: 2 of 3 failed with: loss is nan$"):
        rank_trials([replace(rung(trial, None), failed=reason) for trial, reason in enumerate(reasons)])


def run_all(sweep: Sweep, value_of: Any) -> list[list[int]]:
    """Do the rungs of a sweep in thought; return the trials' numbers by rung, and at last the winner's."""
    done: list[TrialResult] = []
    numbers = []
    while trials := plan_rung(sweep, BASE, "data", done):
        numbers.append([each.trial for each in trials])
        assert len({each.steps_divisor for each in trials}) == 1
        done += [replace(each, value=value_of(each)) for each in trials]
    return [*numbers, [pick_winner(done).trial]]


def test_the_rungs_of_27_trials() -> None:
    numbers = run_all(SWEEP, lambda each: abs(each.hp.learning_rate - 0.01))
    assert [len(each) for each in numbers] == [27, 9, 3, 1]
    for rung_before, following in pairwise(numbers):
        assert {*following} <= {*rung_before}
    drawn = plan_rung(SWEEP, BASE, "data", [])
    assert len({each.run for each in drawn}) == 27
    assert numbers[-1] == [min(drawn, key=lambda each: abs(each.hp.learning_rate - 0.01)).trial]


def test_the_rungs_of_tpe_begin_with_waves() -> None:
    pytest.importorskip("optuna")
    sweep = replace(SWEEP, sampler="tpe", trials=20, rungs=3)
    numbers = run_all(sweep, lambda each: abs(each.hp.learning_rate - 0.01))
    assert numbers[:3] == [[*range(9)], [*range(9, 18)], [18, 19]]
    assert [len(each) for each in numbers[3:]] == [6, 2, 1]
    assert len(numbers) - 1 == sweep.count_trial_groups()


def finish(folder: Path, value: float | None = 0.5) -> None:
    """Leave what a training leaves at the end of a rung."""
    (folder / "unfinished").mkdir(parents=True, exist_ok=True)
    (folder / "unfinished/rung.json").write_text(json.dumps({"step": 3, "value": value}))
    lines = [
        {**records(epochs=1, steps=27)[0], "measures": {"accuracy": "higher"}},
        {"kind": "evaluation", "epoch": 1, "step": 2, "validation_loss": 0.7, "validation_accuracy": 0.1},
    ]
    (folder / "unfinished/metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))


def test_a_stored_result_is_not_trained_again(tmp_path: Path) -> None:
    trial, calls = TrialResult(4, BASE, "data-model-1", 9), []

    def train(folder: Path) -> None:
        calls.append(folder)
        assert folder == tmp_path / "runs" / trial.run
        finish(folder)

    first = run_rung(trial, str(tmp_path / "sweeps"), train)
    assert (first.value, first.step, first.steps, first.failed) == (0.5, 3, 27, "")
    assert first.curve == [[2, 0.7], [3, 0.5]]
    other_number = replace(trial, trial=7)
    again = run_rung(other_number, str(tmp_path / "sweeps"), train)
    assert again == replace(first, trial=7)
    assert len(calls) == 1
    run_rung(replace(trial, steps_divisor=3), str(tmp_path / "sweeps"), train)
    assert len(calls) == 2, "another part of the run is another rung"


def test_a_value_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    hp = replace(BASE, select_by="accuracy")
    trial = replace(rung(0, None), hp=hp)
    found = run_rung(trial, str(tmp_path / "sweeps"), lambda folder: finish(folder, None))
    assert (found.value, found.failed) == (None, "accuracy is not a finite number on the validation split")


@pytest.mark.parametrize(
    "error",
    [
        UserError("lr is silly"),
        RankError("rank 0: ArithmeticError: no", details="a traceback"),
        OutOfMemoryError("rank 1 was killed by SIGKILL, as memory ran out", recoverable=True),
    ],
)
def test_a_trials_own_mistake_is_its_failure_and_is_not_stored(tmp_path: Path, error: Any) -> None:
    def fail(*_: object) -> None:
        raise error

    found = run_rung(rung(0, None), str(tmp_path / "sweeps"), fail)
    assert (found.value, found.failed) == (None, error.message)
    assert found.seconds > 0, "the page shows what it took"
    assert not (tmp_path / "sweeps").exists()


@pytest.mark.parametrize(
    "error",
    [
        RankLostError("killed", recoverable=True),
        UnreachableError("down"),
        BusyError("another run is writing into it"),
        StoppedError("SIGTERM"),
        KeyboardInterrupt(),
    ],
)
def test_a_failure_of_the_machine_is_raised(tmp_path: Path, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    with pytest.raises(type(error)):
        run_rung(rung(0, None), str(tmp_path / "sweeps"), fail)


def test_a_result_is_printed_as_a_runs_evaluation_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = TrialResult(0, replace(BASE, select_by="accuracy"), "run", 1)
    run_rung(trial, str(tmp_path / "sweeps"), lambda folder: finish(folder, 0.26))
    assert capsys.readouterr().out == "trial 0, all of its steps: validation accuracy 26.00 %\n"


@pytest.mark.slow
def test_trials_are_trained_and_one_fails(digits: Path, tmp_path: Path) -> None:
    """Real trainings of three rungs: the last value is what a direct run records; a trial that is too short fails."""
    hp = replace(BASE, epochs=1, keep="best")  # 27 steps
    good, short = TrialResult(0, hp, "good", 9), TrialResult(1, replace(hp, max_steps=8), "short", 9)

    def run(trial: TrialResult, steps_divisor: int) -> TrialResult:
        def train(folder: Path) -> None:
            run_training_fraction(trial.hp, digits, folder, steps_divisor, QUIET, threads=1)

        return run_rung(replace(trial, steps_divisor=steps_divisor), str(tmp_path / "sweeps"), train)

    failed = run(short, 9)
    assert (failed.value, failed.failed[:19]) == (None, "the run has 8 steps")
    done = [run(good, steps_divisor) for steps_divisor in (9, 3, 1)]
    assert [(each.step, each.steps, each.failed) for each in done] == [(3, 27, ""), (9, 27, ""), (27, 27, "")]
    assert rank_trials([failed, done[0]]) == [done[0]]
    records = [json.loads(line) for line in (tmp_path / "runs/good/metrics.jsonl").read_text().splitlines()]
    [evaluation] = [each for each in records if each["kind"] == "evaluation"]
    assert done[2].value == evaluation["validation_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("before", [3, 1])
def test_a_rungs_value_does_not_depend_on_what_was_trained_before(digits: Path, tmp_path: Path, before: int) -> None:
    """The run is beyond the rung, or even finished, when a sweep asks for the rung."""
    hp = replace(BASE, epochs=1)  # 27 steps
    trained = []

    def train(steps_divisor: int, folder: Path) -> None:
        trained.append(folder.name)
        run_training_fraction(hp, digits, folder, steps_divisor, QUIET, threads=1)

    alone = run_rung(TrialResult(0, hp, "alone", 9), str(tmp_path / "alone"), partial(train, 9))
    train(before, tmp_path / "runs/run")
    trained.clear()
    found = run_rung(TrialResult(0, hp, "run", 9), str(tmp_path / "sweeps"), partial(train, 9))
    assert (found.step, found.value, found.curve) == (3, alone.value, alone.curve)
    assert trained == ["run", "run-9"][before == 1 :]
    assert not (tmp_path / "runs/run-9").exists()
    finished = run_rung(TrialResult(0, hp, "run", 1), str(tmp_path / "sweeps"), partial(train, 1))
    assert finished.step == 27
    direct = run_training(hp, digits, tmp_path / "direct", QUIET, threads=1)
    assert (tmp_path / "runs/run/model.pt").read_bytes() == direct.model.read_bytes()


def test_a_trial_that_another_process_trains_has_not_failed(digits: Path, tmp_path: Path) -> None:
    with (
        lock_run_folder(tmp_path / "runs/run"),
        pytest.raises(BusyError, match=r"another run is writing into it"),
    ):
        run_rung(
            rung(0, None),
            str(tmp_path / "sweeps"),
            lambda folder: run_training_fraction(BASE, digits, folder, 9, QUIET),
        )
