"""A rank's parts of a step's global batch: samples, loading, mixing, and the weights of losses."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flyte_ddp.core.machine.device_copy import copy_to_device
from flyte_ddp.core.objectives.objective import convert_float_tensors
from flyte_ddp.core.order import sampling
from flyte_ddp.core.order.augmentation import choose_mixup_partners, draw_mixup_shares
from flyte_ddp.core.parallel.distributed import rank, sum_over_ranks, world_size
from flyte_ddp.core.samples.leaves import Leaves
from flyte_ddp.core.training.training_state import TrainingState


class RankSlice(NamedTuple):
    """A rank's samples of a micro-batch.

    A rank without samples has another rank's sample, which must not count.
    """

    samples: sampling.Indices  # never empty: many models fail on an empty batch, and all ranks must join each exchange
    has_samples: bool
    partners: sampling.Indices | None = None  # with mixup: the samples that these are mixed with
    step: int = 0  # the optimiser step, by which mixup draws

    def list_loads(self) -> list[sampling.Indices]:
        """Return the arrays of samples to load: this slice's samples and, with mixup, the partners."""
        return [self.samples] if self.partners is None else [self.samples, self.partners]


class LoadedSlice(NamedTuple):
    """Inputs of a slice, as stored, with the targets for the slice's loss."""

    samples: int  # of the slice
    inputs: list[Leaves]  # of the slice, and with mixup of its partners
    shares: list[Tensor]  # with mixup: shares of the samples in their mixtures, and of the partners, fp64 [n] each
    # Targets with the weights of their losses; None: all weights are 1. With mixup the partners' targets, too, and the
    # weights contain the shares.
    targets: Sequence[tuple[Leaves, Tensor | None]]

    def prepare_inputs(self, prepare: Callable[[Leaves], Leaves]) -> Leaves:
        """Return the slice's inputs, converted by ``prepare`` and, with mixup, mixed with the partners' inputs."""
        if not self.shares:
            return prepare(self.inputs[0])

        def mix(samples: Tensor, partners: Tensor) -> Tensor:
            mixed = torch.zeros_like(samples)
            for values, shares in zip((samples, partners), self.shares, strict=True):
                mixed += values * shares.to(values.dtype).view(-1, *[1] * (values.dim() - 1))
            return mixed

        return tree_map(mix, *(prepare(inputs) for inputs in self.inputs))


def split_batch_for_rank(
    batch: sampling.Indices, parts: int, partners: sampling.Indices | None = None, step: int = 0
) -> list[RankSlice]:
    """Divide a global batch into ``parts`` micro-batches, and return this rank's slice of each micro-batch.

    If the batch has fewer samples than ``parts``, each sample is a micro-batch.

    Args:
        partners: With mixup, the sample with which each sample of the batch is mixed.
        step: Number of the optimiser step, which each slice keeps.
    """
    if parts == world_size() == 1 and partners is None:
        return [RankSlice(batch, has_samples=True)]
    parts = min(parts, len(batch))

    def take_rank_slice(samples: sampling.Indices, part: int) -> tuple[sampling.Indices, bool]:
        micro_batch = sampling.take_slice(samples, part, parts)
        rank_samples = sampling.take_slice(micro_batch, rank(), world_size())
        return (rank_samples, True) if len(rank_samples) else (micro_batch[:1], False)

    if partners is None:
        return [RankSlice(*take_rank_slice(batch, part)) for part in range(parts)]
    return [RankSlice(*take_rank_slice(batch, part), take_rank_slice(partners, part)[0], step) for part in range(parts)]


def list_rank_slices(state: TrainingState, batch: sampling.Indices, step: int) -> list[RankSlice]:
    """Return this rank's slice of each micro-batch of a global batch, with mixup's partners if mixup is on."""
    loop = state.plan.loop
    partners = choose_mixup_partners(batch, loop.seed, step) if loop.mixup else None
    return split_batch_for_rank(batch, loop.accumulation_steps, partners, step)


def load_slice(state: TrainingState, part: RankSlice) -> LoadedSlice:
    """Load this rank's slice of a micro-batch, and return inputs, targets and weights on the device.

    With mixup, also loads the partners, and the weights of losses contain the shares of samples and partners.
    """
    loads = [state.training.load_batch(samples, state.epoch) for samples in part.list_loads()]
    inputs = [batch.inputs for batch in loads]
    targets = [
        (convert_float_tensors(batch.targets, state.dtype), state.objective.weights(batch.targets)) for batch in loads
    ]
    if part.partners is None:
        return LoadedSlice(len(part.samples), inputs, [], targets)
    drawn = draw_mixup_shares(part.samples, state.plan.loop.mixup, state.plan.loop.seed, part.step)
    sample_shares = copy_to_device(torch.from_numpy(drawn), state.device)
    shares = [sample_shares, 1 - sample_shares]
    weighted = [
        (values, share if weights is None else weights * share.view(-1, *[1] * (weights.dim() - 1)))
        for (values, weights), share in zip(targets, shares, strict=True)
    ]
    return LoadedSlice(len(part.samples), inputs, shares, weighted)


def load_slices_and_sum_weights(
    state: TrainingState, parts: Sequence[RankSlice], samples: int
) -> tuple[Iterator[LoadedSlice], Tensor | int]:
    """Return an iterator over a step's loaded slices, and the sum of the losses' weights over all ranks.

    If the objective has weights, this call loads all slices, and is collective. Without weights, the iterator loads
    each slice when it is needed, and the sum is ``samples``.

    Args:
        parts: This rank's slices of the micro-batches.
        samples: Samples of the global batch.
    """
    loading = (load_slice(state, part) for part in parts)
    if not state.objective.has_weights:
        return loading, samples  # with mixup, too: the two shares of a sample add up to 1
    with state.clock("loading"):
        loaded = [*loading]  # now, because the first backward pass needs the sum
    with state.clock("communication"):
        weight_sum = torch.zeros((), dtype=torch.float64, device=state.device)
        for part, each in zip(parts, loaded, strict=True):
            for _, weights in each.targets:
                weight = each.samples if weights is None else weights.sum(dtype=torch.float64)
                weight_sum = weight_sum + part.has_samples * weight
        return iter(loaded), sum_over_ranks(weight_sum)
