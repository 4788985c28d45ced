"""A run that was cut off goes on from its checkpoint, and ends as if nothing had happened, to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import numpy as np
import pytest
import torch

from flyte_ddp import checkpoint, sampling, train, training_state
from flyte_ddp.checkpoint import Identity
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import RankError, UserError
from flyte_ddp.run import OUTPUTS, Result, run_training
from flyte_ddp.settings import Settings
from flyte_ddp.tracking import read_metrics
from flyte_ddp.training_state import TrainingState

QUIET = Settings(progress="off", wandb_mode="disabled")
# 1,350 samples: 14 steps an epoch, the last one ragged. All that has a state of its own takes part.
BASE = Hyperparameters(
    model="faults:model",
    epochs=3,
    batch_size=100,
    accumulation_steps=2,
    num_ranks=2,
    precision="fp32",
    augment="crop",
    ema_decay=0.9,
    keep="best",
    schedule="cosine",
    log_interval=4,
)
OWN = Identity({"epochs": 1}, data="d", code="c", user_code="", initial_weights="")


@pytest.fixture(autouse=True)
def _user_models_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Hyperparameters], Result]:
    """Runs that came through, made once each."""
    made: dict[Hyperparameters, Result] = {}

    def run(hp: Hyperparameters) -> Result:
        if hp not in made:
            made[hp] = run_training(hp, digits, tmp_path_factory.mktemp("undisturbed") / "run", QUIET)
        return made[hp]

    return run


def weights(result: Result) -> dict[str, torch.Tensor]:
    return torch.load(result.model, weights_only=True)


def figures(result: Result) -> list[dict[str, Any]]:
    """The records, without those of time."""
    timed = ("time", "samples_per_second", "seconds", "notes")
    return [
        {key: value for key, value in record.items() if key not in timed}
        for record in read_metrics(result.metrics)
        if record["kind"] != "start"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        # Rank 0, which is still there, saves the last step that was finished, in the middle of an epoch.
        ({}, {"rank": 1, "at": "training", "pass": 42, "kind": "SIGKILL"}),
        ({"keep": "ema", "optimizer": "adamw", "learning_rate": 0.01}, {"rank": 1, "at": "training", "pass": 35}),
        ({"strategy": "ddp"}, {"rank": 1, "at": "evaluation", "pass": 1}),
        # Rank 0 itself: the end of the epoch before is what is left.
        ({}, {"rank": 0, "at": "training", "pass": 65}),
        ({"keep": "last"}, {"rank": 0, "at": "evaluation", "pass": 5}),
        ({}, {"rank": 0, "at": "checkpoint", "pass": 1}),
    ],
)
def test_the_retry_ends_bit_for_bit_like_a_run_that_came_through(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: Callable[[Hyperparameters], Result],
    change: dict[str, Any],
    fault: dict[str, Any],
) -> None:
    hp = replace(BASE, **change)
    expected = undisturbed(hp)
    faults.inject(monkeypatch, tmp_path / "marker", **{"kind": "SIGKILL", **fault})
    with pytest.raises(RankError, match=f"rank {fault['rank']} was killed by SIGKILL"):
        run_training(hp, digits, tmp_path / "run", QUIET)
    assert not [name for name in OUTPUTS if (tmp_path / "run" / name).exists()]
    assert not [*tmp_path.rglob("*.tmp")]
    retried = run_training(hp, digits, tmp_path / "run", QUIET)
    resumed = [record["resumed_after_step"] for record in read_metrics(retried.metrics) if record["kind"] == "start"]
    assert len(resumed) == 2
    assert resumed[1] > 0
    if fault["at"] == "training" and fault["rank"] == 1:
        assert resumed[1] == fault["pass"] // hp.accumulation_steps
    for name, value in weights(expected).items():
        assert torch.equal(value, weights(retried)[name]), name
    assert figures(retried) == figures(expected)
    assert f"went on from a checkpoint after step {resumed[1]};" in retried.report.read_text()
    assert not (tmp_path / "run" / checkpoint.FOLDER).exists()


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hp = replace(BASE, precision="fp64", keep="last")
    expected = run_training(replace(hp, num_ranks=1), digits, tmp_path / "one", QUIET)
    for ranks, passes in ((2, 42), (3, 30)):
        faults.inject(
            monkeypatch, tmp_path / f"marker{ranks}", rank=1, at="training", kind="SIGKILL", **{"pass": passes}
        )
        with pytest.raises(RankError, match="killed"):
            run_training(replace(hp, num_ranks=ranks), digits, tmp_path / "run", QUIET)
    result = run_training(replace(hp, num_ranks=1), digits, tmp_path / "run", QUIET)
    starts = [record for record in read_metrics(result.metrics) if record["kind"] == "start"]
    assert [start["resumed_after_step"] for start in starts] == [0, 21, 36]
    assert [start["num_ranks"] for start in starts] == [2, 3, 1]
    for name, value in weights(expected).items():
        torch.testing.assert_close(weights(result)[name], value, rtol=0, atol=1e-9)


def test_a_step_that_failed_half_way_is_not_saved(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ran out between the weights and their average, say: the end of the epoch before is what is left."""
    hp = replace(BASE, num_ranks=1, keep="last")
    expected = run_training(hp, digits, tmp_path / "undisturbed", QUIET)
    update = TrainingState.update_average

    def fail_in_step_20(state: TrainingState) -> None:
        if state.step == 19:
            raise MemoryError
        update(state)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "update_average", fail_in_step_20)
        with pytest.raises(RankError, match="MemoryError"):
            run_training(hp, digits, tmp_path / "run", QUIET)
    retried = run_training(hp, digits, tmp_path / "run", QUIET)
    assert [record["resumed_after_step"] for record in read_metrics(retried.metrics) if record["kind"] == "start"] == [
        0,
        14,
    ]
    assert all(torch.equal(value, weights(retried)[name]) for name, value in weights(expected).items())
    assert figures(retried) == figures(expected)


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (3, 1), (4, 3)])
def test_each_rank_knows_how_many_samples_it_has_trained_on(
    monkeypatch: pytest.MonkeyPatch, ranks: int, accumulation: int
) -> None:
    hp = replace(BASE, batch_size=10, accumulation_steps=accumulation)
    for module in (train, training_state):
        monkeypatch.setattr(module, "world_size", lambda: ranks)
    for rank, length in itertools.product(range(ranks), (5, 10, 47)):
        for module in (train, training_state):
            monkeypatch.setattr(module, "rank", lambda rank=rank: rank)
        batches = [*sampling.ListedOrder(np.arange(length, dtype=np.int32)).batches(0, 10)] * 3
        done = 0
        for step, batch in enumerate(batches):
            state: Any = SimpleNamespace(hp=hp, training=range(length), step=step)
            assert TrainingState.own_samples(state) == done
            done += sum(map(len, train.own_shares(batch, accumulation)))


