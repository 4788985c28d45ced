"""Texts of pieces of words, whose numbers a tokenizer's function joins."""

from typing import Any

import numpy as np
from torch import nn

from flyte_ddp import arrays

PIECES = ("to", "ken", "iz", "er", "<pad>")
LENGTH = 6


def texts(_: str) -> Any:
    tokens = np.random.default_rng(0).integers(0, 4, (80, LENGTH))
    return arrays((tokens[:64], tokens[:64]), (tokens[64:], tokens[64:]), classes=PIECES)


def pairs(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(num_classes, 8), nn.Linear(8, num_classes))


def decode(tokens: list[int]) -> str:
    return "~".join(PIECES[token] for token in tokens)


def broken_decode(tokens: list[int]) -> str:
    raise RuntimeError(f"no tokenizer for {len(tokens)} tokens")
