# /// script
# dependencies = ["schedulefree==1.4.1"]
# ///
"""schedulefree: AdamW without a schedule.

pyflyte run workflows/training.py training_wf --hp '{
    "dataset": "digits", "optimizer": "examples.libraries.model_schedulefree:make_optimizer",
    "schedule": "constant", "learning_rate": 0.01, "batch_size": 32, "max_steps": 8}'

The schedule is `constant`, and the optimiser warms up by itself. Evaluations, checkpoints of the best epoch and
`model.pt` use the averaged weights, which the optimiser's `eval()` sets. With BatchNorm, the running statistics belong
to the training weights instead.
"""

import schedulefree
import torch
from torch import nn

from flyte_ddp import Hyperparameters


def make_optimizer(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = schedulefree.AdamWScheduleFree(
        model.parameters(), lr=hp.learning_rate, weight_decay=hp.weight_decay, warmup_steps=2
    )
    return optimizer
