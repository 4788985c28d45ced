"""Models that run blocks again, change buffers, draw, or hold what few do: on ranks as in one process, and resumed."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import faults
import numpy as np
import parallel_models
import pytest
import stateful_models
import torch
import unusual_models
from plain_loop import arrays_in_fp64, plain_steps
from ranks import run_ranks
from states import make_state
from torch import Tensor
from torch.nn import functional
from training_runs import Train

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.core.models import state_dicts
from flyte_ddp.core.order import sampling
from flyte_ddp.core.parallel.distributed import rank, world_size
from flyte_ddp.core.parallel.training_pass import PASSES_WATCHED, THEN_EVERY, TrainingPass
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.core.training.evaluate import Evaluation
from flyte_ddp.core.training.optimisation import MovingAverage
from flyte_ddp.core.training.train import apply_gradients, compute_gradients, evaluate_splits
from flyte_ddp.core.training.training_state import TrainingState
from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.models.artifacts import load_model
from flyte_ddp.plans.resolve import detect_hardware
from flyte_ddp.run import Result

pytestmark = pytest.mark.usefixtures("user_models")
Resume = Callable[[Hyperparameters, Hyperparameters], tuple[Result, int, list[str]]]
STEPS = 4
NUMBER = re.escape(repr(np.float64(1.5)))
# 13 samples a batch in 3 parts: of a part of 4 or 5 on 3 ranks all have some; the last batch of 105 is one sample.
BASE = Hyperparameters(
    validation_fraction=0.93, epochs=100, batch_size=13, accumulation_steps=3, precision="fp64", backend="gloo"
)
ON_ONE = Hyperparameters(model="unusual_models:FrozenBody", epochs=2, batch_size=400, num_ranks=1)


def first_batches(order: sampling.Order) -> list[sampling.Indices]:
    """Return the batches of an epoch, the last two first."""
    batches = [*order.batches(0, BASE.batch_size)]
    return [*batches[-2:], *batches[: STEPS - 2]]


def new_state(hp: Hyperparameters, data: Path) -> TrainingState:
    return make_state(hp, detect_hardware(hp), open_arrays(data))


def evaluate_both(state: TrainingState) -> tuple[Evaluation, ...]:
    return evaluate_splits(state, state.validation, state.test)


def after_steps(hp: Hyperparameters, data: Path) -> TrainingState:
    state = new_state(hp, data)
    for batch in first_batches(state.training.order):
        compute_gradients(state, batch)
        apply_gradients(state)
    return state


def losses_of(model: torch.nn.Module, data: Path) -> Tensor:
    """Return the loss of each test image."""
    images, labels = arrays_in_fp64(data, "test")
    with torch.no_grad():
        logits = model(images.to(next(model.parameters()).dtype)).double()
    return functional.cross_entropy(logits, labels, reduction="none")


MODELS = (
    *(f"{layers}_{name}" for layers in ("dropout", "batch_norm") for name in ("reentrant", "nested", "sequential")),
    *("Tutorials", "Complex", "Penalised"),
)


def strategies_for(model: str) -> tuple[str, ...]:
    """All where a strategy may matter: for gradients in another order, that come again, or not from the loss."""
    if model == "dropout_reentrant":  # which DDP refuses
        return ("shared_memory", "hooks")
    return ("shared_memory", "ddp", "hooks") if model in ("Complex", "Penalised") else ("shared_memory",)


def weights_in_ranks(folder: Path) -> None:
    """Leave the weights of each model and strategy, from rank 0."""
    for model in MODELS:
        for strategy in strategies_for(model):
            hp = replace(BASE, model=f"parallel_models:{model}", strategy=strategy, num_ranks=world_size())
            weights = after_steps(hp, folder / "digits").model.state_dict()
            if rank() == 0:
                torch.save(weights, folder / f"{model}-{strategy}.pt")


@pytest.mark.slow
def test_ranks_compute_what_one_process_would(tmp_path: Path) -> None:
    """Of dropout the reference keeps all activations, as autograd does by itself; else it is torch's own layers."""
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(weights_in_ranks, tmp_path, 2) == [0, 0]
    dropped = after_steps(replace(BASE, model="parallel_models:dropout_plain", num_ranks=1), data).model.state_dict()
    paths = sorted(tmp_path.glob("*.pt"))
    assert len(paths) == sum(len(strategies_for(model)) for model in MODELS)
    for model, of_strategies in groupby(paths, lambda path: path.stem.rpartition("-")[0]):
        expected = dropped if model.startswith("dropout") else plain_loop(model, data)
        for path in of_strategies:
            for name, value in torch.load(path).items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=f"{path.name} {name}")


