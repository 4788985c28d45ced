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


def generate_texts(texts: int, seed: int, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> Pair:
    """Return texts int64 [texts, tokens], and the next tokens. Each token is one to four more than the token before."""
    generator = np.random.default_rng(seed)
    steps = generator.integers(1, 5, (texts, tokens + 1))
    content = steps.cumsum(1) % vocabulary
    return content[:, :-1], content[:, 1:]


def table_set(_: str = "") -> SampleArrays:
    return arrays(generate_table(ROWS, 0), generate_table(1000, 1), name="table")


def text_set(_: str = "") -> SampleArrays:
    return arrays(generate_texts(TEXTS, 0), generate_texts(8, 1), name="texts")


def build_mlp(width: int = 64) -> nn.Module:
    """Return a network of two hidden layers for the table."""
    hidden = [nn.Linear(COLUMNS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


class Block(nn.Module):
    """A block of GPT-2, with dropout of both results if ``dropout`` is not 0."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drops = nn.ModuleList([nn.Dropout(dropout) if dropout else nn.Identity() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, T, width] for [n, T, width]."""
        n, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drops[0](self.out(mixed.transpose(1, 2).reshape(n, length, width)))
        result: Tensor = x + self.drops[1](self.mlp(self.norms[1](x)))
        return result


class GPT(nn.Module):
    """GPT-2 with learned positions, by default with about 10 million parameters."""

    def __init__(
        self,
        *,
        width: int = WIDTH,
        blocks: int = BLOCKS,
        heads: int = HEADS,
        tokens: int = TOKENS,
        vocabulary: int = VOCABULARY,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        """Tokens share their vectors with the output layer if ``tied`` is True."""
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
            nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [n, T, vocabulary] of tokens [n, T]."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        result: Tensor = self.head(self.norm(self.blocks(x)))
        return result


def table_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs.squeeze(1), targets)


def text_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
