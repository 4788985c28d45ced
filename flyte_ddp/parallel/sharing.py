"""Parts for training loops of a user's own: a rank's share of each batch, exact also where the ranks' shares differ.

    order = batches(len(data), 64, seed=0, epoch=epoch, first=steps_done_in_this_epoch)
    loader = DataLoader(data, batch_sampler=order)
    for factor, (inputs, targets) in zip(order.loss_factors(), loader, strict=True):
        loss = functional.cross_entropy(model(inputs), targets)  # model: torch's DistributedDataParallel
        (factor * loss).backward()

The number of ranks decides who computes a sample, never which samples make up a step.
"""

import os
from collections.abc import Iterator

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler

from flyte_ddp.errors import UserError
from flyte_ddp.order.sampling import ListedOrder, slice_start, steps_per_epoch, take_slice
from flyte_ddp.parallel import distributed


class RankBatches(Sampler[list[int]]):
    """A rank's samples of each global batch that is left of an epoch: a ``batch_sampler`` for torch's DataLoader."""

    def __init__(self, order: ListedOrder, batch_size: int, epoch: int, first: int, place: tuple[int, int]) -> None:
        """Begin with global batch ``first``, from 0; ``place`` is the rank and the number of ranks."""
        self.order, self.batch_size, self.epoch, self.first, self.place = order, batch_size, epoch, first, place

    def __len__(self) -> int:
        """Return the number of global batches left, which is equal on all ranks."""
        return steps_per_epoch(len(self.order), self.batch_size) - self.first

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's samples of each global batch; if it has none, one whose loss factor is 0."""
        for batch in self.order.batches(self.epoch, self.batch_size, self.first):
            own = take_slice(batch, *self.place)
            yield (own if len(own) else batch[:1]).tolist()  # DDP needs a backward pass on each rank

    def loss_factors(self) -> Iterator[float]:
        """Yield for each batch the factor for the mean loss of this rank's samples: own samples * ranks / batch's size.

        With it, the average over ranks of loss and gradients is the mean over the global batch. A rank whose sample
        does not count gets 0.0.
        """
        rank, num_ranks = self.place
        for start in range(self.first * self.batch_size, len(self.order), self.batch_size):
            size = min(self.batch_size, len(self.order) - start)
            own = slice_start(size, rank + 1, num_ranks) - slice_start(size, rank, num_ranks)
            yield own * num_ranks / size


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

    Each epoch permutes all of 0..n-1, by ``seed`` and ``epoch`` alone; no sample is dropped or repeated, so the last
    batch may be smaller. Multiply the mean loss of a rank's batch by its :meth:`RankBatches.loss_factors`. A rank
    without samples in a batch gets one with factor 0.0, which its BatchNorm sees, too. ``batch_size`` is that of all
    ranks together; ``epoch`` counts from 0; ``first`` batches are done in it, for a resume. Without ``rank`` and
    ``num_ranks`` these are of torch's process group, else of torchrun's variables, else 0 of 1. Raises UserError for a
    number out of range.
    """
    require_at_least(1, n=n, batch_size=batch_size)
    require_at_least(0, seed=seed, epoch=epoch, first=first)
    if first > (total := steps_per_epoch(n, batch_size)):
        raise UserError(
            f"first={first}: an epoch has {total} batches, {n} samples by {batch_size}; count the batches of this epoch"
        )
    return RankBatches(ListedOrder(np.arange(n), seed), batch_size, epoch, first, find_place(rank, num_ranks))


def evaluation_batches(
    n: int, batch_size: int, *, rank: int | None = None, num_ranks: int | None = None
) -> BatchSampler:
    """Return this rank's batches of an evaluation, a ``batch_sampler``: all ranks together get each of 0..n-1 once.

    Batches are whole, of ``batch_size`` samples on one rank, so a sample's result has the same bits for any number of
    ranks. Ranks get different numbers of batches, or none: exchange results after the loop, as by
    :func:`sum_over_ranks`, and evaluate ``ddp.module``. ``rank`` and ``num_ranks`` are as in :func:`batches`. Raises
    UserError for a number out of range.
    """
    require_at_least(0, n=n)
    require_at_least(1, batch_size=batch_size)
    place, places = find_place(rank, num_ranks)
    first, last = (slice_start(steps_per_epoch(n, batch_size), each, places) for each in (place, place + 1))
    return BatchSampler(range(first * batch_size, min(last * batch_size, n)), batch_size, drop_last=False)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Add up a tensor over all ranks, in place (CPU for gloo, GPU for NCCL); return it. All ranks must call it.

    Raises UserError if torchrun's WORLD_SIZE is above 1 and this process has no process group.
    """
    if not dist.is_initialized() and (ranks := find_place()[1]) > 1:
        raise UserError(
            f"sum_over_ranks: this is one of {ranks} ranks (WORLD_SIZE) and has no process group to add up over; "
            "first call join() of current_rank(), or torch.distributed.init_process_group()"
        )
    return distributed.sum_over_ranks(values)


def find_place(rank: int | None = None, num_ranks: int | None = None) -> tuple[int, int]:
    """Return the given rank and number of ranks, else the process group's, else RANK and WORLD_SIZE, else 0 and 1."""
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
