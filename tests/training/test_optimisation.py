"""Optimisers, schedules and frozen parts of the user's: what is refused, resumed, and stays as it is."""

from dataclasses import replace
from pathlib import Path

import own_training
import pytest
import torch
from torch import nn
from training_runs import Train, cut_off, notes, records_of, resumed_steps, train_in, weights

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.models import zoo
from flyte_ddp.models.inputs import InputSpec
from flyte_ddp.training.diagnosis import LossWatch

pytestmark = pytest.mark.usefixtures("user_models")

BASE = Hyperparameters(model="user_models:batch_norm", backend="gloo", validation_fraction=0.93, batch_size=26)
BASE = replace(BASE, learning_rate=0.01)
SMALL = replace(BASE, max_steps=8, num_ranks=1, epochs=2, precision="fp32", keep="ema", ema_decay=0.5)


@pytest.mark.parametrize(("optimizer", "at"), [("precise", 6), ("two_groups", 1)])
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
def test_an_optimiser_that_draws_draws_the_same_on_all_ranks(train: Train) -> None:
    hp = replace(SMALL, model="small_cnn", optimizer="own_training:noisy", precision="fp64", keep="last")
    one, two = (train(replace(hp, num_ranks=ranks), f"{ranks}") for ranks in (1, 2))
    found = weights(two)
    for name, value in weights(one).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "forgetful"}, r"parameter 3\.bias is in none of its groups.*set freeze='3\.bias'"),
        ({"optimizer": "not_saved"}, r"keeps a Fraction in state\[0\]\['note'\]: torch.load\(weights_only=True\)"),
        ({"schedule": "nan_in_step_7"}, "returned nan for step 7 of 8: must be a finite number of at least 0"),
        ({"schedule": "counting"}, "returned .* and then .* for step 0 of 8: must be a function of the two"),
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
