"""What ``table`` and ``gpt`` train on all sides: generated data, the model, and the mean loss of a batch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flyte_ddp.datasets.sample_arrays import SampleArrays, arrays

ROWS, COLUMNS = 100_000, 50
TEXTS, TOKENS, VOCABULARY = 1024, 256, 256
WIDTH, BLOCKS, HEADS = 384, 6, 6  # of the GPT: 10.9 million parameters

Pair = tuple[NDArray[Any], NDArray[Any]]


def generate_table(rows: int, seed: int) -> Pair:
    """Return a table of numbers fp32 [rows, COLUMNS], and a number [rows] that depends on them."""
    generator = np.random.default_rng(seed)
    table = generator.standard_normal((rows, COLUMNS), dtype=np.float32)
    noise = 0.1 * generator.standard_normal(rows, dtype=np.float32)
    return table, np.sin(table[:, 0]) + table[:, 1] * table[:, 2] + table[:, 3:].mean(1) + noise


def generate_texts(texts: int, seed: int) -> Pair:
    """Return texts int64 [texts, TOKENS], each token one to four more than its forerunner, and the next tokens."""
    generator = np.random.default_rng(seed)
    steps = generator.integers(1, 5, (texts, TOKENS + 1))
    tokens = steps.cumsum(1) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def table_set(_: str = "") -> SampleArrays:
    """Return the table as a data set of the library."""
    return arrays(generate_table(ROWS, 0), generate_table(1000, 1), name="table")


def text_set(_: str = "") -> SampleArrays:
    """Return the texts as a data set of the library."""
    return arrays(generate_texts(TEXTS, 0), generate_texts(8, 1), name="texts")


def build_mlp() -> nn.Module:
    """Return a network of two hidden layers of 64 for the table."""
    return nn.Sequential(nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


class Block(nn.Module):
    """A block of GPT-2 without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, T, WIDTH] for [n, T, WIDTH]."""
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, WIDTH))
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result


class GPT(nn.Module):
    """GPT-2 with learned positions, about 10 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [n, T, VOCABULARY] of tokens [n, T]."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        result: Tensor = self.head(self.norm(self.blocks(x)))
        return result


def table_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error."""
    return functional.mse_loss(outputs.squeeze(1), targets)


def text_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a token."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
