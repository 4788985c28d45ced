"""Optimisers, schedules and frozen parts of the user's: N ranks compute what a plain loop of torch would."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import own_training
import pytest
import torch
from cli import HELPERS
from plain_loop import arrays_in_fp64
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional
from training_runs import Train, cut_off, train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.errors import UserError
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.json_lines import read_records
from flyte_ddp.models import zoo
from flyte_ddp.models.images import InputSpec
from flyte_ddp.order import sampling
from flyte_ddp.parallel.distributed import rank
from flyte_ddp.run import Result
from flyte_ddp.training.diagnosis import LossWatch
from flyte_ddp.training.train import apply_gradients, compute_gradients
from flyte_ddp.training.training_state import TrainingState

pytestmark = pytest.mark.usefixtures("user_models")

STEPS = 12
BASE = Hyperparameters(model="user_models:batch_norm", epochs=1000, max_steps=STEPS, precision="fp64", backend="gloo")
BASE = replace(BASE, validation_fraction=0.93, batch_size=26, learning_rate=0.01)  # 105 samples, in steps of 26 and 1
STRATEGIES = {1: ("shared_memory",), 2: ("shared_memory",), 3: ("shared_memory", "ddp", "hooks")}
Factor = Callable[[int], float]


class Case(NamedTuple):
    """A run, and how one would write its optimiser and schedule by hand."""

    hp: Hyperparameters
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    factor: Factor
    frozen: tuple[int, ...] = ()  # layers
    tolerance: float = 1e-9


def cosine(step: int) -> float:
    return (1 + np.cos(np.pi * step / STEPS)) / 2


def own_groups(model: nn.Module) -> torch.optim.Optimizer:
    conv, norm, _, linear = model.children()
    slow = {"params": [conv.weight, conv.bias], "lr": 0.001, "weight_decay": 0.0}
    fast = {"params": [norm.weight, norm.bias, linear.weight, linear.bias]}
    return torch.optim.AdamW([slow, fast], lr=0.01, weight_decay=0.1)


def decayed_matrices(kind: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        conv, norm, _, linear = model.children()
        matrices = {"params": [conv.weight, linear.weight], "weight_decay": 0.1}
        return kind([matrices, {"params": [conv.bias, norm.weight, norm.bias, linear.bias]}], lr=0.01, **options)

    return make


def trained(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)


OWN = {"optimizer": "own_training:two_groups", "schedule": "own_training:square"}
COSINE = replace(BASE, schedule="cosine")
NO_DECAY = replace(COSINE, decay_norms=False, weight_decay=0.1)
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
CASES = {
    "own": Case(replace(BASE, **OWN), own_groups, lambda step: (1 - step / STEPS) ** 2),
    "own, in parts": Case(replace(BASE, **OWN, accumulation_steps=3), own_groups, lambda step: (1 - step / STEPS) ** 2),
    "sgd": Case(NO_DECAY, decayed_matrices(SGD, momentum=0.9, nesterov=True, weight_decay=0.0), cosine),
    # AdamW divides the gradient of the convolution's bias, which is rounding alone before BatchNorm, by 1e-8.
    "adamw": Case(
        replace(NO_DECAY, optimizer="adamw"), decayed_matrices(ADAMW, weight_decay=0.0), cosine, tolerance=1e-8
    ),
    "frozen convolution": Case(replace(COSINE, freeze="0"), trained, cosine, frozen=(0,)),
    "frozen normalisation": Case(replace(COSINE, freeze=" 1 ,"), trained, cosine, frozen=(1,)),
    "frozen but the head": Case(replace(COSINE, freeze="0,1"), trained, cosine, frozen=(0, 1)),
}


def first_batches(hp: Hyperparameters, samples: sampling.Indices) -> Iterator[sampling.Indices]:
    order = sampling.ListedOrder(samples, hp.seed)
    return islice((batch for epoch in count() for batch in order.batches(epoch, hp.batch_size)), STEPS)


def train_in_ranks(folder: Path) -> None:
    """Leave, from rank 0, every case's tensors after each step."""
    arrays = open_arrays(folder / "digits")
    ranks = torch.distributed.get_world_size()
    for number, case in enumerate(CASES.values()):
        for strategy in STRATEGIES[ranks]:
            hp = replace(case.hp, strategy=strategy, num_ranks=ranks)
            state, states = TrainingState(hp, detect_hardware(hp), arrays, None), []
            for batch in first_batches(hp, state.training.order.samples(slice(None))):
                compute_gradients(state, batch)
                apply_gradients(state)
                states.append({key: value.clone() for key, value in state.model.state_dict().items()})
            if rank() == 0:
                torch.save(states, folder / f"{number}-{strategy}.pt")


