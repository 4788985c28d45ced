"""What models may hold and do, what of it is refused or named in the notes, and how their runs end after a cut."""

import random
from dataclasses import replace
from pathlib import Path

import faults
import numpy as np
import pytest
import torch
import unusual_models
from stateful_steps import BASE, STEPS, after_steps, losses_of

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import RankError, UserError
from flyte_ddp.json_lines import read_records
from flyte_ddp.models.artifacts import load_model
from flyte_ddp.models.images import InputSpec, prepare_images
from flyte_ddp.run import Result, run_training
from flyte_ddp.settings import Settings
from flyte_ddp.training.train import evaluate_splits

pytestmark = pytest.mark.usefixtures("models_are_found")

QUIET = Settings(progress="off", wandb_mode="disabled")


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_models_may_keep_what_they_like(digits: Path, tmp_path: Path) -> None:
    hp = Hyperparameters(model="unusual_models:Unusual", epochs=2, batch_size=500, num_ranks=1)
    result = run_training(hp, digits, tmp_path / "run", QUIET)
    assert read_records(result.metrics)[-1]["notes"] == []
    model, sidecar = load_model(result.model, result.sidecar)
    assert sidecar["metrics"]["test_loss"] == pytest.approx(losses_of(model, digits).mean().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("model", "name"), [("grows", "bank"), ("registers", "late"), ("removes", "bank"), ("sets", "none")]
)
def test_registered_buffers_are_those_that_the_model_was_made_with(digits: Path, model: str, name: str) -> None:
    with pytest.raises(UserError, match=f"^buffer {name}: was registered, removed or resized"):
        after_steps(replace(BASE, model=f"stateful_models:{model}", num_ranks=1), digits)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("lazy", "has lazy layers: their sizes must be known"),
        ("sparse_embedding", "has layer 1 with sparse=True: .* leave sparse=False"),
        ("nothing_to_train", "has nothing to train"),
        ("no_parameters", "has nothing to train"),
        ("extra_numpy", r"has \{.*np\.float64\(1\.5\).*\} in _extra_state: torch.load\(weights_only"),
        ("in_a_dict", r"returned dict: it must return .* = \(\d+, 10\); return nothing but the logits"),
        ("four_dimensions", r"returned \(\d+, 10, 1, 1\): .*; flatten the logits of each sample"),
        ("whole_numbers", "returned torch.int64: it must return floating-point logits"),
        ("complex_numbers", "returned torch.complex64: it must return floating-point logits"),
        ("detached", "returned logits without a gradient: .* leave out detach, torch.no_grad, NumPy"),
    ],
)
def test_what_cannot_be_trained_is_refused(digits: Path, model: str, words: str) -> None:
    with pytest.raises(UserError, match=f"model 'unusual_models:{model}' {words}"):
        after_steps(replace(BASE, model=f"unusual_models:{model}", num_ranks=1), digits)


@pytest.mark.parametrize(
    ("model", "words"), [("pair_in_evaluation", "tuple"), ("three_classes_in_evaluation", r"\(\d+, 3\)")]
)
def test_the_output_must_fit_in_evaluation_too(digits: Path, model: str, words: str) -> None:
    state = after_steps(replace(BASE, model=f"unusual_models:{model}", num_ranks=1), digits)
    with pytest.raises(UserError, match=f"model 'unusual_models:{model}' returned .*{words}.*: it must return"):
        evaluate_splits(state)


def test_no_checkpoint_holds_what_cannot_be_loaded(digits: Path, tmp_path: Path) -> None:
    hp = Hyperparameters(model="unusual_models:ExtraNumpyLater", epochs=3, batch_size=100, num_ranks=1)
    for _ in range(2):  # the second time as well: it does not go on from a checkpoint
        with pytest.raises(UserError, match=r"has np\.float64\(1\.5\) in _extra_state: torch.load\(weights_only"):
            run_training(hp, digits, tmp_path / "run", replace(QUIET, checkpoint_seconds=0.01))
    assert not list((tmp_path / "run").rglob("*.ckpt"))


def test_what_the_optimiser_does_not_know_cannot_be_unfrozen(digits: Path, tmp_path: Path) -> None:
    hp = Hyperparameters(model="unusual_models:Thawing", epochs=1, batch_size=500, num_ranks=1)
    with pytest.raises(UserError, match=r"^parameter first\.weight: was frozen when the optimiser was made"):
        run_training(hp, digits, tmp_path / "run", QUIET)


@pytest.mark.parametrize("model", ["stateful_models:Unscaled", "unusual_models:OtherEachTime"])
def test_a_run_whose_file_gives_other_answers_is_not_finished(digits: Path, tmp_path: Path, model: str) -> None:
    hp = Hyperparameters(model=model, epochs=1, batch_size=500, num_ranks=1)
    with pytest.raises(UserError, match=rf"^model '{model}': its file does not hold all of it: a new model with "):
        run_training(hp, digits, tmp_path / "run", QUIET)
    left = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not left & {"model.pt", "model.json", "predictions.npz", "report.html"}


def test_classes_may_be_masked_by_infinite_logits(digits: Path, tmp_path: Path) -> None:
    hp = Hyperparameters(model="unusual_models:masked", epochs=2, batch_size=50, num_ranks=1)
    assert run_training(hp, digits, tmp_path / "run", QUIET).test_accuracy > 0.8


