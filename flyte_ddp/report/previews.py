"""HTML pages for the console: what is going to be trained, and the first predictions."""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import open_prepared
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.order import sampling
from flyte_ddp.report.class_colors import class_colors
from flyte_ddp.report.figures import Picture
from flyte_ddp.report.page import render_template
from flyte_ddp.report.report import hyperparameter_rows
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.text.formatting import format_percent

PICTURES = 24  # on a page


def render_run_preview(hp: Hyperparameters, data: Path | None, run: str) -> str:
    """Return an HTML page on what is going to be trained; ``data`` is the prepared data set's folder, if known."""
    facts = [("Data set", hp.dataset), ("Model", hp.model), ("Epochs", f"{hp.epochs:,}")]
    if hp.objective != "classification":
        facts.insert(2, ("Objective", hp.objective))
    if data is None:
        facts.append(("Samples", "known when the data set has been fetched"))
    else:
        opened = open_prepared(data)
        if isinstance(opened, EncodedSet):
            samples = len(opened.train if isinstance(opened.train, ShardIndex) else opened.train.labels)
        else:
            samples = opened.train_samples
        held_out = sampling.count_held_out(samples, hp.validation_fraction)
        steps = hp.epochs * sampling.steps_per_epoch(samples - held_out, hp.batch_size)
        facts += [
            ("Samples", f"{samples:,}, of which {held_out:,} are for validation"),
            *([("Classes", f"{len(opened.classes):,}")] if opened.classes else []),
            ("Optimiser steps", f"{min(steps, hp.max_steps or steps):,}"),
        ]
    settings = hyperparameter_rows(hp.to_dict())
    return render_template("preview.html", title=run, heading="What is trained", facts=facts, settings=settings)


class FirstPredictions:
    """Keeps the first PICTURES (24) predictions with their images; counts all predictions, and the correct ones."""

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = classes
        self.pictures: list[Picture] = []
        self.samples = self.known = self.correct = 0

    def add_batch(
        self, images: Iterable[NDArray[np.uint8] | None], rows: Sequence[Picture], *, samples: int, are_classes: bool
    ) -> None:
        """Count a batch's predictions, and keep the first with their images; ``rows`` are the decoded samples."""
        self.samples += samples
        if are_classes:
            self.known += len(rows)
            self.correct += sum(row.truth == row.prediction for row in rows)
        for row, image in zip(rows[: PICTURES - len(self.pictures)], images, strict=False):
            self.pictures.append(replace(row, image=image))

    def render_page(self, title: str) -> str:
        facts = [("Samples", f"{self.samples:,}")]
        if self.known:
            facts.append(
                ("Correct", f"{self.correct:,} of {self.known:,}, {format_percent(self.correct / self.known)}")
            )
        values = {"facts": facts, "pictured": f"The first {len(self.pictures)}", "pictures": self.pictures}
        if any(picture.masks for picture in self.pictures):
            values["legend"] = [*zip(self.classes, class_colors(len(self.classes)), strict=True)]
        return render_template("preview.html", title=title, heading="Predictions", **values)
