"""The baseline of ``epoch``: a DDP loop as the tutorial has it, independent of the library.

Items come one by one from torchvision's FashionMNIST through PIL and transforms. Each rank has a DistributedSampler.
Rank 0 evaluates the whole test set while the others wait at a barrier.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

Loader = DataLoader[tuple[Tensor, Tensor]]


class Net(nn.Module):
    """The tutorial's network as the tutorial writes it: relu before pooling, log-probabilities as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(4 * 4 * 50, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities [N, 10] of images [N, 1, 28, 28]."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.view(-1, 4 * 4 * 50)))
        return functional.log_softmax(self.fc2(x), dim=1)


def load(order: dict[str, Any], *, train: bool) -> Any:
    """Torchvision's data set over the files in the order's folder."""
    normalise = transforms.Normalize((order["mean"],), (order["std"],))
    return datasets.FashionMNIST(
        order["data"], train=train, transform=transforms.Compose([transforms.ToTensor(), normalise])
    )


def train_rank(rank: int, order: dict[str, Any], store: str) -> None:
    """One rank's training; rank 0 writes seconds and test accuracy of each epoch into the order's output."""
    ranks: int = order["num_ranks"]
    torch.set_num_threads(1)
    torch.manual_seed(order["seed"])
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    train_set, test_set = load(order, train=True), load(order, train=False)
    sampler: Any = DistributedSampler(train_set, num_replicas=ranks, rank=rank, seed=order["seed"])
    train_loader: Loader = DataLoader(train_set, batch_size=order["batch_size"] // ranks, sampler=sampler)
    test_loader: Loader = DataLoader(test_set, batch_size=order["test_batch_size"])
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=order["learning_rate"], momentum=order["momentum"])
    epochs = []
    distributed.barrier()
    for epoch in range(order["epochs"]):
        begin = time.perf_counter()
        sampler.set_epoch(epoch)
        train(model, train_loader, optimizer, order["max_steps"])
        accuracy = test(model, test_loader) if rank == 0 else 0.0
        distributed.barrier()
        epochs.append({"seconds": time.perf_counter() - begin, "accuracy": accuracy})
    if rank == 0:
        Path(order["output"]).write_text(json.dumps(epochs))
    distributed.destroy_process_group()


def train(model: nn.Module, loader: Loader, optimizer: torch.optim.Optimizer, max_steps: int) -> None:
    """One epoch, or its first ``max_steps`` steps."""
    model.train()
    for step, (images, targets) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(images), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step == max_steps:
            break


@torch.no_grad()
def test(model: nn.Module, loader: Loader) -> float:
    """Accuracy on all test samples."""
    model.eval()
    correct = total = 0
    for images, targets in loader:
        correct += int((model(images).argmax(1) == targets).sum())
        total += len(targets)
    return correct / total


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        spawn(train_rank, (request, f"{folder}/store"), request["num_ranks"])  # type: ignore[no-untyped-call]
