"""Flyte's tutorial on a machine with several GPUs: MNIST's network, trained by DistributedDataParallel.

    python examples/tutorial/tutorial.py                                              # digits, in MNIST's format
    python examples/tutorial/tutorial.py --source /usr/share/datasets/fashion-mnist   # or a folder with MNIST's files

Changes to the tutorial:

- run_ranks() replaces mp.spawn(). It returns rank 0's result, so no file of accuracies is needed.
- current_rank() returns rank, number of ranks and device. The rank's join() replaces dist_setup(), also on CPUs.
- record() replaces wandb.log(), and also logs to wandb, if a key is set. Tables of images are omitted.
- load(), save() and due(): after a kill the same command resumes, also inside an epoch.
- Each epoch has a different order. MNIST's files come from a folder instead of a download.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from flyte_ddp import current_rank, run_ranks

MODEL_FILE = "mnist_cnn.pt"  # in the run's folder
TRANSFORM = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])


@dataclass
class Hyperparameters:
    sgd_momentum: float = 0.5
    seed: int = 1
    log_interval: int = 10
    batch_size: int = 64
    test_batch_size: int = 1000
    epochs: int = 3
    learning_rate: float = 0.01


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(4 * 4 * 50, 500), nn.Linear(500, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


@torch.no_grad()
def test(model: nn.Module, device: torch.device, test_loader: DataLoader[Any]) -> float:
    correct = total = 0
    for images, targets in test_loader:
        correct += int((model(images.to(device)).argmax(1).cpu() == targets).sum())
        total += len(targets)
    return correct / total


def train_mnist(hp: Hyperparameters, data_dir: str) -> list[float]:
    """Train on all ranks. Rank 0 tests after each epoch, writes MODEL_FILE, and returns the accuracies."""
    here = current_rank()
    here.join()
    torch.manual_seed(hp.seed)
    training_set, test_set = (datasets.MNIST(data_dir, train=each, transform=TRANSFORM) for each in (True, False))
    net = Net().to(here.device)
    optimizer = optim.SGD(net.parameters(), lr=hp.learning_rate, momentum=hp.sgd_momentum)
    saved = here.load() or {"step": 0, "accuracies": []}
    step: int = saved["step"]
    accuracies: list[float] = saved["accuracies"]
    if step:
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model = nn.parallel.DistributedDataParallel(net)
    sampler: DistributedSampler[Any] = DistributedSampler(
        training_set, num_replicas=here.world_size, rank=here.rank, seed=hp.seed
    )
    steps = math.ceil(len(sampler) / hp.batch_size)  # of an epoch
    for epoch in range(len(accuracies), hp.epochs):
        sampler.set_epoch(epoch)
        left = [*sampler][(step - epoch * steps) * hp.batch_size :]
        for data, target in DataLoader(training_set, hp.batch_size, sampler=left):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data.to(here.device)), target.to(here.device))
            loss.backward()
            optimizer.step()
            step += 1
            if step % hp.log_interval == 0:
                here.record(step, loss=loss.item(), epoch=epoch)
            if here.due():
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                here.save(step, {**state, "step": step, "accuracies": accuracies})
        if here.rank == 0:
            accuracies.append(test(net, here.device, DataLoader(test_set, hp.test_batch_size)))
            here.record(step, accuracy=accuracies[-1])
        dist.barrier()  # other ranks wait for rank 0's test
    if here.rank == 0:
        torch.save(net.state_dict(), here.folder / MODEL_FILE)
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", help="folder with MNIST's four files (default: the digits)")
    parser.add_argument("--folder", default="runs/tutorial", help="run folder: data, checkpoints, records, weights")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    from examples.sample_data import unpack_mnist_files

    hp, data = Hyperparameters(epochs=args.epochs), unpack_mnist_files("MNIST", args.source, Path(args.folder, "data"))
    accuracies = run_ranks(train_mnist, hp, str(data), num_ranks=args.world_size, folder=args.folder)
    print(f"accuracies {accuracies}, weights {Path(args.folder, MODEL_FILE)}")
