"""Sets of pictures on demand, and the same pictures in arrays, named in tests as ``picture_sets:...``."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from flyte_ddp import on_demand
from flyte_ddp.datasets.on_demand_set import OnDemand

LABELS = ["dog", "person", "rain"]  # of docs/own-data.md
SIDE = 16


def draw_pixels(number: int, channels: int = 3) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (SIDE, SIDE + 2, channels), dtype=np.uint8)


def item(number: int, kind: str) -> tuple[Any, Any]:
    """Return a PIL image, an array or a tensor in turn, with class, labels or mask."""
    pixels = draw_pixels(number)
    picture = (Image.fromarray(pixels), pixels, torch.from_numpy(pixels).permute(2, 0, 1))[number % 3]
    targets = {
        "classes": number % 3,
        "labels": [float(number % 2), 1.0, float("nan")],
        "masks": Image.fromarray(pixels[..., 0] % 3),
    }
    return picture, targets[kind]


def sides(kind: str) -> list[list[tuple[Any, Any]]]:
    return [[item(number, kind) for number in numbers] for numbers in (range(30), range(30, 41))]


class Named(list[Any]):
    classes = ("a", "b", "c")


def on_demand_classes(_: str) -> OnDemand:
    return on_demand(*sides("classes"), classes="abc")


def on_demand_labels(_: str) -> OnDemand:
    return on_demand(*sides("labels"), classes="abc")


def on_demand_masks(_: str) -> OnDemand:
    return on_demand(*sides("masks"), classes="abc")


def in_arrays_classes(_: str) -> Any:
    return Named(sides("classes")[0]), sides("classes")[1]


def in_arrays_labels(_: str) -> Any:
    return Named(sides("labels")[0]), sides("labels")[1]


def in_arrays_masks(_: str) -> Any:
    return Named(sides("masks")[0]), sides("masks")[1]


def write_photos(folder: Path) -> None:
    """Write 60 PNG files with visible labels, and the tables ``train.csv`` and ``test.csv``."""
    random = np.random.default_rng(0)
    for part, samples in (("train", 40), ("test", 20)):
        rows = random.integers(0, 2, (samples, len(LABELS)))
        with (folder / f"{part}.csv").open("w") as file:
            writer = csv.writer(file)
            writer.writerow(["file", *LABELS])
            for number, (bright, left, tall) in enumerate(rows.tolist()):
                pixels = random.integers(0, 60, (20 + 10 * tall, 30, 3), dtype=np.uint8) + np.uint8(120 * bright)
                pixels[:, : 15 if left else 0] += np.uint8(60)
                Image.fromarray(pixels).save(folder / f"{part}-{number}.png")
                writer.writerow([f"{part}-{number}.png", bright, left, tall])


class Model(nn.Sequential):
    def __init__(self, num_classes: int, input_shape: tuple[int, int, int]) -> None:
        super().__init__(nn.Conv2d(input_shape[0], 4, 5, stride=3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))
        with torch.no_grad():
            self(torch.zeros(1, *input_shape))


def wrong(first: Any, second: Any) -> OnDemand:
    """Return a set whose second item does not fit the first item."""
    return on_demand([first, second] * 10, [first] * 4, classes="abc")


def another_size(_: str) -> OnDemand:
    return wrong((draw_pixels(0), 0), (draw_pixels(0)[1:], 1))


def no_number(_: str) -> OnDemand:
    return wrong((draw_pixels(0), 0), (draw_pixels(0), "cat"))


def Linear(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Linear(*input_shape, num_classes)
