"""Peers of ``table`` and ``gpt``: a plain DDP loop, Lightning's ``ddp_spawn`` and Accelerate, with torch's DataLoader.

``python -m benchmarks.sample_peers ORDER`` trains as the order (JSON) says, and writes the seconds of each epoch. None
uses the library. As with ours, there is one thread a rank, an optimiser in one kernel, and nothing is logged or saved.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.sample_tasks import GPT, build_mlp, generate_table, generate_texts, table_loss, text_loss

Order = dict[str, Any]
TASKS: dict[str, Any] = {"table": (generate_table, build_mlp, table_loss), "gpt": (generate_texts, GPT, text_loss)}


def load_samples(order: Order) -> TensorDataset:
    """Return the training samples."""
    return TensorDataset(*map(torch.from_numpy, TASKS[order["task"]][0](order["samples"], 0)))


def make_loader(order: Order, **options: Any) -> Any:
    """Return a DataLoader as tutorials have it, of a rank's share of the batch."""
    return DataLoader(load_samples(order), order["batch_size"] // order["num_ranks"], **options)


def make_optimizer(model: nn.Module, order: Order) -> torch.optim.Optimizer:
    """Return Adam in one kernel."""
    return torch.optim.Adam(model.parameters(), lr=order["learning_rate"], fused=True)


def write_seconds(order: Order, seconds: list[float]) -> None:
    """Write the seconds of each epoch into the order's output."""
    Path(order["output"]).write_text(json.dumps(seconds))


def train_plain(rank: int, order: Order, store: str) -> None:
    """Train as one rank; rank 0 writes."""
    ranks: int = order["num_ranks"]
    torch.set_num_threads(1)
    torch.manual_seed(order["seed"])
    model: nn.Module = TASKS[order["task"]][1]()
    sampler: Any = None
    if ranks > 1:
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        sampler = DistributedSampler(load_samples(order), ranks, rank, seed=order["seed"])
        model = DistributedDataParallel(model)
    loader = make_loader(order, sampler=sampler, shuffle=sampler is None)
    optimizer = make_optimizer(model, order)
    compute_loss = TASKS[order["task"]][2]

    def train_epoch(epoch: int) -> None:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            compute_loss(model(inputs), targets).backward()
            optimizer.step()

    seconds = time_epochs(order, train_epoch)
    if rank == 0:
        write_seconds(order, seconds)
    if ranks > 1:
        distributed.destroy_process_group()


def time_epochs(order: Order, train_epoch: Callable[[int], None]) -> list[float]:
    """Return the seconds of each epoch."""
    seconds = []
    for epoch in range(order["epochs"]):
        begin = time.perf_counter()
        train_epoch(epoch)
        seconds.append(time.perf_counter() - begin)
    return seconds


def train_accelerate(rank: int, order: Order, store: str) -> None:
    """Train as one rank with Accelerate; rank 0 writes."""
    from accelerate import Accelerator

    ranks: int = order["num_ranks"]
    torch.set_num_threads(1)
    if ranks > 1:
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(order["seed"])
    model = TASKS[order["task"]][1]()
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model, order), make_loader(order, shuffle=True)
    )

    compute_loss = TASKS[order["task"]][2]

    def train_epoch(epoch: int) -> None:
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(compute_loss(model(inputs), targets))
            optimizer.step()

    seconds = time_epochs(order, train_epoch)
    if rank == 0:
        write_seconds(order, seconds)
    accelerator.end_training()


class Network(lightning.LightningModule):
    """The network; notes the seconds of each epoch."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order
        self.network: nn.Module = TASKS[order["task"]][1]()
        self.seconds: list[float] = []
        self.begin = 0.0

    def setup(self, stage: str) -> None:
        torch.set_num_threads(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self, self.order)

    def on_train_epoch_start(self) -> None:
        self.begin = time.perf_counter()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss: Tensor = TASKS[self.order["task"]][2](self.network(batch[0]), batch[1])
        return loss

    def on_train_epoch_end(self) -> None:
        self.seconds.append(time.perf_counter() - self.begin)

    def on_fit_end(self) -> None:
        if self.trainer.is_global_zero:
            write_seconds(self.order, self.seconds)


def train_lightning(order: Order) -> None:
    """Train with Lightning's Trainer."""
    lightning.seed_everything(order["seed"], verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=order["num_ranks"],
        strategy="ddp_spawn" if order["num_ranks"] > 1 else "auto",
        max_epochs=order["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Network(order), make_loader(order, shuffle=True))


def main(order: Order) -> None:
    """Train as the order says."""
    if order["side"] == "lightning":
        train_lightning(order)
        return
    function = {"plain": train_plain, "accelerate": train_accelerate}[order["side"]]
    with tempfile.TemporaryDirectory() as folder:
        if order["num_ranks"] == 1:
            function(0, order, "")
        else:
            spawn(function, (order, f"{folder}/store"), order["num_ranks"])  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