def test_blocks_that_are_run_again_drop_the_same_on_one_rank(digits: Path) -> None:
    expected = after_steps(replace(BASE, model="parallel_models:dropout_plain", num_ranks=1), digits).model.state_dict()
    for run in parallel_models.RUNS:
        state = after_steps(replace(BASE, model=f"parallel_models:dropout_{run}", num_ranks=1), digits)
        for name, value in state.model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=f"{run} {name}")
        assert not state.this_pass.model_draws


ONE_SAMPLE = replace(BASE, model="user_models:batch_norm", sync_batchnorm=False, validation_fraction=0.9993)


def evaluations_in_ranks(folder: Path) -> None:
    """Leaves what rank 0 has, of a model that changes its buffers and of one that draws in evaluations."""
    data, hp = folder / "digits", replace(BASE, num_ranks=2, test_batch_size=60)
    centred = after_steps(replace(hp, model="stateful_models:Centred"), data)
    _, test = evaluate_both(centred)
    uncertain = after_steps(replace(hp, model="stateful_models:Uncertain"), data)
    losses = [evaluate_both(uncertain)[1].columns["loss"] for _ in range(2)]
    of_one_sample = after_steps(replace(ONE_SAMPLE, num_ranks=2), data)
    evaluate_both(of_one_sample)
    left = (
        centred.model.state_dict(),
        centred.model.hidden,
        test.columns["loss"],
        losses,
        of_one_sample.model.state_dict(),
    )
    torch.save(left, folder / f"rank-{rank()}.pt")
    with pytest.raises(UserError, match="different BatchNorm layers"):
        after_steps(replace(hp, model="parallel_models:LeavesOut", strategy="shared_memory"), data)


@pytest.mark.slow
def test_all_ranks_have_the_buffers_of_rank_0_and_evaluate_what_is_saved(tmp_path: Path) -> None:
    """And ranks at different layers do not mix the statistics of BatchNorm."""
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(evaluations_in_ranks, tmp_path, 2) == [0, 0]
    left, other = (torch.load(tmp_path / f"rank-{at}.pt") for at in (0, 1))
    weights, hidden, losses, [uncertain, again], of_one_sample = left
    assert hidden.any(), "an evaluation leaves no trace in what no file holds"
    assert torch.equal(hidden, other[1])
    assert all(torch.equal(value, other[0][name]) for name, value in weights.items())
    assert weights["passes"].item() == STEPS * BASE.accumulation_steps - 2, "the batch of one sample has one part"
    model = stateful_models.Centred().double().eval()
    model.load_state_dict(weights)
    torch.testing.assert_close(losses, losses_of(model, data), rtol=0, atol=1e-9)
    assert torch.equal(uncertain, again)
    hp = replace(BASE, model="stateful_models:Uncertain", num_ranks=1, test_batch_size=60)
    _, of_one_rank = evaluate_both(after_steps(hp, data))
    torch.testing.assert_close(uncertain, of_one_rank.columns["loss"], rtol=0, atol=1e-9)
    alone = after_steps(replace(ONE_SAMPLE, num_ranks=1), data).model.state_dict()
    for name, value in of_one_sample.items():  # a rank that never had a sample counts for nothing
        torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-9, msg=name)


