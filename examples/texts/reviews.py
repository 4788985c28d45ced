"""Texts of different lengths, read on demand and padded: restaurant reviews with more praise or more blame.

- ``pyflyte run workflows/training.py training_wf --hp examples/texts/padded.json``
- ``pyflyte run workflows/training.py training_wf --hp examples/texts/own_collate.json``

For reviews of your own, set data_source to a CSV file with the columns text and label.
"""

import csv
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from flyte_ddp import on_demand

TOKENS = 2000  # 0 is padding
TEST_SHARE = 6  # one review in six is for tests
THINGS = ("soup", "bread", "waiter", "music", "table", "fish", "tea", "view", "price", "garden")
GOOD = ("good", "warm", "friendly", "fresh", "lovely", "fair")
BAD = ("bad", "cold", "rude", "stale", "awful", "too much")


def read_reviews(source: str) -> Any:
    """Return the reviews of a CSV file, or 2,000 generated reviews without a ``source``.

    Each process reads the file.
    """
    rows = [*csv.DictReader(Path(source).read_text().splitlines())] if source else draw_reviews(2000)
    train, test = ([row for number, row in enumerate(rows) if (number % TEST_SHARE == 0) == side] for side in (0, 1))
    return on_demand(Reviews(train), Reviews(test), classes=["blame", "praise"])


class Reviews:
    """A map-style data set of reviews: the words as numbers, int64 [words], and the class."""

    def __init__(self, rows: Sequence[dict[str, str]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        row = self.rows[number]
        return torch.tensor([number_word(word) for word in row["text"].split()]), int(row["label"])


def number_word(word: str) -> int:
    """Return a word's number by a hash that is equal in all processes, unlike Python's hash()."""
    return 1 + zlib.crc32(word.encode()) % (TOKENS - 1)


def draw_reviews(count: int) -> list[dict[str, str]]:
    """Return generated reviews of 1 to 9 remarks, such as "the soup was not cold".

    The class is the opinion of most remarks.
    """
    draw, rows = random.Random(0), []
    for _ in range(count):
        remarks, balance = [], 0
        for _ in range(draw.choice((1, 3, 5, 7, 9))):
            praises, turned = draw.random() < 0.5, draw.random() < 0.4
            word = draw.choice(GOOD if praises != turned else BAD)
            remarks.append(f"the {draw.choice(THINGS)} was {'not ' if turned else ''}{word}")
            balance += 1 if praises else -1
        rows.append({"text": " and ".join(remarks), "label": str(int(balance > 0))})
    return rows


def collate_reviews(samples: Sequence[tuple[Tensor, int]]) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch with the texts' lengths, for the hyperparameter ``collate``."""
    texts = [text for text, _ in samples]
    lengths = torch.tensor([len(text) for text in texts])
    classes = torch.tensor([label for _, label in samples])
    return {"text": pad_sequence(texts, batch_first=True), "lengths": lengths}, classes


class LengthsModel(nn.Module):
    """Maps texts int64 [n, longest] to logits [n, classes] by the state after the last word of each."""

    def __init__(self, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.words, self.recurrent = nn.Embedding(TOKENS, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        states = self.recurrent(self.words(text))[0]
        logits: Tensor = self.head(states[torch.arange(len(text)), lengths - 1])
        return logits


class MaskModel(LengthsModel):
    """The same network for ``collate`` "padded", with a mask that is true at words."""

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        return super().forward(text, mask.sum(1))
