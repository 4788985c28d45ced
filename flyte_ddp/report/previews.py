"""Pages for the console: what is going to be trained, shards as they were packed, and the first predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flyte_ddp.catalog import IMAGES
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import ImageArrays, open_prepared
from flyte_ddp.formatting import percent
from flyte_ddp.order import sampling
from flyte_ddp.report.figures import Picture
from flyte_ddp.report.page import rendered
from flyte_ddp.report.report import settings
from flyte_ddp.shards.dataset import Sample
from flyte_ddp.shards.index import ShardIndex, read_index
from flyte_ddp.shards.inspection import read_sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

PICTURES = 24
LISTED = 30  # classes


def of_run(hp: Hyperparameters, data: Path | None, run: str) -> str:
    """Return the page on what is going to be trained; ``data`` is None if it is not fetched yet."""
    facts = [("Data set", hp.dataset), ("Model", hp.model), ("Epochs", f"{hp.epochs:,}")]
    facts += sizes(hp, data) if data is not None else [("Samples", "known when the data set has been fetched")]
    return rendered("preview.html", title=run, heading="What is trained", facts=facts, settings=settings(hp.to_dict()))


def sizes(hp: Hyperparameters, data: Path) -> list[tuple[str, str]]:
    """Return the sizes of a prepared data set, and of the run on it."""
    found = open_prepared(data)
    if isinstance(found, ImageArrays):
        samples = len(found.train_labels)
    else:
        samples = len(found.train if isinstance(found.train, ShardIndex) else found.train.labels)
    held_out = sampling.held_out(samples, hp.validation_fraction)
    steps = hp.epochs * sampling.steps_per_epoch(samples - held_out, hp.batch_size)
    return [
        ("Samples", f"{samples:,}, of which {held_out:,} are for validation"),
        ("Classes", f"{len(found.classes):,}"),
        ("Optimiser steps", f"{min(steps, hp.max_steps or steps):,}"),
    ]


def of_shards(address: str) -> str:
    """Return the page on an index: what it lists, and PICTURES of its samples."""
    index = read_index(address)
    numbers = np.linspace(0, len(index) - 1, min(PICTURES, len(index)), dtype=int).tolist()
    return rendered(
        "preview.html",
        title=address,
        heading="What the index lists",
        facts=index.summary().items(),
        classes=", ".join(index.classes[:LISTED]) or "not known",
        pictured="Some samples",
        pictures=[sample_picture(index, read_sample(address, number)) for number in numbers],
    )


def sample_picture(index: ShardIndex, sample: Sample) -> Picture:
    """Return a sample's picture with its class, or with the reason why it cannot be decoded."""
    # Here, as it brings torch along, for which the pod that shows what is going to be trained would wait a second.
    from flyte_ddp.loading.decoding import DecodingError, with_pillow

    key = str(sample["__key__"])
    name = sample.get(".cls", b"").decode(errors="replace").strip()
    if name.isdecimal() and int(name) < len(index.classes):
        name = index.classes[int(name)]
    try:
        content = next((value for kind, value in sample.items() if kind.lower().rpartition(".")[2] in IMAGES), b"")
        return Picture(key, with_pillow(content), truth=name)
    except DecodingError as error:
        return Picture(key, None, problem=str(error))


class FirstPredictions:
    """Collects the first predictions as pictures, and counts those that are correct, if truths are known."""

    def __init__(self) -> None:
        self.pictures: list[Picture] = []
        self.images = self.known = self.correct = 0

    def add_batch(self, images: Iterable[NDArray[np.uint8]], rows: Sequence[Sequence[str]], *, truths: bool) -> None:
        """Add the rows of a batch (id, prediction, truth if known, scores), and the images of its decoded samples."""
        decoded = iter(images)
        for row in rows:
            self.images += 1
            name, prediction, *rest = row
            truth = rest.pop(0) if truths else ""
            self.known += bool(truth and prediction)
            self.correct += bool(truth) and truth == prediction
            if prediction and len(self.pictures) < PICTURES:
                self.pictures.append(Picture(name, next(decoded), prediction, truth, float(rest[0])))

    def page(self, title: str) -> str:
        """Return the page."""
        facts = [("Images", f"{self.images:,}")]
        if self.known:
            facts.append(("Correct", f"{self.correct:,} of {self.known:,}, {percent(self.correct / self.known)}"))
        first = f"The first {len(self.pictures)}"
        values = {"facts": facts, "pictured": first, "pictures": self.pictures}
        return rendered("preview.html", title=title, heading="Predictions", **values)
