"""Models that run blocks again, change buffers, or cannot take an empty batch: on ranks as in one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import parallel_models
import pytest
import stateful_models
import torch
from ranks import run_ranks
from stateful_steps import BASE, STEPS, after_steps, first_batches, losses_of
from torch import Tensor
from torch.nn import functional

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, open_arrays
from flyte_ddp.errors import UserError
from flyte_ddp.hardware import detect
from flyte_ddp.order import sampling
from flyte_ddp.parallel.distributed import rank, world_size
from flyte_ddp.training.train import evaluate_splits
from flyte_ddp.training.training_state import TrainingState

pytestmark = pytest.mark.usefixtures("models_are_found")


def weights_after_steps(hp: Hyperparameters, data: Path) -> dict[str, Tensor]:
    return after_steps(hp, data).model.state_dict()


def weights_in_ranks(folder: Path, models: list[str]) -> None:
    """Leaves those of each model and strategy, from rank 0."""
    for model in models:
        for strategy in ("shared_memory", "ddp", "hooks") if world_size() == 2 else ("shared_memory",):
            hp = replace(BASE, model=model, strategy=strategy, num_ranks=world_size())
            if "reentrant" in model.split("_") and "not" not in model.split("_") and strategy == "ddp":
                with pytest.raises(UserError, match="use_reentrant=False, or set strategy='hooks'"):
                    weights_after_steps(hp, folder / "digits")
                continue
            weights = weights_after_steps(hp, folder / "digits")
            if rank() == 0:
                torch.save(weights, folder / f"{model}-{strategy}.pt")


def dropout_in_ranks(folder: Path) -> None:
    weights_in_ranks(folder, [f"parallel_models:dropout_{name}" for name in parallel_models.RUNS])


OTHERS = ("tutorials", "subclassed", "no_bias", "complex_filter", "penalised")


def others_in_ranks(folder: Path) -> None:
    batch_norm = [f"parallel_models:batch_norm_{name}" for name in parallel_models.RUNS]
    weights_in_ranks(folder, [*batch_norm, *(f"parallel_models:{name}" for name in OTHERS)])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_blocks_that_are_run_again_drop_the_same(tmp_path: Path, ranks: int) -> None:
    """The reference keeps all activations, as autograd does by itself."""
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    expected = weights_after_steps(replace(BASE, model="parallel_models:dropout_plain", num_ranks=1), data)
    assert run_ranks(dropout_in_ranks, tmp_path, ranks) == [0] * ranks
    for path in saved(tmp_path, ranks):
        for name, value in torch.load(path).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=f"{path.name} {name}")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_batch_norm_at_the_end_of_a_block_and_the_shapes_of_tutorials(tmp_path: Path, ranks: int) -> None:
    """The reference is torch's own BatchNorm in one process, whose running statistics each run of a block changes."""
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(others_in_ranks, tmp_path, ranks) == [0] * ranks
    for model, of_strategies in groupby(saved(tmp_path, ranks), lambda path: path.stem.rpartition("-")[0]):
        expected = plain_loop(model, data)
        for path in of_strategies:
            for name, value in torch.load(path).items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=f"{path.name} {name}")


def evaluations_in_ranks(folder: Path) -> None:
    hp = replace(BASE, num_ranks=world_size(), test_batch_size=60)
    late = after_steps(
        replace(hp, model="stateful_models:from_third_step", ema_decay=0.5, keep="ema"), folder / "digits"
    )
    uncertain = after_steps(replace(hp, model="stateful_models:uncertain"), folder / "digits")
    losses = [evaluate_splits(state)[1].losses for state in (late, uncertain, uncertain)]
    if rank() == 0:
        torch.save((losses, late.kept_model().state_dict()), folder / f"evaluations-{world_size()}.pt")


@pytest.mark.slow
def test_all_ranks_evaluate_with_the_same(tmp_path: Path) -> None:
    """Also what was found to change late, and random numbers."""
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    for ranks in (1, 2):
        (tmp_path / "store").unlink(missing_ok=True)
        assert run_ranks(evaluations_in_ranks, tmp_path, ranks) == [0] * ranks
    (_, uncertain, again), _ = torch.load(tmp_path / "evaluations-1.pt")
    (late, of_two, _), weights = torch.load(tmp_path / "evaluations-2.pt")
    assert torch.equal(uncertain, again)
    torch.testing.assert_close(uncertain, of_two, rtol=0, atol=1e-9)
    model = stateful_models.from_third_step(10, (1, 8, 8)).double().eval()
    model.load_state_dict(weights)
    torch.testing.assert_close(late, losses_of(model, data), rtol=0, atol=1e-9)


def different_layers_in_ranks(folder: Path) -> None:
    hp = replace(BASE, model="parallel_models:leaves_out", num_ranks=2, strategy="shared_memory")
    with pytest.raises(UserError, match="different BatchNorm layers"):
        after_steps(hp, folder / "digits")


@pytest.mark.slow
def test_ranks_at_different_layers_do_not_mix_their_statistics(tmp_path: Path) -> None:
    fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(different_layers_in_ranks, tmp_path, 2) == [0, 0]


def saved(folder: Path, ranks: int) -> list[Path]:
    """What the ranks have left: of each model one, or one for each strategy that takes it."""
    found = sorted(folder.glob("*.pt"))
    assert len(found) >= (15 if ranks == 2 else 6)
    return found


