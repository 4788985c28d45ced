"""A Lightning program on scikit-learn's digits, on the ranks of any launcher.

Lines for this library end in ``# flyte_ddp``.

    python examples/lightning/lightning_digits.py

- ``run_ranks`` calls ``main`` on each rank. Lightning treats the ranks as torchrun's workers. ``devices`` and
  ``num_nodes`` come from torchrun's variables. Therefore the program also runs under torchrun, or without a launcher.
- RankCheckpoints: Lightning's ModelCheckpoint saves through the rank, here at the end of each epoch. Saves outlive the
  rank's host. After a failure, a new call resumes.
- RankLogger: values of ``self.log`` are recorded in metrics.jsonl, on the page, and in wandb.

Lightning resumes exactly at the end of an epoch. To save inside an epoch, set ``every_n_train_steps`` or
``train_time_interval`` of ModelCheckpoint. This requires a loader that saves the position, such as torchdata's
StatefulDataLoader.
"""

import os
from typing import Any

import lightning as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import flyte_ddp


class RankCheckpoints(CheckpointIO):  # flyte_ddp
    """Saves Lightning's checkpoints through the rank, and loads the newest."""

    def save_checkpoint(self, checkpoint: dict[str, Any], *_: Any, **__: Any) -> None:
        """Save a checkpoint. Lightning calls this method on rank 0."""
        flyte_ddp.current_rank().save(checkpoint["global_step"], checkpoint)

    def load_checkpoint(self, *_: Any, **__: Any) -> dict[str, Any] | None:  # type: ignore[override]
        """Return the newest checkpoint. Lightning calls this method on all ranks."""
        return flyte_ddp.current_rank().load()

    def remove_checkpoint(self, *_: Any) -> None:
        """Do nothing, because the run removes its checkpoints at the end."""


class RankLogger(Logger):  # flyte_ddp
    """Records through the rank the values that Lightning logs."""

    name, version = "flyte_ddp", None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record the values of a step. Lightning counts steps from 0."""
        flyte_ddp.current_rank().record((step or 0) + 1, **metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing, because the arguments of ``main`` are recorded."""


class Digits(pl.LightningModule):
    """A small network."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log loss and accuracy of a batch."""
        images, labels = batch
        logits = self.network(images)
        self.log("validation_loss", functional.cross_entropy(logits, labels), sync_dist=True)
        self.log("validation_accuracy", (logits.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


def main(epochs: int = 5, learning_rate: float = 0.05) -> dict[str, float]:
    """Train, and return loss and accuracy on the validation samples."""
    pl.seed_everything(0)
    digits = load_digits()
    samples = TensorDataset(torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target))
    training, validation = random_split(samples, [0.8, 0.2])
    rank = flyte_ddp.current_rank()  # flyte_ddp
    trainer = pl.Trainer(
        max_epochs=epochs,
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # flyte_ddp
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),  # flyte_ddp
        plugins=[RankCheckpoints()],  # flyte_ddp
        logger=RankLogger(),  # flyte_ddp
        default_root_dir=rank.folder,  # flyte_ddp
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Digits(learning_rate),
        DataLoader(training, batch_size=50, shuffle=True),
        DataLoader(validation, batch_size=100),
        ckpt_path="newest" if rank.load() else None,  # flyte_ddp
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("validation")}


if __name__ == "__main__":
    print(flyte_ddp.run_ranks(main, num_ranks=2, folder="runs/lightning"))  # flyte_ddp
