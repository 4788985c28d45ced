"""Gradients added up over real ranks, against gloo's own sum or numbers known beforehand."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from flyte_ddp.core.machine.clock import Clock
from flyte_ddp.core.parallel.buffers import Buffers
from flyte_ddp.core.parallel.distributed import copy_from_rank_0, sum_over_ranks
from flyte_ddp.core.parallel.node_memory import NodeMemory
from flyte_ddp.core.parallel.strategies import BUCKET_BYTES, SharedMemorySync, create_gradient_sync

RANKS = 3


def parameters() -> list[nn.Parameter]:
    """Types, shapes and orders in memory that models have, an odd size, a scalar, gaps and nothing among them."""
    convolution = torch.zeros(5, 3, 4, 4).to(memory_format=torch.channels_last)
    values = [
        torch.zeros(7),
        convolution,
        torch.zeros(3, 2, dtype=torch.float64),
        torch.zeros((), dtype=torch.bfloat16),
        torch.zeros(3, 6)[:, ::2],
        torch.zeros(0, 5),
    ]
    return [nn.Parameter(value) for value in values]


def own_sums() -> torch.Tensor:
    return torch.tensor([dist.get_rank() + 0.5, dist.get_rank()], dtype=torch.float64)


def average_random_gradients(bucket_bytes: int) -> None:
    model = nn.ParameterList(parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    sync = SharedMemorySync(model, bucket_bytes)
    for _ in range(5):  # the two halves are used in turn
        for parameter in model:
            # In whatever order in memory the backward pass leaves it.
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        expected = [parameter.grad.double() for parameter in model]
        for gradient in expected:
            dist.all_reduce(gradient)
            gradient.div_(RANKS)
        for last in (False, True):
            with sync.micro_batch(last=last):
                pass
        assert sync.average_gradients(own_sums()).tolist() == [4.5, 3.0]
        for parameter, gradient in zip(model, expected, strict=True):
            tolerance = {torch.float32: 1e-6, torch.float64: 1e-15, torch.bfloat16: 0.03}[parameter.dtype]
            torch.testing.assert_close(parameter.grad.double(), gradient, rtol=tolerance, atol=tolerance)
            same = [torch.empty_like(parameter.grad.contiguous()) for _ in range(RANKS)]
            dist.all_gather(same, parameter.grad.contiguous())
            assert all(torch.equal(same[0], other) for other in same[1:])


def read_late(folder: Path) -> None:
    """Rank 2 reads a bucket's gradients only when the others have written those of the next one."""
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(3)])
    sync = SharedMemorySync(parameters, bucket_bytes=1)
    barrier, steps, done = sync.memory.wait_at_barrier, 3, 0
    last = steps * len(parameters) - 1

    def slow_barrier() -> None:
        nonlocal done
        (folder / f"{dist.get_rank()}-has-written-{done}").touch()
        barrier()
        if dist.get_rank() == 2 and done < last:
            while not all((folder / f"{other}-has-written-{done + 1}").exists() for other in (0, 1)):
                time.sleep(0.001)
        done += 1

    sync.memory.wait_at_barrier = slow_barrier
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.full((4,), 10.0**step + index)
        sync.average_gradients(torch.zeros(2))
        for index, parameter in enumerate(parameters):
            assert torch.equal(parameter.grad, torch.full((4,), 10.0**step + index))


def copy_odd_tensors() -> None:
    own = float(dist.get_rank() + 1)
    whole = torch.full((4, 6), own)
    alike = [torch.full((3,), int(own), dtype=torch.int16), torch.full((2, 3), own).t(), torch.full((), own)]
    expanded = torch.full((1,), own).expand(5)
    copy_from_rank_0([*alike, whole[:, ::2], expanded])
    assert all((tensor == 1).all() for tensor in alike)
    assert (whole[:, ::2] == 1).all()
    assert (whole[:, 1::2] == own).all()
    assert (expanded == own).all()


def send_changed_buffers_only() -> None:
    """All get rank 0's buffers in a step in which a rank's have changed, by any bit, in whatever way."""
    model = nn.Linear(2, 2)
    model.register_buffer("values", torch.tensor([0.0, float("nan")]))
    buffers, own, sent = Buffers(model), dist.get_rank(), []
    assert own or buffers.list_changed_buffers() == []  # a NaN that stays is no change

    def copy_and_count(tensors: list[torch.Tensor]) -> None:
        sent.append(tensors)
        copy_from_rank_0(tensors)

    def write(value: float) -> None:
        model.values.data[0] = value  # of which autograd's counter of versions knows nothing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flyte_ddp.core.parallel.buffers.copy_from_rank_0", copy_and_count)
        for writer, value, expected, broadcasts in (
            (0, 0.0, 0.0, 1),  # the first step
            (0, 0.0, 0.0, 1),
            (0, -0.0, -0.0, 2),
            (1, 5.0, -0.0, 3),
            (2, -0.0, -0.0, 3),
            (0, float("inf"), float("inf"), 4),
        ):
            if own == writer:
                write(value)
            ranks_with_changes = sum_over_ranks(torch.tensor(float(buffers.stage_buffers_for_broadcast())))
            buffers.broadcast_staged_buffers(ranks_with_changes)
            assert (str(model.values[0].item()), len(sent)) == (str(expected), broadcasts)


