"""Models that run blocks again, change buffers, or cannot take an empty batch: on ranks as in one process."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import parallel_models
import pytest
import stateful_models
import torch
from plain_loop import arrays_in_fp64, plain_steps
from ranks import run_ranks
from stateful_steps import BASE, STEPS, after_steps, first_batches, losses_of
from torch import Tensor

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.errors import UserError
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.order import sampling
from flyte_ddp.parallel.distributed import rank, world_size
from flyte_ddp.training.train import evaluate_splits
from flyte_ddp.training.training_state import TrainingState

pytestmark = pytest.mark.usefixtures("models_are_found")


def weights_after_steps(hp: Hyperparameters, data: Path) -> dict[str, Tensor]:
    return after_steps(hp, data).model.state_dict()


MODELS = (
    *(f"{layers}_{name}" for layers in ("dropout", "batch_norm") for name in parallel_models.RUNS),
    *("Tutorials", "Subclassed", "NoBias", "Complex", "Penalised"),
)


def strategies_for(model: str, ranks: int) -> tuple[str, ...]:
    """All where a strategy may matter: for gradients that come again, in another order, or not from the loss."""
    every = ranks == 2 and ("reentrant" in model or model in ("Tutorials", "Complex", "Penalised"))
    return ("shared_memory", "ddp", "hooks") if every else ("shared_memory",)


def weights_in_ranks(folder: Path) -> None:
    """Leave the weights of each model and strategy, from rank 0."""
    for model in MODELS:
        for strategy in strategies_for(model, world_size()):
            hp = replace(BASE, model=f"parallel_models:{model}", strategy=strategy, num_ranks=world_size())
            if model.endswith(("norm_reentrant", "dropout_reentrant", "nested_reentrant")) and strategy == "ddp":
                with pytest.raises(UserError, match="use_reentrant=False, or set strategy='hooks'"):
                    weights_after_steps(hp, folder / "digits")
                continue
            weights = weights_after_steps(hp, folder / "digits")
            if rank() == 0:
                torch.save(weights, folder / f"{model}-{strategy}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_ranks_compute_what_one_process_would(tmp_path: Path, ranks: int) -> None:
    """Of dropout the reference keeps all activations, as autograd does by itself; else it is torch's own layers.

    Blocks that are run again change the running statistics each time.
    """
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(weights_in_ranks, tmp_path, ranks) == [0] * ranks
    dropped = weights_after_steps(replace(BASE, model="parallel_models:dropout_plain", num_ranks=1), data)
    paths = sorted(tmp_path.glob("*.pt"))
    refused = 4 if ranks == 2 else 0
    assert len(paths) == sum(len(strategies_for(model, ranks)) for model in MODELS) - refused
    for model, of_strategies in groupby(paths, lambda path: path.stem.rpartition("-")[0]):
        expected = dropped if model.startswith("dropout") else plain_loop(model, data)
        for path in of_strategies:
            for name, value in torch.load(path).items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=f"{path.name} {name}")


@pytest.mark.parametrize("model", [f"dropout_{name}" for name in parallel_models.RUNS])
def test_blocks_that_are_run_again_drop_the_same_on_one_rank(digits: Path, model: str) -> None:
    state = after_steps(replace(BASE, model=f"parallel_models:{model}", num_ranks=1), digits)
    expected = weights_after_steps(replace(BASE, model="parallel_models:dropout_plain", num_ranks=1), digits)
    for name, value in state.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=name)
    assert not state.this_pass.model_draws


def evaluations_in_ranks(folder: Path) -> None:
    """Leaves what rank 0 has, of a model that changes its buffers and of one that draws in evaluations."""
    hp = replace(BASE, num_ranks=2, test_batch_size=60)
    centred = after_steps(replace(hp, model="stateful_models:Centred"), folder / "digits")
    _, test = evaluate_splits(centred)
    uncertain = after_steps(replace(hp, model="stateful_models:Uncertain"), folder / "digits")
    losses = [evaluate_splits(uncertain)[1].losses for _ in range(2)]
    left = (centred.model.state_dict(), centred.model.hidden, test.losses, losses)
    torch.save(left, folder / f"rank-{rank()}.pt")
    after_steps(
        replace(hp, model="unusual_models:Unusual", precision="fp32"), folder / "digits"
    )  # buffers of all types
    with pytest.raises(UserError, match="different BatchNorm layers"):
        after_steps(replace(hp, model="parallel_models:LeavesOut", strategy="shared_memory"), folder / "digits")


@pytest.mark.slow
def test_all_ranks_have_the_buffers_of_rank_0_and_evaluate_what_is_saved(tmp_path: Path) -> None:
    """And ranks at different layers do not mix the statistics of BatchNorm."""
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(evaluations_in_ranks, tmp_path, 2) == [0, 0]
    (weights, hidden, losses, [uncertain, again]), other = (torch.load(tmp_path / f"rank-{at}.pt") for at in (0, 1))
    assert hidden.any(), "an evaluation leaves no trace in what no file holds"
    assert torch.equal(hidden, other[1])
    assert all(torch.equal(value, other[0][name]) for name, value in weights.items())
    assert weights["passes"].item() == STEPS * BASE.accumulation_steps - 2, "the batch of one sample has one part"
    model = stateful_models.Centred().double().eval()
    model.load_state_dict(weights)
    torch.testing.assert_close(losses, losses_of(model, data), rtol=0, atol=1e-9)
    assert torch.equal(uncertain, again)
    hp = replace(BASE, model="stateful_models:Uncertain", num_ranks=1, test_batch_size=60)
    _, of_one_rank = evaluate_splits(after_steps(hp, data))
    torch.testing.assert_close(uncertain, of_one_rank.losses, rtol=0, atol=1e-9)


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


@pytest.mark.parametrize("keep", ["last", "ema"])
def test_each_evaluation_is_followed_by_one_call_of_train(digits: Path, keep: str) -> None:
    hp = replace(BASE, model="stateful_models:Stages", num_ranks=1, validation_fraction=0.0, ema_decay=0.9, keep=keep)
    state = TrainingState(hp, detect_hardware(hp), open_arrays(digits), None)
    assert state.model.stage == 1
    for evaluations in (1, 2):
        evaluate_splits(state)
        assert state.model.stage == 1 + evaluations
        assert state.model.training


def test_draws_of_the_backward_pass_are_noticed(digits: Path) -> None:
    state = after_steps(replace(BASE, model="parallel_models:NoisyGradient", num_ranks=1), digits)
    assert state.this_pass.model_draws
