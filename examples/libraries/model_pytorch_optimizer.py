# /// script
# dependencies = ["pytorch-optimizer==4.1.0"]
# ///
"""pytorch-optimizer: an optimiser by name.

pyflyte run workflows/training.py training_wf --hp '{
    "dataset": "digits", "optimizer": "examples.libraries.model_pytorch_optimizer:make_optimizer",
    "schedule": "cosine", "learning_rate": 0.003, "batch_size": 32, "max_steps": 8}'

Optimisers that call a closure (`sam`, `lbfgs`, ...), or need `create_graph`, require a user-defined loop. The library's
schedulers and losses are not needed. A schedule is a hyperparameter, and a loss must not reduce the batch.

Kron and SOAP decompose a matrix for each side of a weight, which may take longer than the rest of a step.
"""

import torch
from pytorch_optimizer import load_optimizer
from torch import nn

from flyte_ddp import Hyperparameters


def make_optimizer(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = load_optimizer("adan")(model.parameters(), lr=hp.learning_rate)
    return optimizer