def plain_loop(name: str, data: Path) -> dict[str, Tensor]:
    """One process, and of the library only the order of samples."""
    images, labels = arrays_in_fp64(data, "train")
    torch.manual_seed(BASE.seed)
    model = getattr(parallel_models, name)().double()
    training, _ = sampling.split_indices(len(labels), BASE.validation_fraction, BASE.seed)
    total = BASE.epochs * sampling.steps_per_epoch(len(training), BASE.batch_size)
    batches = first_batches(sampling.ListedOrder(training, BASE.seed))
    rates = [BASE.learning_rate * (step + 1) / (total // 4 + 1) for step in range(len(batches))]
    for _ in plain_steps(BASE, model, images, labels, batches, rates.__getitem__):
        pass
    return model.state_dict()


def test_an_evaluation_that_fails_leaves_no_trace(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hp = replace(BASE, model="stateful_models:Centred", num_ranks=1, ema_decay=0.9, keep="ema")
    state = after_steps(hp, digits)
    predict = state.predict

    def predict_and_fail(images: Tensor, targets: Tensor, samples: int) -> Tensor:
        predict(images, targets, samples)
        raise ArithmeticError

    before = {name: value.clone() for name, value in state.kept_model().named_buffers()}
    monkeypatch.setattr(state, "predict", predict_and_fail)
    with pytest.raises(ArithmeticError):
        evaluate_both(state)
    assert state.kept_model().training
    assert before["hidden"].any(), "which an evaluation takes from a new model"
    assert all(torch.equal(value, before[name]) for name, value in state.kept_model().named_buffers())


def test_draws_that_begin_late_are_noticed_within_ten_passes() -> None:
    """Also between those of an own optimiser, which are no passes of the model."""
    this_pass = TrainingPass()
    for number in range(PASSES_WATCHED + THEN_EVERY):
        this_pass.begin_pass(1, 0, np.arange(1), torch.device("cpu"))
        this_pass.begin_pass(0, 0, np.arange(number, number + 2), torch.device("cpu"))
        if number >= PASSES_WATCHED:
            np.random.random_sample()  # noqa: NPY002
        this_pass.finish_pass()
        assert not this_pass.model_draws or number >= PASSES_WATCHED
    assert this_pass.model_draws


def test_a_model_is_made_the_same_whatever_it_draws_from(digits: Path) -> None:
    states = []
    for number in (1, 2):
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        states.append(new_state(replace(ON_ONE, model="unusual_models:Drawn"), digits).model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


class Tied(torch.nn.Linear):
    """Has one tensor as two buffers, until one of them is replaced."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        counts = torch.zeros(2)
        self.register_buffer("first", counts)
        self.register_buffer("second", counts)
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))


def test_the_moving_average_is_torchs_also_of_buffers_that_are_replaced() -> None:
    model, average = Tied(), MovingAverage(Tied(), 0.9)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(3):
        with torch.no_grad():
            model.weight += step
        model.first = model.first + 1
        model.number += 1
        average.update_parameters(model)
        for name, value in model.state_dict().items():
            mean = expected[name]
            expected[name] = torch.lerp(mean, value, 0.1) if step and value.is_floating_point() else value.clone()
    found = average.module.state_dict()
    for name in ("weight", "bias", "number"):
        assert torch.equal(found[name], expected[name]), name
    assert found["first"].tolist() == expected["first"].tolist()


@pytest.mark.parametrize(("model", "name"), [("grows", "bank"), ("registers", "late")])
def test_registered_buffers_are_those_that_the_model_was_made_with(digits: Path, model: str, name: str) -> None:
    with pytest.raises(UserError, match=f"^buffer {name}: was registered, removed or resized"):
        after_steps(replace(BASE, model=f"stateful_models:{model}", num_ranks=1), digits)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("extra_numpy", rf"has \{{.*{NUMBER}.*\}} in _extra_state.* torch.load\(weights_only"),
        ("in_a_dict", r"returned dict: must return .* = \(\d+, 10\); return only the logits"),
        ("three_classes_in_evaluation", r"returned \(\d+, 3\): must return"),
    ],
)
def test_what_cannot_be_trained_is_refused(digits: Path, model: str, words: str) -> None:
    with pytest.raises(UserError, match=f"model 'unusual_models:{model}' {words}"):
        evaluate_both(after_steps(replace(BASE, model=f"unusual_models:{model}", num_ranks=1), digits))


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_go_by_the_samples_of_a_rank_are_refused_on_several(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2, **options))
    state_dicts.check_layers_and_state_dict("mine", model)
    monkeypatch.setattr(state_dicts, "world_size", lambda: 2)
    with pytest.raises(UserError, match="has layer 0 with max_norm or scale_grad_by_freq"):
        state_dicts.check_layers_and_state_dict("mine", model)


def test_no_checkpoint_holds_what_cannot_be_loaded(train: Train, tmp_path: Path) -> None:
    for _ in range(2):  # the second time as well: it does not go on from a checkpoint
        with pytest.raises(UserError, match=rf"has {NUMBER} in _extra_state.* torch.load\(weights_only"):
            train(replace(ON_ONE, model="unusual_models:ExtraNumpyLater", batch_size=100), checkpoint_seconds=0.01)
    assert not list((tmp_path / "run").rglob("*.ckpt"))


def all_parameters(model: torch.nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), hp.learning_rate)


@pytest.mark.parametrize(("optimizer", "ranks"), [("sgd", 1), ("test_stateful_models:all_parameters", 2)])
def test_what_is_frozen_at_first_cannot_be_trained_later(train: Train, optimizer: str, ranks: int) -> None:
    """Also if an own optimiser knows it: ranks exchange no gradients of it."""
    hp = replace(ON_ONE, model="unusual_models:Thawing", optimizer=optimizer, num_ranks=ranks, momentum=0.9, epochs=1)
    with pytest.raises(UserError, match=r"^parameter first\.weight: was frozen or missing when the optimiser"):
        train(hp)


def test_what_is_thawed_is_refused_in_the_same_step(digits: Path) -> None:
    """Ranks would train it apart until the end of the epoch."""
    state = new_state(ON_ONE, digits)
    next(iter(state.frozen.values())).requires_grad_(True)
    with pytest.raises(UserError, match="was frozen or missing when the optimiser was created"):
        compute_gradients(state, next(state.training.order.batches(0, ON_ONE.batch_size)))


@pytest.mark.parametrize("model", ["stateful_models:Unscaled", "unusual_models:OtherEachTime"])
def test_a_run_whose_file_gives_other_answers_is_not_finished(train: Train, tmp_path: Path, model: str) -> None:
    with pytest.raises(UserError, match=rf"^model '{model}': the state_dict is incomplete: a new model with "):
        train(replace(ON_ONE, model=model, epochs=1))
    left = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not left & {"model.pt", "model.json", "predictions.npz", "report.html"}


@pytest.fixture
def cut_off_and_resume(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resume:
    """Return a function that cuts a run off at AT, and returns the retry, the step it resumed after, and its notes."""

    def run(hp: Hyperparameters, resume_as: Hyperparameters) -> tuple[Result, int, list[str]]:
        fault = {"rank": hp.num_ranks - 1, "at": "training", "kind": "ArithmeticError", "pass": AT[hp.batch_size]}
        faults.inject(monkeypatch, tmp_path / "marker", **fault)
        monkeypatch.setattr(faults, "FAULT", {**fault, "marker": tmp_path / "marker"})  # where this process is the rank
        monkeypatch.setattr(faults, "passed", {})
        with pytest.raises(RankError):
            train(hp)
        result = train(resume_as)
        records = read_records(result.metrics)
        [_, step] = [record["resumed_after_step"] for record in records if record["kind"] == "start"]
        return result, step, list(records[-1]["notes"])

    return run


AT = {100: 23, 400: 6}  # passes before the cut by size of the batch: in the middle of the second epoch
RUN = Hyperparameters(
    model="stateful_models:Centred", epochs=2, batch_size=100, num_ranks=2, precision="fp32", ema_decay=0.9, keep="ema"
)
CHANGES = [
    "The model changes centre, hidden, passes, replaced in",
    "hidden is not in the state_dict",
    "The run resumed from a checkpoint",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hp", "words"),
    [
        (RUN, CHANGES),
        (replace(RUN, model="stateful_models:Noisy", num_ranks=1), ["draws random numbers", "resumed from"]),
        (ON_ONE, ["resumed from"]),  # a retry makes what is frozen anew, and does not load init_from again
    ],
    ids=lambda value: value.model if isinstance(value, Hyperparameters) else "",
)
def test_a_run_that_was_cut_off_ends_the_same(
    train: Train, cut_off_and_resume: Resume, digits: Path, tmp_path: Path, hp: Hyperparameters, words: list[str]
) -> None:
    """In the middle of an epoch; and what is loaded is what was evaluated, whatever a state_dict holds or lacks."""
    if hp == ON_ONE:
        torch.save(unusual_models.FrozenBody().state_dict(), tmp_path / "init.pt")
        hp = replace(hp, init_from=str(tmp_path / "init.pt"))
    expected = train(hp, "undisturbed")
    result, step, notes = cut_off_and_resume(hp, hp)
    assert step == AT[hp.batch_size] if hp.num_ranks == 1 else step > 14
    assert [word in note for word, note in zip(words, notes, strict=True)] == [True] * len(words), notes
    assert result.model.read_bytes() == expected.model.read_bytes()
    model, sidecar = load_model(result.model, result.sidecar)
    assert sidecar.metrics.test["loss"] == pytest.approx(losses_of(model, digits).mean().item(), abs=1e-6)
