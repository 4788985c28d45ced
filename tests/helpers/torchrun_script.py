"""A program for torchrun that does not use flyte_ddp."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

BATCH, EPOCHS = 8, 3


def make_samples() -> Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(64, size, generator=generator, dtype=torch.float64) for size in (5, 2)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def main() -> tuple[list[float], int, int]:
    """Train. Return the mean loss of the last epoch, the local rank, and the number of processes of this host."""
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    sampler = DistributedSampler(make_samples(), seed=3)
    loader = DataLoader(make_samples(), batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(mean := loss.detach().clone())
            losses.append(mean.item() / dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
    return losses, local_rank, int(os.environ["LOCAL_WORLD_SIZE"])
