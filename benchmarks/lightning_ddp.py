"""The baseline of ``epoch``: the tutorial's network and data under Lightning's ``ddp_spawn``."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.plain_ddp import Net, load


class Classifier(lightning.LightningModule):
    """The tutorial's network with its loss and optimiser; notes seconds and test accuracy of each epoch."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__()
        self.order = order
        self.net = Net()
        self.epochs: list[dict[str, float]] = []
        self.begin = 0.0

    def setup(self, stage: str) -> None:
        torch.set_num_threads(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.order["learning_rate"], momentum=self.order["momentum"])

    def on_train_epoch_start(self) -> None:
        self.begin = time.perf_counter()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return functional.nll_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        hits = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", hits, on_epoch=True, sync_dist=True, batch_size=len(batch[1]))

    def on_train_epoch_end(self) -> None:  # Lightning evaluates before this
        accuracy = float(self.trainer.callback_metrics["accuracy"])
        self.epochs.append({"seconds": time.perf_counter() - self.begin, "accuracy": accuracy})

    def on_fit_end(self) -> None:
        if self.trainer.is_global_zero:
            Path(self.order["output"]).write_text(json.dumps(self.epochs))


def main(order: dict[str, Any]) -> None:
    """Trains as the order says."""
    lightning.seed_everything(order["seed"], verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=order["num_ranks"],
        strategy="ddp_spawn",
        max_epochs=order["epochs"],
        limit_train_batches=order["max_steps"] or 1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    size = order["batch_size"] // order["num_ranks"]
    train_loader = DataLoader(load(order, train=True), batch_size=size, shuffle=True)
    test_loader = DataLoader(load(order, train=False), batch_size=order["test_batch_size"])
    trainer.fit(Classifier(order), train_loader, test_loader)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
