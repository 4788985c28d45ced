"""A small GPT that writes like this project's documents, character by character.

Run it with ``pyflyte run workflows/training.py training_wf --hp examples/gpt/hp.json``.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flyte_ddp import Hyperparameters, arrays

LENGTH = 32  # characters of a row
TEST_SHARE = 10  # one row in ten is for tests


def read_documents(source: str) -> Any:
    """Return the text of a folder's Markdown files in rows of characters, with the next character of each.

    The classes are the characters. Characters after the last whole row are dropped.
    """
    text = "\n".join(path.read_text() for path in sorted(Path(source).glob("*.md")))
    characters, numbers = np.unique([*text], return_inverse=True)
    last = (len(numbers) - 1) // LENGTH * LENGTH
    inputs, targets = numbers[:last].reshape(-1, LENGTH), numbers[1 : last + 1].reshape(-1, LENGTH)
    tests = np.arange(len(inputs)) % TEST_SHARE == 0
    return arrays((inputs[~tests], targets[~tests]), (inputs[tests], targets[tests]), classes=[*characters])


class GPT(nn.Module):
    """Maps characters int64 [n, T] to logits of the next characters [n, T, classes], by causal attention."""

    def __init__(self, num_classes: int, input_shape: tuple[int], width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(num_classes, width), nn.Embedding(*input_shape, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        states = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.blocks(states, mask.to(states.dtype), is_causal=True))
        return logits


def make_adamw(model: nn.Module, hp: Hyperparameters) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=hp.learning_rate)
