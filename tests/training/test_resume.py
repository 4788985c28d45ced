"""A run that was cut off goes on from its checkpoint, and ends as if nothing had happened, to the last bit."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from training_runs import QUIET, Train, notes, resumed_steps, train_in, weights

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import Arithmetic, Checkpoint, Identity
from flyte_ddp.core.runs.run_folder import OUTPUTS, UNFINISHED
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.core.training.training_state import TrainingState
from flyte_ddp.plans.identity import checkpoint_identity
from flyte_ddp.run import Result, run_training

# 1,350 samples: 14 steps an epoch, the last one ragged. All that has a state of its own takes part.
BASE = Hyperparameters(model="faults:model", epochs=2, batch_size=100, accumulation_steps=2, num_ranks=2)
BASE = replace(BASE, log_interval=4, precision="fp32", augment="crop", ema_decay=0.9, keep="ema", schedule="cosine")
BASE = replace(BASE, optimizer="adamw", learning_rate=0.01)
PLAIN = Arithmetic(1, "some CPU", "fp32", threads=1, channels_last="off", strategy="")
THREADS = "threads of each rank 1, now 2"
OWN = Identity({"epochs": 1}, data="d", code="c", user_code="", initial_weights="", releases="torch 2")

pytestmark = pytest.mark.usefixtures("user_models")


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs that came through, made once each."""
    return cache(lambda hp: train_in(tmp_path_factory.mktemp("undisturbed") / "run", hp, digits))


def figures(result: Result) -> list[dict[str, Any]]:
    """The records, without those of time."""
    timed = ("time", "samples_per_second", "seconds", "notes")
    return [
        {key: value for key, value in record.items() if key not in timed}
        for record in read_records(result.metrics)
        if record["kind"] != "start"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        # Rank 0, which is still there, saves the last step that was finished, in the middle of an epoch.
        {"rank": 1, "at": "training", "pass": 35},
        {"rank": 0, "at": "checkpoint", "pass": 1},
        {"rank": 0, "at": "results", "pass": 0},
    ],
)
def test_the_retry_ends_bit_for_bit_like_a_run_that_came_through(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Train, fault: dict
) -> None:
    hp = BASE
    expected = undisturbed(hp)
    faults.inject(monkeypatch, tmp_path / "marker", kind="SIGKILL", **fault)
    with pytest.raises(RankError, match=f"rank {fault['rank']} was killed by SIGKILL"):
        train(hp)
    assert not [name for name in OUTPUTS if (tmp_path / "run" / name).exists()]
    assert not [*tmp_path.rglob("*.tmp")]
    retried = train(hp)
    _, resumed = resumed_steps(retried)
    assert resumed > 0
    if fault["at"] == "training" and fault["rank"] == 1:
        assert resumed == fault["pass"] // hp.accumulation_steps
    assert retried.model.read_bytes() == expected.model.read_bytes()
    assert figures(retried) == figures(expected)
    assert f"resumed from a checkpoint after step {resumed}." in retried.report.read_text()
    assert not (tmp_path / "run" / UNFINISHED).exists()


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(train: Train, digits: Path, tmp_path, monkeypatch) -> None:
    hp = replace(BASE, precision="fp64", channels_last="off", keep="last", optimizer="sgd")
    expected = train(replace(hp, num_ranks=1), "one")
    fault = {"rank": 1, "at": "training", "kind": "SIGKILL", "pass": 42}
    faults.inject(monkeypatch, tmp_path / "marker", **fault)
    with pytest.raises(RankError, match="killed"):
        train(hp)
    result = run_training(replace(hp, num_ranks=1), digits, tmp_path / "run", QUIET, threads=2)
    assert resumed_steps(result) == [0, 21]
    assert "after step 21; since then these changed: ranks 2, now 1; " in went_on(result)
    assert "threads of each rank 1, now 2" in went_on(result)
    found = weights(result)
    for name, value in weights(expected).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)


def went_on(result: Result) -> str:
    (note,) = (note for note in notes(result) if "resumed from a checkpoint" in note)
    return str(note)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ([replace(PLAIN, num_ranks=2, strategy="ddp")], PLAIN, "ranks 2, now 1"),
        ([PLAIN, replace(PLAIN, precision="bf16")], PLAIN, "precision fp32 and bf16, now fp32"),
        ([PLAIN], replace(PLAIN, threads=2, channels_last="on"), f"{THREADS}; channels last off, now on"),
    ],
)
def test_what_changed_is_named(before: list[Arithmetic], now: Arithmetic, words: str) -> None:
    assert now.describe_changes(before) == words


@pytest.mark.slow
def test_a_step_that_failed_half_way_is_not_saved(train: Train, monkeypatch, undisturbed: Train) -> None:
    """Memory ran out between the weights and their average, say: the end of the epoch before is what is left."""
    hp = replace(BASE, model="small_cnn", num_ranks=1, keep="last")
    expected = undisturbed(hp)
    update = TrainingState.update_average

    def fail_in_step_20(state: TrainingState) -> None:
        if state.step == 19:
            raise MemoryError
        update(state)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "update_average", fail_in_step_20)
        with pytest.raises(RankError, match="MemoryError"):
            train(hp)
    retried = train(hp)
    assert resumed_steps(retried) == [0, 14]
    assert retried.model.read_bytes() == expected.model.read_bytes()
    assert figures(retried) == figures(expected)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["ema", "best"])
def test_training_keeps_no_checkpoint_in_use(train: Train, monkeypatch: pytest.MonkeyPatch, keep: str) -> None:
    """Tensors that are mapped from a checkpoint would keep its place on the disk when newer ones replace it."""
    hp = replace(BASE, num_ranks=1, keep=keep)
    mapped, update = list[bool](), TrainingState.update_average

    def fail_in_step_20(state: TrainingState) -> None:
        mapped.append(".ckpt" in Path("/proc/self/maps").read_text())
        if len(mapped) == 20:
            raise MemoryError
        update(state)

    monkeypatch.setattr(TrainingState, "update_average", fail_in_step_20)
    with pytest.raises(RankError, match="MemoryError"):
        train(hp)
    assert resumed_steps(train(hp)) == [0, 14]
    assert mapped == [False] * (20 + 14)


def write(path: Path, step: int) -> None:
    new = Checkpoint(0, step, (PLAIN,), 0.0, OWN, path, b"metrics\n")
    checkpoint.write_checkpoint(new, {"step": step})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hyperparameters": {"epochs": 2}}, "epochs=1, now 2"),
        ({"data": "e"}, "different data (d, now e)"),
        ({"user_code": "e"}, "different user code (, now e)"),
        ({"releases": "torch 3"}, "different releases (torch 2, now torch 3)"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write(tmp_path / "a.ckpt", 1)
    found = checkpoint.find_newest_checkpoint(tmp_path)[0]
    checkpoint.check_same_run(found, OWN)
    with pytest.raises(UserError) as caught:
        checkpoint.check_same_run(found, replace(OWN, **change))
    for each in (words, str(tmp_path), f"delete {tmp_path}/*.ckpt to restart from scratch"):
        assert each in caught.value.message


def test_the_number_of_ranks_does_not_make_another_run(digits: Path) -> None:
    one, two = (checkpoint_identity(replace(BASE, num_ranks=ranks), digits) for ranks in (1, 2))
    assert one == two != checkpoint_identity(replace(BASE, seed=1), digits)