def plain_loop(model_name: str, data: Path) -> dict[str, Tensor]:
    """One process, and of the library only the order of samples."""
    arrays = open_arrays(data)
    torch.manual_seed(BASE.seed)
    model = getattr(parallel_models, model_name.partition(":")[2])(10, (1, 8, 8)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=5e-4, nesterov=True)
    training, _ = sampling.split_indices(len(arrays.train_labels), BASE.validation_fraction, BASE.seed)
    images = (
        torch.tensor(np.array(arrays.train_images)).permute(0, 3, 1, 2).double() / 255 - arrays.mean[0]
    ) / arrays.std[0]
    labels = torch.tensor(np.array(arrays.train_labels))
    total = BASE.epochs * sampling.steps_per_epoch(len(training), BASE.batch_size)
    for step, batch in enumerate(first_batches(sampling.ListedOrder(training, BASE.seed))):
        for group in optimizer.param_groups:
            group["lr"] = BASE.learning_rate * (step + 1) / (total // 4 + 1)
        optimizer.zero_grad()
        for part in np.array_split(batch, BASE.accumulation_steps):
            if len(part):
                loss = functional.cross_entropy(model(images[part]), labels[part], reduction="sum")
                (loss / len(batch)).backward()
        optimizer.step()
    return model.state_dict()


def centred_in_ranks(folder: Path) -> None:
    """What one rank evaluates is what it would evaluate with the weights that are saved."""
    hp = replace(BASE, model="stateful_models:centred", num_ranks=2, test_batch_size=20)
    state = after_steps(hp, folder / "digits")
    _, test = evaluate_splits(state)
    if rank() == 0:
        torch.save((state.model.state_dict(), test.losses, state.buffers.changing), folder / "centred.pt")


@pytest.mark.slow
def test_what_is_evaluated_is_what_is_saved(tmp_path: Path) -> None:
    data = fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(centred_in_ranks, tmp_path, 2) == [0, 0]
    weights, losses, changing = torch.load(tmp_path / "centred.pt")
    assert changing == ["centre", "frozen", "hidden", "late", "passes", "replaced"]
    assert weights["passes"].item() == STEPS * BASE.accumulation_steps - 2, "the batch of one sample has one part"
    model = stateful_models.centred(10, (1, 8, 8)).double().eval()
    del weights["late"]  # which nobody else's model has before its first pass
    model.load_state_dict(weights)
    arrays = open_arrays(data)
    images = (
        torch.tensor(np.array(arrays.test_images)).permute(0, 3, 1, 2).double() / 255 - arrays.mean[0]
    ) / arrays.std[0]
    expected = functional.cross_entropy(model(images), torch.tensor(np.array(arrays.test_labels)), reduction="none")
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)


def set_by_data_in_ranks(folder: Path) -> None:
    state = after_steps(replace(BASE, model="stateful_models:set_by_data", num_ranks=2), folder / "digits")
    torch.save((state.buffers.changing, state.model.state_dict()), folder / f"rank-{rank()}.pt")


@pytest.mark.slow
def test_ranks_have_the_same_weights_where_data_set_them(tmp_path: Path) -> None:
    fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(set_by_data_in_ranks, tmp_path, 2) == [0, 0]
    (changing, one), (_, other) = (torch.load(tmp_path / f"rank-{number}.pt") for number in (0, 1))
    assert changing == ["is_set", "shift"]
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def stages_in_ranks(folder: Path) -> None:
    """The test split is one batch, which one of the ranks evaluates."""
    for keep in ("last", "ema"):
        hp = replace(BASE, model="stateful_models:stages", num_ranks=world_size(), validation_fraction=0.0)
        hp = replace(hp, test_batch_size=1000, ema_decay=0.9, keep=keep)
        state = TrainingState(hp, detect(hp), open_arrays(folder / "digits"), None)
        assert state.model.stage == 1
        for evaluations in (1, 2):
            evaluate_splits(state)
            assert state.model.stage == 1 + evaluations
            assert state.model.training


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_evaluation_is_followed_by_one_call_of_train(tmp_path: Path, ranks: int) -> None:
    fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(stages_in_ranks, tmp_path, ranks) == [0] * ranks


def attributes_in_ranks(folder: Path) -> None:
    for model in ("by_first_batch", "in_list"):
        hp = replace(BASE, model=f"stateful_models:{model}", num_ranks=2, precision="fp32")
        state = after_steps(hp, folder / "digits")
        if model == "in_list":
            state.buffers.look()
        if rank() == 0:
            torch.save(state.buffers.attributes, folder / f"{model}.pt")


@pytest.mark.slow
def test_what_each_rank_has_of_its_own_is_named(tmp_path: Path) -> None:
    fetch("digits", "", tmp_path / "digits", progress="off")
    assert run_ranks(attributes_in_ranks, tmp_path, 2) == [0, 0]
    assert torch.load(tmp_path / "by_first_batch.pt") == ["mean"]
    assert torch.load(tmp_path / "in_list.pt") == ["teacher"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["noisy_gradient", *(f"dropout_{name}" for name in parallel_models.RUNS)])
def test_draws_of_the_backward_pass_are_noticed(digits: Path, model: str) -> None:
    """And not those of blocks that are run again."""
    state = after_steps(replace(BASE, model=f"parallel_models:{model}", num_ranks=1), digits)
    assert state.this_pass.draws == (model == "noisy_gradient")