class UsesSome(nn.Module):
    """Each rank uses parameters of its own, in an order of its own, and all but one of them somewhere."""

    def __init__(self) -> None:
        super().__init__()
        own = float(dist.get_rank())
        self.weights = nn.ParameterList([nn.Parameter(torch.full((size,), own)) for size in (2, 3, 4, 5)])

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        used = {0: [0, 1], 1: [1, 0], 2: [2, 1]}[dist.get_rank()]
        return sum(self.weights[index].sum() * factors[index] for index in used)


def use_different_parameters() -> None:
    for strategy in ("ddp", "hooks", "shared_memory"):
        model = UsesSome()
        sync = create_gradient_sync(model, strategy, Clock())
        assert not any(weight.any() for weight in model.weights), "all start from rank 0's values"
        for step in range(3):
            model.zero_grad()
            for last in (False, True):  # the gradients of both are added up
                with sync.micro_batch(last=last):
                    sync(torch.tensor([1.0, 10.0, 100.0, 1000.0]) * (step + 1)).backward()
            assert sync.average_gradients(own_sums()).tolist() == [4.5, 3.0]
            sums = [None if weight.grad is None else RANKS * weight.grad for weight in model.weights]
            gradients = [None if each is None else each.unique().tolist() for each in sums]
            factor = 2 * (step + 1)
            assert gradients[:3] == [[2 * factor], [30 * factor], [100 * factor]], strategy
            assert gradients[3] in (None, [0.0] if strategy == "ddp" else None), strategy


class UsedInAnotherOrder(nn.Module):
    """Its gradients come in another order than that in which its parameters are registered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in (2000, 3000, 4000, 5000)])

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(())
        for index in (2, 0, 3, 1):
            weight = self.weights[index]
            result = torch.tanh(result) + (weight.sin() * factors[: len(weight)]).mean()
        return result


def take_the_same_step_again() -> None:
    """A sum's rounding depends on the number's place in its bucket, which must not change after the first step.

    Otherwise a run that goes on from a checkpoint would not have the bits of one that was never cut off.
    """
    factors = torch.randn(5000, generator=torch.Generator().manual_seed(dist.get_rank()))
    for strategy in ("ddp", "hooks", "shared_memory"):
        model = UsedInAnotherOrder()
        sync = create_gradient_sync(model, strategy, Clock())
        steps = []
        for _ in range(3):
            model.zero_grad()
            with sync.micro_batch(last=True):
                sync(factors).backward()
            sync.average_gradients(torch.zeros(2))
            steps.append([weight.grad.clone() for weight in model.weights])
        first, *others = steps
        assert all(gradient.unique().numel() > 100 for gradient in first)
        for step in others:
            assert all(torch.equal(*both) for both in zip(first, step, strict=True)), strategy


def lose_a_rank(folder: Path) -> None:
    memory = NodeMemory(1)
    memory.wait_at_barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"rank \d exited while other ranks waited"):
        memory.wait_at_barrier()
    (folder / f"noticed-{dist.get_rank()}").touch()
    os._exit(0)


def add_up_in_all_ways(folder: Path) -> None:
    for bucket_bytes in (BUCKET_BYTES, 1, 60, 1000):  # all, each alone, some: they have 28, 960, 48 and 2 bytes
        average_random_gradients(bucket_bytes)
    send_changed_buffers_only()
    read_late(folder)
    copy_odd_tensors()
    use_different_parameters()
    take_the_same_step_again()


@pytest.mark.slow
def test_gradients_of_all_ranks_are_averaged(tmp_path: Path) -> None:
    assert run_ranks(add_up_in_all_ways, tmp_path, RANKS) == [0] * RANKS


@pytest.mark.slow
def test_the_others_notice_at_once_that_a_rank_has_gone(tmp_path: Path) -> None:
    run_ranks(lose_a_rank, tmp_path, RANKS)
    assert {path.name for path in tmp_path.glob("noticed-*")} == {"noticed-0", "noticed-2"}
