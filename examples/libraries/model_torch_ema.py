# /// script
# dependencies = ["torch-ema==0.3"]
# ///
"""torch-ema: a moving average of the weights in a user-defined loop.

python examples/libraries/model_torch_ema.py

This is for [loops of your own](own-loop.md). The average is saved with the rest of the state. Otherwise a resumed run
would average from the resumed weights on. A training by hyperparameters has `ema_decay` and `"keep": "ema"`. With a
loop, no table of predictions is written, and the model is not exported.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch_ema import ExponentialMovingAverage

from flyte_ddp import batches, current_rank, run_ranks


def train(steps: int = 8) -> dict[str, Any]:
    """Train on all ranks, and return the averaged weights."""
    rank = current_rank()
    rank.join()
    torch.manual_seed(0)
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data / 16), torch.tensor(digits.target)
    model = nn.Linear(64, 10).double()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    average = ExponentialMovingAverage(model.parameters(), decay=0.9)  # the same on all ranks, as the weights are
    step = 0
    if saved := rank.load():
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        average.load_state_dict(saved["average"])
    order = batches(len(inputs), 64, seed=0, epoch=0, first=step)
    for factor, samples in zip(order.loss_factors(), order, strict=True):
        if step == steps:
            break
        loss = factor * cross_entropy(ddp(inputs[samples]), labels[samples])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update()
        step += 1
        rank.record(step, loss=loss.item())
        if rank.due():
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "average": average.state_dict()}
            rank.save(step, {**state, "step": step})
    with average.average_parameters():
        return {name: value.clone() for name, value in model.state_dict().items()}


# What it is tried with.
if __name__ == "__main__":
    print(run_ranks(train, num_ranks=2, folder="runs/torch-ema"))
