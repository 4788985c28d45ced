"""Optimisers, schedules and frozen parts of the user's: what is refused, resumed, and stays as it is."""

from dataclasses import replace
from pathlib import Path

import own_training
import pytest
import torch
from plain_loop import arrays_in_fp64
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten
from training_runs import Train, cut_off, notes, records_of, resumed_steps, train_in, weights

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.order import sampling
from flyte_ddp.core.training import train as training
from flyte_ddp.core.training.diagnosis import LossWatch
from flyte_ddp.core.training.optimizer_state import load_optimizer_state
from flyte_ddp.models import zoo

pytestmark = pytest.mark.usefixtures("user_models")

BASE = Hyperparameters(model="user_models:batch_norm", backend="gloo", validation_fraction=0.93, batch_size=26)
BASE = replace(BASE, learning_rate=0.01)
SMALL = replace(BASE, max_steps=8, num_ranks=1, epochs=2, precision="fp32", keep="ema", ema_decay=0.5)


RESUMED = [
    ("precise", 6),
    ("two_groups", 1),
    ("joined", 1),
    ("saved_pair", 6),
    ("schedule_free", 6),
    ("counting_steps", 6),
]


@pytest.mark.parametrize(("optimizer", "at"), RESUMED)
def test_state_and_groups_survive_a_resume_bit_for_bit(
    train: Train, tmp_path: Path, digits: Path, optimizer: str, at: int
) -> None:
    """After the first step, and in the middle of the second epoch; the state has other types than the parameters."""
    hp = replace(SMALL, optimizer=f"own_training:{optimizer}", schedule="own_training:square", log_interval=1)
    expected = train_in(tmp_path / "undisturbed", hp, digits)
    cut_off(lambda: train(hp), at)
    result = train(hp)
    assert result.model.read_bytes() == expected.model.read_bytes()
    assert resumed_steps(result) == [0, at]
    rates = [[record["learning_rate"] for record in records_of(run, "train")] for run in (result, expected)]
    assert rates[0] == rates[1]


@pytest.mark.slow
def test_a_ranks_own_attributes_are_not_those_of_the_rank_that_saved(train: Train) -> None:
    """Its number, say, which the optimiser compares in each step with the group's."""
    hp = replace(SMALL, optimizer="own_training:counting_steps")
    cut_off(lambda: train(hp), 6)
    assert resumed_steps(train(replace(hp, num_ranks=2))) == [0, 6]


def test_values_at_any_depth_are_loaded_as_they_were_saved() -> None:
    """torch's own method casts tensors in lists and dicts to the parameter's type, and loses texts."""
    parameter = nn.Parameter(torch.zeros(2))
    third = torch.tensor([1 / 3], dtype=torch.float64)
    values = {"list": [third, "text", (third.half(), 3)], "dict": {"of": {"count": torch.tensor(2**40)}}, "top": third}
    saving, loading = (torch.optim.SGD([parameter], lr) for lr in (0.1, 0.2))
    saving.state[parameter] = values
    load_optimizer_state(loading, saving.state_dict())
    (found, form), (wanted, same_form) = (tree_flatten(each) for each in (loading.state[parameter], values))
    assert form == same_form
    for value, other in zip(found, wanted, strict=True):
        assert value.dtype == other.dtype if isinstance(other, torch.Tensor) else type(value) is type(other)
        assert value == other
    assert loading.param_groups[0]["lr"] == 0.1


@pytest.mark.slow
def test_schedule_free_weights_are_reported_and_saved_as_eval_has_them(train: Train, digits: Path) -> None:
    """As in a loop of one process, which calls train() and eval() around each evaluation."""
    hp = replace(SMALL, model="user_models:linear", optimizer="own_training:schedule_free", precision="fp64")
    hp = replace(hp, keep="last", max_steps=0, num_ranks=2, schedule="constant")
    result = train(hp)
    (images, labels), tests = (arrays_in_fp64(digits, split) for split in ("train", "test"))
    samples, _ = sampling.split_indices(len(labels), hp.validation_fraction, hp.seed)
    torch.manual_seed(hp.seed)
    model = zoo.build_model(hp.model, 10, InputSpec(1, 8, 8, (0.5,), (0.5,))).double()
    optimizer, expected = own_training.ScheduleFree(model.parameters(), hp.learning_rate), []
    for epoch in range(hp.epochs):
        optimizer.train()
        for batch in sampling.ListedOrder(samples, hp.seed).batches(epoch, hp.batch_size):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        optimizer.eval()
        expected.append(functional.cross_entropy(model(tests[0]), tests[1]).item())
    assert [record["test_loss"] for record in records_of(result, "evaluation")] == pytest.approx(expected, abs=1e-9)
    for name, value in weights(result).items():
        torch.testing.assert_close(value.double(), model.state_dict()[name], rtol=0, atol=1e-6)


