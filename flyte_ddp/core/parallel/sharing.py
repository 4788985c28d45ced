"""Parts for user-defined training loops: a rank's share of each batch, exact even if shares differ in size.

    order = batches(len(data), 64, seed=0, epoch=epoch, first=steps_done_in_this_epoch)
    loader = DataLoader(data, batch_sampler=order)
    for factor, (inputs, targets) in zip(order.loss_factors(), loader, strict=True):
        loss = functional.cross_entropy(model(inputs), targets)  # model: torch's DistributedDataParallel
        (factor * loss).backward()

The number of ranks decides which rank computes a sample, and never changes the samples of a step.
"""

import os
from collections.abc import Iterator

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.order.sampling import ListedOrder, compute_slice_start, steps_per_epoch, take_slice
from flyte_ddp.core.parallel import distributed


class RankBatches(Sampler[list[int]]):
    """A ``batch_sampler`` for torch's DataLoader: a rank's samples of each global batch left in an epoch."""

    def __init__(self, order: ListedOrder, batch_size: int, epoch: int, first: int, place: tuple[int, int]) -> None:
        """Begin with global batch ``first`` (from 0) of an epoch.

        ``order`` has the samples and the seed, and ``place`` is the rank and the number of ranks.
        """
        self.order, self.batch_size, self.epoch, self.first, self.place = order, batch_size, epoch, first, place

    def __len__(self) -> int:
        """Return the number of global batches left, which is equal on all ranks."""
        return steps_per_epoch(len(self.order), self.batch_size) - self.first

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's samples of each global batch.

        If the rank has no samples in a batch, yields a sample whose loss factor is 0.
        """
        for batch in self.order.batches(self.epoch, self.batch_size, self.first):
            share = take_slice(batch, *self.place)
            yield (share if len(share) else batch[:1]).tolist()  # DDP needs a backward pass on each rank

    def loss_factors(self) -> Iterator[float]:
        """Yield the factor for this rank's mean loss in each global batch left in the epoch.

        With the factor, the average over ranks of loss and gradients is the mean over the global batch. The factor is
        this rank's number of samples, times the number of ranks, divided by the samples of the global batch. If this
        rank has no samples in a batch, the factor is 0.0.
        """
        rank, num_ranks = self.place
        for start in range(self.first * self.batch_size, len(self.order), self.batch_size):
            size = min(self.batch_size, len(self.order) - start)
            share = compute_slice_start(size, rank + 1, num_ranks) - compute_slice_start(size, rank, num_ranks)
            yield share * num_ranks / size


def batches(
    n: int,
    batch_size: int,
    seed: int,
    epoch: int,
    first: int = 0,
    *,
    rank: int | None = None,
    num_ranks: int | None = None,
) -> RankBatches:
    """Return this rank's samples of each global batch of an epoch: a ``batch_sampler`` for torch's DataLoader.

    Each epoch permutes all of 0..n-1, by ``seed`` and ``epoch`` alone. No sample is dropped or repeated, so the last
    batch may be smaller. Multiply the mean loss of a rank's batch by the batch's factor from
    :meth:`RankBatches.loss_factors`. A rank without samples in a batch gets a sample with factor 0.0, which BatchNorm
    layers of the rank see, too.

    Args:
        n: Number of samples.
        batch_size: Samples of all ranks together in a batch.
        seed: Seed of the permutations.
        epoch: Number of the epoch, from 0.
        first: Batches of this epoch that are done, for a resume.
        rank: This rank. By default of torch's process group, else of torchrun's variables, else 0.
        num_ranks: Number of ranks. The default is found as for ``rank``, else 1. Give both or none.

    Raises:
        UserError: A number is out of range, or only one of ``rank`` and ``num_ranks`` is given.
    """
    require_at_least(1, n=n, batch_size=batch_size)
    require_at_least(0, seed=seed, epoch=epoch, first=first)
    if first > (total := steps_per_epoch(n, batch_size)):
        raise UserError(
            f"first={first}: must be at most {total}, the batches of an epoch ({n} samples by {batch_size}); count "
            "only this epoch's batches"
        )
    return RankBatches(
        ListedOrder(np.arange(n), seed), batch_size, epoch, first, get_rank_and_num_ranks(rank, num_ranks)
    )


def evaluation_batches(
    n: int, batch_size: int, *, rank: int | None = None, num_ranks: int | None = None
) -> BatchSampler:
    """Return this rank's batches of an evaluation: a ``batch_sampler`` for torch's DataLoader.

    All ranks together get each of 0..n-1 once. Each batch of ``batch_size`` samples is whole on one rank, so a sample's
    result has the same bits for any number of ranks. Ranks get different numbers of batches, or none. Therefore
    exchange results after the loop, for example by :func:`sum_over_ranks`, and evaluate ``ddp.module``.

    Args:
        n: Number of samples.
        batch_size: Samples in a batch. The last batch may be smaller.
        rank: This rank. By default of torch's process group, else of torchrun's variables, else 0.
        num_ranks: Number of ranks. The default is found as for ``rank``, else 1. Give both or none.

    Raises:
        UserError: A number is out of range, or only one of ``rank`` and ``num_ranks`` is given.
    """
    require_at_least(0, n=n)
    require_at_least(1, batch_size=batch_size)
    place, places = get_rank_and_num_ranks(rank, num_ranks)
    first, last = (compute_slice_start(steps_per_epoch(n, batch_size), each, places) for each in (place, place + 1))
    return BatchSampler(range(first * batch_size, min(last * batch_size, n)), batch_size, drop_last=False)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Add up a tensor over all ranks, in place, and return the tensor. All ranks must call this function.

    The tensor must be on the CPU for gloo, and on the GPU for NCCL. In a single process, the tensor is unchanged.

    Raises:
        UserError: torchrun's WORLD_SIZE is above 1, and this process has no process group.
    """
    if not dist.is_initialized() and (ranks := get_rank_and_num_ranks()[1]) > 1:
        raise UserError(
            f"sum_over_ranks: this process is one of {ranks} ranks (WORLD_SIZE), but has no process group; first call "
            "join() of current_rank(), or torch.distributed.init_process_group()"
        )
    return distributed.sum_over_ranks(values)


def get_rank_and_num_ranks(rank: int | None = None, num_ranks: int | None = None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as a pair.

    Uses the arguments if given, else torch's process group, else torchrun's RANK and WORLD_SIZE, else 0 and 1.

    Raises:
        UserError: Only one argument is given, or ``rank`` is out of range.
    """
    if rank is None and num_ranks is None:
        if not dist.is_initialized() and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return distributed.rank(), distributed.world_size()
    if rank is None or num_ranks is None or not 0 <= rank < num_ranks:
        raise UserError(f"rank={rank}, num_ranks={num_ranks}: give both or none, and 0 <= rank < num_ranks")
    return rank, num_ranks


def require_at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise UserError(f"{name}={number}: must be at least {least}")
