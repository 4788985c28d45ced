"""A function for torchrun on spawned ranks, as it is."""

import pytest
import torch
import torchrun_script
from torch import nn
from torch.utils.data import DistributedSampler

import flyte_ddp


@pytest.mark.slow
def test_two_ranks_train_as_one_process() -> None:
    losses, local_rank, local_world_size = flyte_ddp.run_ranks(torchrun_script.main, num_ranks=2)
    assert (local_rank, local_world_size) == (0, 2)
    assert losses == pytest.approx(train_in_one_process(num_ranks=2), rel=1e-9)


def train_in_one_process(num_ranks: int) -> list[float]:
    """Return the losses of training on the batches of all ranks together."""
    samples, model, losses = torchrun_script.make_samples(), torchrun_script.make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(torchrun_script.EPOCHS):
        samplers = [DistributedSampler(samples, num_ranks, rank, seed=3) for rank in range(num_ranks)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        order = torch.tensor([[*sampler] for sampler in samplers])
        for indices in order.split(torchrun_script.BATCH, dim=1):
            inputs, targets = samples[indices.flatten()]
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
