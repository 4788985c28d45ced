"""A user-defined DistributedDataParallel and sampler, from a blog that builds both: ResNet18 on FashionMNIST.

    python examples/custom_ddp/custom_ddp.py                    # digits, in FashionMNIST's format
    python examples/custom_ddp/custom_ddp.py --source /usr/share/datasets/fashion-mnist --ddp torch --num-epochs 10

Changes to the blog's program:

- run_ranks() replaces mp.spawn(), current_rank() returns the device, and init_process_group() needs no address.
- gloo cannot average, so gradients are summed and divided. torch has no SyncBatchNorm for CPUs. Therefore each CPU rank
  normalises by its own samples, also with --ddp torch.
- CustomDistSampler drops the samples beyond a multiple of the number of ranks. An epoch can begin in the middle.
- Losses are averaged in each step instead of each epoch, because load() returns rank 0's state.
- load(), save() and due(): after a kill the same command resumes. record() writes the losses that were printed.
"""

import argparse
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from torchvision import models
from torchvision.datasets import FashionMNIST
from torchvision.transforms import Compose, Grayscale, ToTensor

from flyte_ddp import current_rank, run_ranks


def average(values: Tensor) -> None:
    """Replace a tensor by its mean over all ranks."""
    dist.all_reduce(values)
    values /= dist.get_world_size()


class CustomDDP(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(lambda own: average(own.grad))

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class CustomDistSampler(Sampler[int]):
    def __init__(self, dataset: Sized, epoch: int = 0, first: int = 0, *, shuffle: bool = True) -> None:
        """Begin with this rank's sample number ``first`` of the epoch."""
        number, rank, world_size = len(dataset), dist.get_rank(), dist.get_world_size()
        torch.manual_seed(epoch)
        order = torch.randperm(number) if shuffle else torch.arange(number)
        self.indices = order[: number // world_size * world_size][rank::world_size][first:].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


def train_dist(data: str, num_epochs: int, batch_size: int, ddp: str = "custom") -> list[tuple[float, float]]:
    """Train on all ranks, and return the mean training and validation loss of each epoch."""
    here = current_rank()
    torch.manual_seed(0)
    dist.init_process_group("nccl" if here.device.type == "cuda" else "gloo")
    net = models.resnet18(num_classes=10).to(here.device)
    if here.device.type == "cuda":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    saved = here.load() or {"losses": [], "history": [], "step": 0, "model": net.state_dict()}
    step, train_losses = saved["step"], saved["losses"]
    history: list[tuple[float, float]] = saved["history"]
    net.load_state_dict(saved["model"])
    model = CustomDDP(net) if ddp == "custom" else nn.parallel.DistributedDataParallel(net)
    transform = Compose([Grayscale(num_output_channels=3), ToTensor()])
    train_set, val_set = (FashionMNIST(data, train=train, transform=transform) for train in (True, False))
    per_rank = batch_size // here.world_size

    def compute_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs.to(here.device)), targets.to(here.device))

    for epoch in range(len(history), num_epochs):
        sampler = CustomDistSampler(train_set, epoch, first=len(train_losses) * per_rank)
        for batch in DataLoader(train_set, per_rank, sampler=sampler):
            optimizer.zero_grad()
            loss = compute_loss(*batch)
            loss.backward()
            optimizer.step()
            step += 1
            average(loss.detach())
            train_losses.append(loss.item())
            if here.due():
                here.save(step, {"losses": train_losses, "history": history, "step": step, "model": net.state_dict()})
        val_losses = []
        with torch.no_grad():  # in training mode, as in the blog, so each batch is normalised by its own statistics
            for batch in DataLoader(val_set, per_rank, sampler=CustomDistSampler(val_set, shuffle=False)):
                average(loss := compute_loss(*batch))
                val_losses.append(loss.item())
        history.append((sum(train_losses) / len(train_losses), sum(val_losses) / len(val_losses)))
        here.record(step, train_loss=history[-1][0], val_loss=history[-1][1])
        train_losses = []
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", help="folder with FashionMNIST's four files (default: the digits)")
    parser.add_argument("--folder", default="runs/custom_ddp", help="run folder: data, checkpoints, records")
    parser.add_argument("--ddp", choices=["custom", "torch"], default="custom")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--num-epochs", type=int, default=1)
    args = parser.parse_args()
    from examples.sample_data import unpack_mnist_files

    data = unpack_mnist_files("FashionMNIST", args.source, Path(args.folder, "data"))
    arguments = str(data), args.num_epochs, args.batch_size, args.ddp
    print(run_ranks(train_dist, *arguments, num_ranks=args.world_size, folder=args.folder))