def write(path: Path, step: int, identity: Identity = OWN) -> None:
    about = {"epoch": 0, "step": step, "num_ranks": [1], "time": 0.0}
    checkpoint.write(path, about, identity, b"metrics\n", lambda file: torch.save({"step": step}, file))


@pytest.mark.parametrize("damage", ["gone", "cut", "changed", "empty", "of another format"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    assert checkpoint.newest_of(tmp_path) is None
    paths = checkpoint.slots(tmp_path, None)
    for step in (1, 2, 3):
        write(next(paths), step)
    newest = checkpoint.newest_of(tmp_path)
    assert newest is not None
    assert (newest.step, newest.metrics, newest.identity) == (3, b"metrics\n", OWN)
    assert torch.load(checkpoint.state_in(newest), weights_only=True) == {"step": 3}
    content = newest.path.read_bytes()
    if damage == "gone":
        newest.path.unlink()
    else:
        middle = len(content) // 2
        newest.path.write_bytes(
            {
                "cut": content[:-1],
                "changed": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
                "empty": b"",
                "of another format": content.replace(b"checkpoint/1", b"checkpoint/9"),
            }[damage]
        )
    before = checkpoint.newest_of(tmp_path)
    assert before is not None
    assert before.step == 2
    assert next(checkpoint.slots(tmp_path, before.path)) == newest.path, "the good one stays until there is another"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(OWN, hyperparameters={"epochs": 2}), "epochs=1, now 2"),
        (replace(OWN, hyperparameters={"epochs": 1, "seed": 0}), "seed=None, now 0"),
        (replace(OWN, data="e"), "other data (d, now e)"),
        (replace(OWN, code="e"), "other code of flyte_ddp (c, now e)"),
        (replace(OWN, user_code="e"), "other code of the model (, now e)"),
        (replace(OWN, initial_weights="e"), "other initial weights (, now e)"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, other: Identity, words: str) -> None:
    write(tmp_path / "a.ckpt", 1)
    found = checkpoint.newest_of(tmp_path)
    assert found is not None
    checkpoint.check_belongs(found, OWN)
    with pytest.raises(UserError) as caught:
        checkpoint.check_belongs(found, other)
    assert words in caught.value.message
    assert str(tmp_path) in caught.value.message
    assert "delete it to begin anew" in caught.value.message


def test_the_number_of_ranks_does_not_make_another_run() -> None:
    one, two = (checkpoint.identity(replace(BASE, num_ranks=ranks), data="d", code="c") for ranks in (1, 2))
    assert one == two != checkpoint.identity(replace(BASE, seed=1), data="d", code="c")


@pytest.mark.slow
def test_nothing_is_replayed(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry does the steps that are left, and no more."""
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="SIGKILL", **{"pass": 80})
    with pytest.raises(RankError):
        run_training(BASE, digits, tmp_path / "run", QUIET)
    # 2 steps of 2 passes are left: a fifth would kill it.
    faults.inject(monkeypatch, tmp_path / "another", rank=1, at="training", kind="SIGKILL", **{"pass": 4})
    result = run_training(BASE, digits, tmp_path / "run", QUIET)
    assert np.isfinite(result.test_accuracy)