def test_a_run_that_fails_in_an_evaluation_evaluates_the_same_schedule_free_weights_again(
    train: Train, tmp_path: Path, digits: Path
) -> None:
    hp = replace(SMALL, optimizer="own_training:schedule_free", keep="last")
    expected = train_in(tmp_path / "undisturbed", hp, digits)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(training, "compute_split_columns")
        with pytest.raises(RankError, match="NameError"):
            train(hp)
    result = train(hp)
    assert resumed_steps(result)[-1] > 0
    assert result.model.read_bytes() == expected.model.read_bytes()


@pytest.mark.slow
def test_an_optimiser_that_draws_draws_the_same_on_all_ranks(train: Train) -> None:
    hp = replace(SMALL, model="small_cnn", optimizer="own_training:noisy", precision="fp64", keep="last")
    one, two = (train(replace(hp, num_ranks=ranks), f"{ranks}") for ranks in (1, 2))
    found = weights(two)
    for name, value in weights(one).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "forgetful"}, r"parameter 3\.bias is in no parameter group.*set freeze='3\.bias'"),
        ({"optimizer": "not_saved"}, r"keeps a Fraction in state\[0\]\['note'\].* torch.load\(weights_only=True\)"),
        ({"optimizer": "pair"}, r"attribute pair \(Muon\) is missing in state_dict\(\).* as a list"),
        (
            {"optimizer": "helped"},
            r"attribute helper\.inner \(AdamW\) is missing in state_dict\(\)",
        ),
        ({"optimizer": "twice"}, r"parameter 3\.bias is in two optimisers"),
        ({"optimizer": "named"}, r"returned dict: must be an optimiser .* or a list"),
        ({"optimizer": "shared"}, r"state_dict\(\) fails \(Optimizer state has not been consolidated"),
        ({"optimizer": "lbfgs"}, "step.. must work without arguments.*missing.*'closure'"),
        ({"optimizer": "sharp"}, "step.. must work.*requires closure.*own loop"),
        ({"optimizer": "hessian"}, "step.. must work.*without create_graph.*does not have a grad_fn"),
        ({"schedule": "nan_in_step_7"}, "returned nan for step 7 of 8: .*must be a finite number"),
        ({"schedule": "counting"}, "returned .* and then .* for step 0 of 8: must depend on step and total_steps"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(train: Train, changes: dict[str, str], words: str) -> None:
    own = {name: f"own_training:{value}" for name, value in changes.items()}
    with pytest.raises(UserError, match=f"^{next(iter(own))}='.*{words}|{words}") as caught:
        train(replace(SMALL, **own))
    assert len(caught.value.message.splitlines()) == 1


@pytest.mark.parametrize(
    ("freeze", "words"),
    [
        ("1,head", r"the model has no part 'head'; its parts are 0, 1, 2, 3"),
        ("1.running_mean", r"the model has no part '1\.running_mean'"),
        ("0,1,3", "leaves nothing to train"),
    ],
)
def test_parts_that_cannot_be_frozen_are_named(train: Train, freeze: str, words: str) -> None:
    with pytest.raises(UserError, match=f"freeze='{freeze}': .*{words}"):
        train(replace(SMALL, freeze=freeze))


@pytest.mark.slow
def test_frozen_parts_stay_as_they_start(train: Train) -> None:
    """To the last bit, also through the evaluations, which average what the ranks have gathered on their own."""
    hp = replace(SMALL, freeze="1,3.bias", num_ranks=2, sync_batchnorm=False, precision="fp64")
    torch.manual_seed(hp.seed)
    start = zoo.build_model(hp.model, 10, InputSpec(1, 8, 8, (0.5,), (0.5,))).state_dict()
    result = train(hp)
    for name, value in weights(result).items():
        stays = name.startswith("1.") or name == "3.bias"
        assert torch.equal(value, start[name].to(value.dtype)) == stays, name
    assert notes(result) == [], "nothing on the ranks' statistics"


def test_own_optimisers_are_watched_in_the_same_step() -> None:
    """Only torch's fused ones can leave out the step after a loss that is not finite, which a GPU tells late."""
    model = nn.Linear(2, 2)
    optimizer = own_training.Precise(model.parameters(), 0.1)
    assert not LossWatch(model, optimizer, 0.1, a_step_later=True).a_step_later
