"""Small tasks for each objective: data sets with unknown and ignored targets, models, and user-defined objectives."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flyte_ddp.core.text.sections import Section
from flyte_ddp.datasets import SampleArrays, image_arrays
from flyte_ddp.objectives import HIGHER, Classification, Multilabel, Objective

TRAIN, TEST, SIDE = 41, 23, 8
CLASSES = ("a", "b", "c")


def images_and_noise() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    images = random.integers(0, 256, (TRAIN + TEST, SIDE, SIDE, 1), dtype=np.uint8)
    return images, random.random((TRAIN + TEST, 7))


def arrays_of(targets: np.ndarray, classes: Any = ()) -> SampleArrays:
    images, _ = images_and_noise()
    parts = (images[:TRAIN], targets[:TRAIN], images[TRAIN:], targets[TRAIN:])
    return image_arrays(*parts, classes)


def brightness() -> np.ndarray:
    """Return the mean of each quarter of each image, about 0 with a spread of 1, as [N, 4]."""
    images, _ = images_and_noise()
    quarters = images.reshape(len(images), 2, SIDE // 2, 2, SIDE // 2).mean(axis=(2, 4)).reshape(len(images), 4)
    return (quarters - quarters.mean(0)) / quarters.std(0)


def classes(source: str) -> SampleArrays:
    return arrays_of(brightness()[:, :3].argmax(1), CLASSES)


def labels(source: str) -> SampleArrays:
    """Return labels. A third is unknown, and for half of the samples all labels are unknown."""
    noise = images_and_noise()[1]
    found = (brightness()[:, :3] > 0).astype(np.float32)
    found[noise[:, :3] < 1 / 3] = np.nan
    found[noise[:, 6] < 0.5] = np.nan
    return arrays_of(found, CLASSES)


def numbers(source: str) -> SampleArrays:
    """Return two numbers. A third is unknown, and for half of the samples both numbers are unknown."""
    noise = images_and_noise()[1]
    found = brightness()[:, :2].astype(np.float32)
    found[noise[:, :2] < 1 / 3] = np.nan
    found[noise[:, 6] < 0.5] = np.nan
    return arrays_of(found)


def number(source: str) -> SampleArrays:
    return arrays_of(brightness()[:, 0].astype(np.float32))


def masks(source: str) -> SampleArrays:
    """Return classes of pixels by brightness. Most images ignore most pixels, and some ignore all."""
    images, noise = images_and_noise()
    found = np.digitize(images[..., 0], (85, 170)).astype(np.uint8)
    places = np.random.default_rng(6).random(found.shape)
    found[places < np.where(noise[:, 6] < 0.4, 1.0, noise[:, 6])[:, None, None]] = 255
    return arrays_of(found, CLASSES)


def flat(num_classes: int, input_shape: tuple[int, int, int], width: int = 6) -> nn.Module:
    channels, height, breadth = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, width, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(width * (height - 2) * (breadth - 2), num_classes),
    )


def pixels(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(input_shape[0], 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, num_classes, 1))


class InDict(nn.Module):
    """Returns the logits as torchvision's segmentation models do."""

    def __init__(self, num_classes: int, input_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.inner = pixels(num_classes, input_shape)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"out": self.inner(images)}


def focal(outputs: Tensor, targets: Tensor, gamma: float = 2.0) -> Tensor:
    loss = functional.cross_entropy(outputs, targets, reduction="none")
    return (1 - (-loss).exp()) ** gamma * loss


def reduced(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


class Rare(Multilabel):
    """Positive labels have a higher weight."""

    def weights(self, targets: Tensor) -> Tensor:
        return super().weights(targets) * (1 + 9 * targets.nan_to_num(nan=0.0))


@dataclass
class Heads:
    """Outputs of a model with several heads."""

    logits: Tensor
    hidden: tuple[Tensor, dict[str, Tensor]]


class TwoHeads(nn.Module):
    """Returns a dataclass with a tuple and a dict. One head is never used."""

    def __init__(self, num_classes: int, input_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(SIDE * SIDE, 5), nn.Linear(5, num_classes)
        self.unused = nn.Linear(5, 2)

    def forward(self, images: Tensor) -> Heads:
        hidden = self.first(images.flatten(1)).tanh()
        return Heads(self.head(hidden), (hidden, {"unused": self.unused(hidden)}))


class SmallHidden(Classification):
    """Cross-entropy, and the mean square of the hidden values."""

    def check_outputs(self, model: str, outputs: Any, targets: Tensor) -> None:
        del model, outputs, targets  # any will do

    def losses(self, outputs: Heads, targets: Tensor) -> Tensor:
        hidden, _ = outputs.hidden
        assert not {hidden.dtype, outputs.logits.dtype} & {torch.bfloat16}, "which is too coarse for a loss"
        return super().losses(outputs.logits, targets) + (hidden**2).mean(1)

    def columns(self, outputs: Heads, targets: Tensor) -> dict[str, Tensor]:
        return super().columns(outputs.logits, targets)


class MacroF1(Classification):
    """Classification with a user-defined main measure."""

    measures: Mapping[str, str] = {"f1": HIGHER, **Classification.measures}

    def measure(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        from sklearn import metrics

        f1 = metrics.f1_score(columns["truth"], columns["prediction"], average="macro")
        return {"f1": f1, **super().measure(columns)}


class SyncingF1(MacroF1):
    """Uses a metric of torchmetrics, whose ``compute`` gathers the values of all ranks, if several ranks exist."""

    def measure(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        from torchmetrics import CatMetric  # takes seconds, which not every rank should spend

        gathered = {}
        for name in ("truth", "prediction"):
            values = CatMetric(sync_on_compute=True)
            values.update(columns[name])
            gathered[name] = values.compute().reshape(-1)  # of one sample it is []
        return super().measure(gathered)

    def sections(self, columns: Mapping[str, Tensor]) -> list[Section]:
        self.measure(columns)
        return super().sections(columns)


class Plain(Objective):
    """The absolute error of numbers, 0 for unknown numbers. Defines no measures and no columns."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets.nan_to_num()).abs().sum(1)


class Mute(Plain):
    """Fails when texts for people are requested."""

    def answers(self, outputs: Tensor) -> dict[str, Any]:
        raise ValueError("no words")