def plain_loop(case: Case, data: Path) -> list[dict[str, Tensor]]:
    """One process, torch's own layers and optimisers; of the library only the order of samples and the model."""
    torch.manual_seed(case.hp.seed)
    arrays = open_arrays(data)
    model = zoo.build_model(case.hp.model, 10, InputSpec(1, 8, 8, arrays.mean, arrays.std)).double()
    images, labels = arrays_in_fp64(data, "train")
    samples, _ = sampling.split_indices(len(labels), case.hp.validation_fraction, case.hp.seed)
    for number in case.frozen:
        model[number].requires_grad_(False).eval()
    optimizer, states = case.optimizer(model), []
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, batch in enumerate(first_batches(case.hp, samples)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * case.factor(step)
        optimizer.zero_grad()
        for part in np.array_split(batch, case.hp.accumulation_steps):
            if len(part):
                (functional.cross_entropy(model(images[part]), labels[part], reduction="sum") / len(batch)).backward()
        optimizer.step()
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    return states


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (1, 3))])
def test_every_step_of_any_number_of_ranks_is_that_of_a_plain_loop(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HELPERS)
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(train_in_ranks, tmp_path, ranks) == [0] * ranks
    for number, case in enumerate(CASES.values()):
        expected = plain_loop(case, data)
        for strategy in STRATEGIES[ranks]:
            for state, other in zip(torch.load(tmp_path / f"{number}-{strategy}.pt"), expected, strict=True):
                torch.testing.assert_close(state, other, rtol=0, atol=case.tolerance)


SMALL = replace(BASE, max_steps=8, num_ranks=1, epochs=2, precision="fp32", keep="ema", ema_decay=0.5)


def weights(result: Result) -> dict[str, Tensor]:
    return torch.load(result.model, weights_only=True)


@pytest.mark.parametrize("at", [1, 6])
@pytest.mark.parametrize("optimizer", ["precise", "two_groups", "counting_steps"])
def test_state_and_groups_survive_a_resume_bit_for_bit(
    train: Train, tmp_path: Path, digits: Path, optimizer: str, at: int
) -> None:
    """After the first step, and in the middle of the second epoch; the state has other types than the parameters."""
    hp = replace(SMALL, optimizer=f"own_training:{optimizer}", schedule="own_training:square", log_interval=1)
    expected = train_in(tmp_path / "undisturbed", hp, digits)
    cut_off(lambda: train(hp), at)
    result = train(hp)
    assert result.model.read_bytes() == expected.model.read_bytes()
    starts = [record["resumed_after_step"] for record in read_records(result.metrics) if record["kind"] == "start"]
    assert starts == [0, at]
    one, other = ([r.get("learning_rate") for r in read_records(each.metrics)] for each in (result, expected))
    assert [rate for rate in one if rate is not None] == [rate for rate in other if rate is not None]


