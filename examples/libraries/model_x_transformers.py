# /// script
# dependencies = [
#     "x-transformers==2.31.10",
#     "einops==0.8.2",
#     "einx==0.4.3",
#     "frozendict==2.5.1",
#     "loguru==0.7.3",
#     "torch-einops-utils==0.2.0",
# ]
# ///
"""x-transformers: a decoder for texts of different lengths.

pyflyte run workflows/training.py training_wf --hp '{
    "dataset": "examples.libraries.model_x_transformers:read_texts", "collate": "padded",
    "model": "examples.libraries.model_x_transformers:make_decoder",
    "objective": "language", "options": {"objective": {"shift": true}},
    "optimizer": "adamw", "learning_rate": 0.003, "batch_size": 16, "epochs": 2}'

With `padded` the mask is the last positional argument, but the second argument of `TransformerWrapper` is
`return_embeddings`. Inputs in a dict are passed by name. Name the input `x`, and the mask is passed as `mask`.
`attn_dropout` depends on the number of ranks.

The model is not exported, because torch's exporter finds that the code fixes the number of samples.
"""

from typing import Any

import numpy as np
from torch import nn
from x_transformers import Decoder, TransformerWrapper

from flyte_ddp import arrays

TOKENS = 23


def read_texts(_: str) -> Any:
    random = np.random.default_rng(0)
    steps, lengths = random.integers(1, 4, 80), random.integers(5, 13, 80)
    texts = [np.arange(length) * step % TOKENS for length, step in zip(lengths, steps, strict=True)]
    sides = [({"x": part}, part) for part in (texts[:64], texts[64:])]
    return arrays(*sides, classes=[f"{token} " for token in range(TOKENS)])


def make_decoder(num_classes: int, input_shape: Any) -> nn.Module:  # noqa: ARG001
    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8)
    model: nn.Module = TransformerWrapper(num_tokens=num_classes, max_seq_len=32, attn_layers=layers)
    return model
