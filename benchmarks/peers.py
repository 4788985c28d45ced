"""The peers' loops of ``epoch`` and ``table``: plain DDP, Lightning's ``ddp_spawn`` and Accelerate.

No peer uses the library's training. As in our runs, each rank has a single thread, and nothing is logged or saved. The
loops of ``table`` use an optimiser in one kernel. The loops of ``epoch`` follow the tutorial. Items pass singly through
PIL and torchvision's transforms. In the plain loop, other ranks wait while rank 0 evaluates.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchvision import datasets, transforms

from benchmarks.sample_tasks import build_mlp, generate_table, table_loss

Order = dict[str, Any]
Epoch = dict[str, float]  # its seconds, and in the task ``images`` its test accuracy


class Tutorial(nn.Module):
    """The tutorial's network as the tutorial writes it: relu before pooling, and log-probabilities as output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(4 * 4 * 50, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities [N, 10] of images [N, 1, 28, 28]."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.view(-1, 4 * 4 * 50)))
        return functional.log_softmax(self.fc2(x), dim=1)


def open_images(order: Order, *, train: bool) -> Any:
    """Return torchvision's data set over the files in the order's folder."""
    normalise = transforms.Normalize((order["mean"],), (order["std"],))
    return datasets.FashionMNIST(
        order["data"], train=train, transform=transforms.Compose([transforms.ToTensor(), normalise])
    )


def open_samples(order: Order) -> Dataset[Any]:
    if order["task"] == "images":
        return open_images(order, train=True)  # type: ignore[no-any-return]
    return TensorDataset(*map(torch.from_numpy, generate_table(order["samples"], 0)))


MODELS: dict[str, Callable[[], nn.Module]] = {"images": Tutorial, "table": build_mlp}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"images": functional.nll_loss, "table": table_loss}


def make_loader(order: Order, **options: Any) -> Any:
    """Return a DataLoader as tutorials have it, of a rank's share of the batch."""
    return DataLoader(open_samples(order), order["batch_size"] // order["num_ranks"], **options)


def make_test_loader(order: Order) -> Any:
    return DataLoader(open_images(order, train=False), order["test_batch_size"])


def make_optimizer(model: nn.Module, order: Order) -> torch.optim.Optimizer:
    if order["task"] == "images":
        return torch.optim.SGD(model.parameters(), lr=order["learning_rate"], momentum=order["momentum"])
    return torch.optim.Adam(model.parameters(), lr=order["learning_rate"], fused=True)


def train_plain(rank: int, order: Order, store: str) -> None:
    """Train as a rank of a DDP loop. Rank 0 writes the epochs."""
    ranks: int = order["num_ranks"]
    model = MODELS[order["task"]]()
    sampler: Any = None
    if ranks > 1:
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        sampler = DistributedSampler(open_samples(order), ranks, rank, seed=order["seed"])
        model = DistributedDataParallel(model)
    loader = make_loader(order, sampler=sampler, shuffle=sampler is None)
    test_loader = make_test_loader(order) if order["task"] == "images" else None
    optimizer, compute_loss = make_optimizer(model, order), LOSSES[order["task"]]

    def train_epoch(epoch: int) -> Epoch:
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        for step, (inputs, targets) in enumerate(loader, start=1):
            optimizer.zero_grad()
            compute_loss(model(inputs), targets).backward()
            optimizer.step()
            if step == order.get("max_steps"):
                break
        found = {"accuracy": compute_accuracy(model, test_loader)} if test_loader is not None and rank == 0 else {}
        if ranks > 1:
            distributed.barrier()
        return found

    time_epochs(rank, order, train_epoch)
    if ranks > 1:
        distributed.destroy_process_group()


@torch.no_grad()
def compute_accuracy(model: nn.Module, loader: Any) -> float:
    model.eval()
    correct = total = 0
    for images, targets in loader:
        correct += int((model(images).argmax(1) == targets).sum())
        total += len(targets)
    return correct / total


def train_accelerate(rank: int, order: Order, store: str) -> None:
    """Train as a rank with Accelerate. Rank 0 writes the epochs."""
    from accelerate import Accelerator

    ranks: int = order["num_ranks"]
    if ranks > 1:
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    accelerator = Accelerator(cpu=True)
    model = MODELS[order["task"]]()
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model, order), make_loader(order, shuffle=True)
    )
    compute_loss = LOSSES[order["task"]]

    def train_epoch(epoch: int) -> Epoch:
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(compute_loss(model(inputs), targets))
            optimizer.step()
        return {}

    time_epochs(rank, order, train_epoch)
    accelerator.end_training()


def time_epochs(rank: int, order: Order, train_epoch: Callable[[int], Epoch]) -> None:
    epochs = []
    for epoch in range(order["epochs"]):
        begin = time.perf_counter()
        found = train_epoch(epoch)
        epochs.append({"seconds": time.perf_counter() - begin, **found})
    if rank == 0:
        Path(order["output"]).write_text(json.dumps(epochs))


class Network(lightning.LightningModule):
    """The task's network with loss and optimiser, which records the epochs."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order, self.network, self.compute_loss = order, MODELS[order["task"]](), LOSSES[order["task"]]
        self.epochs: list[Epoch] = []
        self.begin = 0.0

    def setup(self, stage: str) -> None:
        torch.set_num_threads(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self, self.order)

    def on_train_epoch_start(self) -> None:
        self.begin = time.perf_counter()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.compute_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        hits = (self.network(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", hits, on_epoch=True, sync_dist=True, batch_size=len(batch[1]))

    def on_train_epoch_end(self) -> None:  # Lightning evaluates before this
        found = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.epochs.append({"seconds": time.perf_counter() - self.begin, **found})

    def on_fit_end(self) -> None:
        if self.trainer.is_global_zero:
            Path(self.order["output"]).write_text(json.dumps(self.epochs))


def train_lightning(order: Order) -> None:
    lightning.seed_everything(order["seed"], verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=order["num_ranks"],
        strategy="ddp_spawn" if order["num_ranks"] > 1 else "auto",
        max_epochs=order["epochs"],
        limit_train_batches=order.get("max_steps") or 1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    test_loader = make_test_loader(order) if order["task"] == "images" else None
    trainer.fit(Network(order), make_loader(order, shuffle=True), test_loader)


def run_rank(rank: int, order: Order, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(order["seed"])
    {"plain": train_plain, "accelerate": train_accelerate}[order["side"]](rank, order, store)


def run_peer(order: Order) -> list[Epoch]:
    with tempfile.TemporaryDirectory() as folder:
        order |= {"output": f"{folder}/epochs.json"}
        if order["side"] == "lightning":
            train_lightning(order)
        elif order["num_ranks"] == 1:
            run_rank(0, order, "")
        else:
            spawn(run_rank, (order, f"{folder}/store"), order["num_ranks"])  # type: ignore[no-untyped-call]
        epochs: list[Epoch] = json.loads(Path(order["output"]).read_text())
        return epochs