@pytest.mark.slow
def test_an_optimiser_that_draws_draws_the_same_on_all_ranks(train: Train) -> None:
    hp = replace(SMALL, model="small_cnn", optimizer="own_training:noisy", precision="fp64", keep="last")
    one, two = (train(replace(hp, num_ranks=ranks), f"{ranks}") for ranks in (1, 2))
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(two)[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "of_another_library"}, "returned a str: must return a torch.optim.Optimizer"),
        ({"optimizer": "forgetful"}, r"parameter 3\.bias is in none of its groups.*set freeze='3\.bias'"),
        ({"optimizer": "lbfgs"}, "its step cannot be called alone"),
        ({"optimizer": "without_rate"}, "a parameter group without 'lr'"),
        ({"optimizer": "not_saved"}, r"keeps a Fraction in state\[0\]\['note'\]: torch.load\(weights_only=True\)"),
        ({"optimizer": "missing"}, "has no 'missing'"),
        ({"schedule": "nan_in_step_7"}, "returned nan for step 7 of 8: must be a finite number of at least 0"),
        ({"schedule": "negative"}, r"returned -0\.25 for step 5 of 8"),
        ({"schedule": "tensor"}, r"returned tensor\(1\.\) for step 0 of 8"),
        ({"schedule": "of_step_alone"}, r"cannot be called as schedule\(step, total_steps\) \(too many positional"),
        ({"schedule": "counting"}, "returned .* and then .* for step 0 of 8: must be a function of the two"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(train: Train, changes: dict[str, str], words: str) -> None:
    own_training.COUNTED.clear()
    own = {name: f"own_training:{value}" for name, value in changes.items()}
    with pytest.raises(UserError, match=f"^{next(iter(own))}='.*{words}|{words}") as caught:
        train(replace(SMALL, **own))
    assert len(caught.value.message.splitlines()) == 1


def test_freezing_what_it_forgets_makes_an_optimiser_complete(train: Train) -> None:
    hp = replace(SMALL, optimizer="own_training:forgetful", freeze="3.bias", max_steps=2)
    assert train(hp).model.exists()


@pytest.mark.parametrize(
    ("freeze", "words"),
    [
        ("1,head", r"the model has no part 'head'; its parts are 0, 1, 2, 3"),
        ("3.wieght", r"the model has no part '3\.wieght'; did you mean 3\.weight"),
        ("1.running_mean", r"the model has no part '1\.running_mean'"),
        ("0,1,3", "leaves nothing to train"),
    ],
)
def test_parts_that_cannot_be_frozen_are_named(train: Train, freeze: str, words: str) -> None:
    with pytest.raises(UserError, match=f"freeze='{freeze}': .*{words}"):
        train(replace(SMALL, freeze=freeze))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_ranks": 2, "sync_batchnorm": False, "precision": "fp64"},
        pytest.param({"num_ranks": 3, "strategy": "hooks", "keep": "last"}, marks=pytest.mark.exhaustive),
    ],
)
def test_frozen_parts_stay_as_they_start(train: Train, changes: dict[str, Any]) -> None:
    """To the last bit, also through the evaluations, which average what the ranks have gathered on their own."""
    hp = replace(SMALL, freeze="1,3.bias", **changes)
    torch.manual_seed(hp.seed)
    start = zoo.build_model(hp.model, 10, InputSpec(1, 8, 8, (0.5,), (0.5,))).state_dict()
    result = train(hp)
    for name, value in weights(result).items():
        stays = name.startswith("1.") or name == "3.bias"
        assert torch.equal(value, start[name].to(value.dtype)) == stays, name
    notes = next(record["notes"] for record in read_records(result.metrics) if record["kind"] == "end")
    assert notes == ["Trained are 1,480 of 1,498 parameters (freeze='1,3.bias')."], "nothing on the ranks' statistics"


def test_own_optimisers_are_watched_in_the_same_step() -> None:
    """Only torch's fused ones can leave out the step after a loss that is not finite, which a GPU tells late."""
    model = nn.Linear(2, 2)
    optimizer = own_training.Precise(model.parameters(), 0.1)
    assert not LossWatch(model, optimizer, 0.1, a_step_later=True).a_step_later
