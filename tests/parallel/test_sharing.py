"""Training loops of a user's own: torch's DistributedDataParallel in real processes against a plain loop in one."""

from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from flyte_ddp import UserError, batches, evaluation_batches, sum_over_ranks

SEED, EPOCHS = 7, 3
# Samples and batch size: equal batches, a smaller last one, one of a single sample, batches smaller than the ranks.
SIZES = [(24, 12), (31, 12), (25, 12), (7, 3), (5, 2), (3, 1)]


def data_of(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(n)
    inputs = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (n,), generator=generator))


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def plain_weights(n: int, batch_size: int) -> list[Tensor]:
    """Weights after each step in one process, with the order as NumPy gives it."""
    data, (model, optimizer) = data_of(n), new_model()
    weights = []
    for epoch in range(EPOCHS):
        order = np.random.Generator(np.random.Philox(np.random.SeedSequence([1, SEED, epoch, 0]))).permutation(n)
        for start in range(0, n, batch_size):
            inputs, targets = data[torch.from_numpy(order[start : start + batch_size])]
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            weights.append(weights_of(model))
    return weights


def train(n: int, batch_size: int, saved: dict, stop_at: int | None = None) -> list[Tensor]:
    """A user's own loop, which goes on after the step of ``saved``. Return the weights after each step."""
    data, (model, optimizer) = data_of(n), new_model()
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    step, weights = saved.get("step", 0), []
    steps = len(batches(n, batch_size, SEED, 0))
    for epoch in range(step // steps, EPOCHS):
        order = batches(n, batch_size, SEED, epoch, first=step - epoch * steps)
        assert len(order) == (epoch + 1) * steps - step
        loader = DataLoader(data, batch_sampler=order)
        for factor, (inputs, targets) in zip(order.loss_factors(), loader, strict=True):
            optimizer.zero_grad()
            (factor * functional.cross_entropy(parallel(inputs), targets)).backward()
            optimizer.step()
            step += 1
            weights.append(weights_of(model))
            if step == stop_at:
                saved.update(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step)
                return weights
    return weights


def evaluate(n: int, batch_size: int) -> None:
    """Each sample is counted once, and the sum of what a loss sees is that of one process."""
    data, (model, _) = data_of(n), new_model()
    counted, losses = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.float64)
    order = evaluation_batches(n, batch_size)
    with torch.no_grad():
        for samples, (inputs, targets) in zip(order, DataLoader(data, batch_sampler=order), strict=True):
            counted[samples] += 1
            losses[samples] = functional.cross_entropy(model(inputs), targets, reduction="none")
        expected = functional.cross_entropy(model(data.tensors[0]), data.tensors[1], reduction="none")
    assert sum_over_ranks(counted).tolist() == [1] * n
    torch.testing.assert_close(sum_over_ranks(losses), expected, rtol=0, atol=1e-12)


def compare_with_one_process(_: Path) -> None:
    for n, batch_size in SIZES:
        expected = plain_weights(n, batch_size)
        whole = train(n, batch_size, {})
        assert len(whole) == len(expected)
        for step, (own, plain) in enumerate(zip(whole, expected, strict=True)):
            assert (own - plain).abs().max() < 1e-9, (dist.get_world_size(), n, batch_size, step)
        saved: dict = {}
        stop_at = len(expected) // 2  # in the middle of the second epoch
        resumed = train(n, batch_size, saved, stop_at) + train(n, batch_size, saved)
        assert all(map(torch.equal, resumed, whole))
        assert len(resumed) == len(whole)
        evaluate(n, batch_size)
    evaluate(0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_train_resume_and_evaluate_as_one_process_does(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(compare_with_one_process, tmp_path, ranks) == [0] * ranks


@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    num_ranks=st.integers(1, 9),
    epoch=st.integers(0, 3),
    done=st.floats(0, 1),
)
def test_each_sample_counts_once_in_an_epoch_whatever_the_ranks(
    n: int, batch_size: int, num_ranks: int, epoch: int, done: float
) -> None:
    alone = list(batches(n, batch_size, SEED, epoch))
    assert sorted(chain(*alone)) == list(range(n))
    first = int(done * len(alone))
    of_ranks = [batches(n, batch_size, SEED, epoch, first, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    steps = zip(*(zip(order.loss_factors(), order, strict=True) for order in of_ranks), strict=True)
    for whole, step in zip(alone[first:], steps, strict=True):
        assert all(samples for _, samples in step)  # also where they do not count
        assert list(chain(*(samples for factor, samples in step if factor))) == whole
        for factor, samples in step:
            assert factor in (0.0, len(samples) * num_ranks / len(whole))
            assert set(samples) <= set(whole)
    assert {len(order) for order in of_ranks} == {len(alone) - first}


@given(n=st.integers(0, 60), batch_size=st.integers(1, 20), num_ranks=st.integers(1, 9))
def test_an_evaluation_has_each_sample_once_in_the_same_batches(n: int, batch_size: int, num_ranks: int) -> None:
    dealt = [evaluation_batches(n, batch_size, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert [list(order) for order in dealt] == [list(order) for order in dealt]  # as often as one likes
    together = list(chain(*dealt))
    assert together == list(evaluation_batches(n, batch_size))
    assert list(chain(*together)) == list(range(n))
    assert [len(order) for order in dealt] == [len(list(order)) for order in dealt]


def test_ranks_are_found_in_torchruns_variables_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    values = torch.ones(2)
    assert sum_over_ranks(values) is values
    alone = list(batches(10, 10, SEED, 0))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(batches(10, 10, SEED, 0)) == alone
    monkeypatch.setenv("RANK", "1")
    assert list(batches(10, 10, SEED, 0)) == [alone[0][5:]]
    assert list(evaluation_batches(10, 5)) == [[5, 6, 7, 8, 9]]
    with pytest.raises(UserError, match=r"one of 2 ranks .* first call join"):
        sum_over_ranks(values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(batches, 0, 4, 0, 0), "n=0: must be at least 1"),
        (partial(batches, 9, 4, 0, 0, 4), "first=4: must be at most 3.*9 samples by 4"),
        (partial(batches, 9, 4, 0, 0, rank=1), "rank=1, num_ranks=None: give both or none"),
        (partial(batches, 9, 4, 0, 0, rank=2, num_ranks=2), "rank=2, num_ranks=2: .*0 <= rank < num_ranks"),
        (partial(evaluation_batches, -1, 4), "n=-1: must be at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(call: partial, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
