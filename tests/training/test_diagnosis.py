"""A loss that is not finite: the error says where that began, and the last good checkpoint stays."""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faulty_runs import saved
from torch import nn
from training_runs import Train

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.training import training_state
from flyte_ddp.core.training.diagnosis import LossWatch
from flyte_ddp.core.training.optimisation import create_optimizers
from flyte_ddp.core.training.plan import OptimizerSettings

BAD_STEP = 17  # in the second epoch, of 14 steps
pytestmark = pytest.mark.usefixtures("user_models")


class Middle(nn.Module):
    """Goes wrong in one training step: its output, or the gradient of its output."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("step", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.step += 1
        spoilt = self.training and self.step >= BAD_STEP  # also when the pass is done again
        output = values * (float("inf") if spoilt and self.what == "activation" else 1.0)
        if spoilt and self.what == "gradient" and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))
        return output


def spoils(what: str) -> Callable[..., nn.Module]:
    def make(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        layers = {"first": nn.Conv2d(input_shape[0], 4, 3), "middle": Middle(what), "second": nn.Conv2d(4, 4, 3)}
        return nn.Sequential(OrderedDict(layers | {"flat": nn.Flatten(), "last": nn.Linear(64, num_classes)}))

    return make


gradient, activation = spoils("gradient"), spoils("activation")


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is looked at a step later."""
    monkeypatch.setattr(training_state, "LossWatch", lambda *of, a_step_later: LossWatch(*of, a_step_later=True))


@pytest.mark.parametrize(
    ("batch_size", "max_steps", "epoch"),
    [pytest.param(100, BAD_STEP, 1, id="of the run"), pytest.param(80, 0, 0, id="of an epoch")],  # 14 or 17 steps long
)
@pytest.mark.usefixtures("_as_on_a_gpu")
def test_the_last_loss_is_looked_at(train: Train, batch_size: int, max_steps: int, epoch: int) -> None:
    sizes = {"batch_size": batch_size, "max_steps": max_steps}
    hp = Hyperparameters(model="test_diagnosis:activation", epochs=3, num_ranks=1, precision="fp32", **sizes)
    with pytest.raises(UserError, match=rf"at epoch {epoch}, step {BAD_STEP} \(first non-finite activation"):
        train(hp)


GRADIENT = "gradient", BAD_STEP + 1, rf"first non-finite gradient: first\.bias, in step {BAD_STEP}"
ACTIVATION = "activation", BAD_STEP, r"first non-finite activation: the output of middle on rank 0"


@pytest.mark.parametrize(
    ("what", "step", "words", "ranks", "a_step_later"),
    [(*GRADIENT, 1, False), (*GRADIENT, 1, True), pytest.param(*ACTIVATION, 2, False, marks=pytest.mark.slow)],
)
def test_the_error_names_epoch_step_and_where_it_began(
    train: Train, tmp_path: Path, request: pytest.FixtureRequest,
    what: str, step: int, words: str, ranks: int, a_step_later: bool,
) -> None:  # fmt: skip
    """A step later: as on a GPU, where the weights must not change in the meantime."""
    if a_step_later:
        request.getfixturevalue("_as_on_a_gpu")
    hp = Hyperparameters(model=f"test_diagnosis:{what}", epochs=3, batch_size=100, precision="fp32", learning_rate=0.01)
    hp = replace(hp, num_ranks=ranks)
    with pytest.raises(UserError, match=rf"loss is (nan|inf) at epoch 1, step {step} \({words}") as caught:
        train(hp, checkpoint_seconds=0.1)
    assert len(caught.value.message.splitlines()) == 1
    found = saved(tmp_path / "run")
    assert 14 <= found.step < BAD_STEP
    weights = checkpoint.load_state(found)["model"]
    assert all(bool(value.isfinite().all()) for value in weights.values())
    with pytest.raises(UserError, match=re.escape(caught.value.message)):  # the same again, from the checkpoint
        train(hp)


def test_complex_weights_are_checked_before_they_change() -> None:
    """Also on a GPU: torch's optimisers that are not fused, as those of complex weights, do not skip a step."""
    model = nn.Linear(3, 2, bias=False, dtype=torch.complex64)
    optimizer = create_optimizers(model, OptimizerSettings.from_hyperparameters(Hyperparameters()), Hyperparameters())[
        0
    ]
    watch = LossWatch(model, optimizer, 0.1, a_step_later=True)
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    watch.check_loss(0, 1, torch.tensor(1.0, dtype=torch.float64), lambda: None)
    optimizer.step()
    assert not torch.equal(model.weight, before)
    with pytest.raises(UserError, match="the loss is nan at epoch 0, step 2"):
        watch.check_loss(0, 2, torch.tensor(float("nan"), dtype=torch.float64), lambda: None)