def cut_off_and_resumed(
    hp: Hyperparameters, digits: Path, folder: Path, patch: pytest.MonkeyPatch, at: int, resume_as: Hyperparameters
) -> tuple[Result, int, list[str]]:
    """Return the end of a run that an exception has cut off in a pass, the step it resumed after, and its notes."""
    fault = {"rank": hp.num_ranks - 1, "at": "training", "kind": "ArithmeticError", "pass": at}
    faults.inject(patch, folder / "marker", **fault)
    patch.setattr(faults, "FAULT", {**fault, "marker": folder / "marker"})  # where the rank is this process
    patch.setattr(faults, "passed", {})
    with pytest.raises(RankError):
        run_training(hp, digits, folder / "run", QUIET)
    result = run_training(resume_as, digits, folder / "run", QUIET)
    records = read_records(result.metrics)
    [_, step] = [record["resumed_after_step"] for record in records if record["kind"] == "start"]
    return result, step, list(records[-1]["notes"])


RUN = Hyperparameters(
    model="stateful_models:Centred", epochs=3, batch_size=100, num_ranks=2, precision="fp32", ema_decay=0.9, keep="ema"
)
ON_ONE = Hyperparameters(model="unusual_models:FrozenBody", epochs=3, batch_size=400, num_ranks=1)
CHANGES = [
    "The model changes centre, hidden, passes, replaced in",
    "hidden is not in the model's state_dict",
    "bit for bit",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hp", "words"),
    [
        (RUN, CHANGES),
        (replace(RUN, num_ranks=1, keep="last"), CHANGES),
        (replace(RUN, model="stateful_models:Noisy"), ["draws random numbers", "bit for bit"]),
        (replace(RUN, model="stateful_models:Twice"), ["bit for bit"]),
        (ON_ONE, ["bit for bit"]),  # what stays frozen: a retry makes the model anew, and does not load init_from again
        (replace(ON_ONE, model="unusual_models:Adapter"), ["bit for bit"]),
        (replace(ON_ONE, model="unusual_models:extra_tuple"), ["bit for bit"]),
        (replace(ON_ONE, model="unusual_models:Versioned", keep="best"), ["bit for bit"]),
        (replace(ON_ONE, model="unusual_models:Versioned", keep="ema", ema_decay=0.9), ["bit for bit"]),
    ],
    ids=lambda value: value.model if isinstance(value, Hyperparameters) else "",
)
def test_a_run_that_was_cut_off_ends_the_same(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hp: Hyperparameters, words: list[str]
) -> None:
    """In the middle of an epoch; and what is loaded is what was evaluated, whatever a state_dict holds or lacks."""
    if hp == ON_ONE:
        torch.save(unusual_models.FrozenBody().state_dict(), tmp_path / "init.pt")
        hp = replace(hp, init_from=str(tmp_path / "init.pt"))
    expected = run_training(hp, digits, tmp_path / "undisturbed", QUIET)
    at = 23 if hp.batch_size == 100 else 6
    result, step, notes = cut_off_and_resumed(hp, digits, tmp_path, monkeypatch, at, hp)
    assert step == at if hp.num_ranks == 1 else step > 14
    assert [word in note for word, note in zip(words, notes, strict=True)] == [True] * len(words), notes
    assert result.model.read_bytes() == expected.model.read_bytes()
    model, sidecar = load_model(result.model, result.sidecar)
    assert sidecar["metrics"]["test_loss"] == pytest.approx(losses_of(model, digits).mean().item(), abs=1e-6)


@pytest.mark.slow
def test_the_number_of_ranks_may_matter_more_than_rounding(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hp = replace(RUN, model="stateful_models:Noisy", num_ranks=1)
    *_, [*_, note] = cut_off_and_resumed(hp, digits, tmp_path, monkeypatch, 23, replace(hp, num_ranks=2))
    words = "but for what depends on the number of ranks, and up to rounding, because these changed: ranks 1, now 2"
    assert words in note


def test_the_average_of_an_integer_is_the_newest(digits: Path) -> None:
    hp = replace(BASE, model="user_models:batch_norm", num_ranks=1, ema_decay=0.9, keep="ema")
    state = after_steps(hp, digits)
    average = state.kept_model().state_dict()
    assert average["1.num_batches_tracked"] == state.model.state_dict()["1.num_batches_tracked"] > STEPS
    assert not torch.equal(average["1.running_mean"], state.model.state_dict()["1.running_mean"])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [8, 6])
def test_images_have_the_strides_of_a_new_tensor(channels: int, side: int) -> None:
    """Or `x.view(len(x), -1)` after a convolution fails."""
    images = torch.randint(0, 256, (5, 8, 8, channels), dtype=torch.uint8)
    batch = prepare_images(images, InputSpec(channels, side, side, (0.5,) * channels, (0.2,) * channels))
    assert batch.stride() == torch.empty(5, channels, side, side).stride()
    torch.nn.Conv2d(channels, 4, 3)(batch).view(5, -1)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("model", ["scripted", "InPlace"])
def test_what_plain_torch_takes(digits: Path, model: str) -> None:
    state = after_steps(replace(BASE, model=f"unusual_models:{model}", num_ranks=1, accumulation_steps=1), digits)
    evaluate_splits(state)


@pytest.mark.slow
def test_equal_runs_are_equal_whatever_a_model_draws_from(digits: Path, tmp_path: Path) -> None:
    """When it is made; the process that runs a single rank draws on as if nothing had been."""
    hp = Hyperparameters(model="unusual_models:Drawn", epochs=1, batch_size=500, num_ranks=1)
    results = []
    for number in (1, 2):
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        results.append(run_training(hp, digits, tmp_path / str(number), QUIET))
        assert random.random() == random.Random(number).random()
        assert np.random.random() == np.random.RandomState(number).random()  # noqa: NPY002
    assert results[0].model.read_bytes() == results[1].model.read_bytes()
