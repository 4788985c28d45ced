"""An Accelerate program on scikit-learn's digits, on the ranks of any launcher.

Lines for this library end in ``# flyte_ddp``.

    python examples/accelerate/accelerate_digits.py

- ``run_ranks`` calls ``main`` on each rank. Accelerate treats the ranks as torchrun's workers, because
  ACCELERATE_USE_CPU is set on CPUs. The program also runs under ``accelerate launch``, under torchrun, or without a
  launcher.
- ``load`` and ``save`` replace ``load_state`` and ``save_state``. Saves outlive the rank's host. After a failure, a new
  call resumes after the last saved step, also inside an epoch.
- ``record`` replaces ``log``. Values are written to metrics.jsonl, shown on the page, and sent to wandb.
"""

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import flyte_ddp


def main(epochs: int = 5, learning_rate: float = 0.05, save_every: int = 10) -> dict[str, float]:
    """Train, and return loss and accuracy on the validation samples."""
    # The order of the samples must depend on seed and epoch alone, so that a resumed run continues in this order.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    digits = load_digits()
    samples = TensorDataset(torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target))
    training, validation = random_split(samples, [0.8, 0.2])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer, loader, validation_loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9),
        DataLoader(training, batch_size=50, shuffle=True),
        DataLoader(validation, batch_size=100),
    )
    step, first_epoch, rank = 0, 0, flyte_ddp.current_rank()  # flyte_ddp
    if saved := rank.load():  # flyte_ddp
        step, first_epoch = saved["step"], saved["epoch"]
        accelerator.unwrap_model(model).load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    for epoch in range(first_epoch, epochs):
        loader.set_epoch(epoch)
        for images, labels in skip_first_batches(loader, step - epoch * len(loader)):
            loss = functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            rank.record(step, loss=loss)  # flyte_ddp
            if accelerator.is_main_process and (rank.due() or step % save_every == 0):  # flyte_ddp
                state = {"model": accelerator.unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()}
                rank.save(step, {**state, "step": step, "epoch": epoch})  # flyte_ddp

    losses: list[torch.Tensor] = []
    right: list[torch.Tensor] = []
    for images, labels in validation_loader:
        with torch.no_grad():
            logits = model(images)
        of_samples = functional.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) == labels
        for values, of_all_ranks in zip((losses, right), accelerator.gather_for_metrics(of_samples), strict=True):
            values.append(of_all_ranks)
    measures = {
        "validation_loss": torch.cat(losses).mean().item(),
        "validation_accuracy": torch.cat(right).float().mean().item(),
    }
    rank.record(step, **measures)  # flyte_ddp
    return measures


if __name__ == "__main__":
    print(flyte_ddp.run_ranks(main, num_ranks=2, folder="runs/accelerate"))  # flyte_ddp
