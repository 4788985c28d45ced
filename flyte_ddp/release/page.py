"""The page of a verdict: its checks, the samples that only one of the two models gets right, the confusions."""

from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.confusions import count_confusions
from flyte_ddp.datasets.prepared import PreparedSet
from flyte_ddp.files import replacing
from flyte_ddp.formatting import percent
from flyte_ddp.models import artifacts
from flyte_ddp.predict.predict import pictures
from flyte_ddp.release.answers import Model
from flyte_ddp.release.judge import Judgement
from flyte_ddp.report.figures import Picture, confusion_section
from flyte_ddp.report.page import rendered

PICTURED = 12  # samples of each kind


def write_page(judgement: Judgement, name: str, path: Path) -> Path:
    """Write the page of a judgement on a model of that name, and return its path."""
    answers = {"Challenger": judgement.challenger, "Champion": judgement.champion}
    models = {title: model for title, model in answers.items() if model is not None}
    page = rendered(
        "verdict.html",
        name=name,
        verdict=judgement.verdict,
        models={title: percent(model.accuracy) for title, model in models.items()},
        confusions={
            title: confusion_section(count_confusions(model.labels, model.predictions), judgement.model.classes)
            for title, model in models.items()
        },
        parts_of_split=judgement.parts,
        pictured=pictures_of_differences(judgement),
    )
    with replacing(path) as file:
        file.write(page.encode("ascii"))
    return path


def pictures_of_differences(judgement: Judgement) -> dict[str, list[Picture]]:
    """Return the challenger's inputs as pictures, by headline, for the first samples that only one model gets right."""
    mine, theirs = judgement.challenger, judgement.champion
    if mine is None or theirs is None:
        return {}
    wanted = {
        f"Only the {right} is right; the {wrong} predicts": (np.flatnonzero(apart)[:PICTURED], answers)
        for right, wrong, apart, answers in (
            ("challenger", "champion", mine.correct & ~theirs.correct, theirs),
            ("champion", "challenger", theirs.correct & ~mine.correct, mine),
        )
    }
    images = images_of(judgement.model, judgement.split, {place for found, _ in wanted.values() for place in found})
    names, found = judgement.model.classes, dict[str, list[Picture]]()
    for headline, (places, wrong) in wanted.items():
        for place in places.tolist():
            prediction, truth = names[wrong.predictions[place]], names[wrong.labels[place]]
            score = float(wrong.scores.confidence[place])
            picture = Picture(f"sample {wrong.ids[place]}", images[place], prediction, truth, score)
            found.setdefault(headline, []).append(picture)
    return found


def images_of(model: Model, split: PreparedSet, places: set[int]) -> dict[int, NDArray[np.uint8]]:
    """Return the images [H, W, C] at these places among the samples that can be decoded."""
    found: dict[int, NDArray[np.uint8]] = {}
    place, spec = 0, artifacts.input_spec(model.sidecar)
    with closing(model.batches(split)) as batches:
        for batch in batches:
            if place > max(places, default=-1):
                break
            wanted = [row for row in range(len(batch.inputs)) if place + row in places]
            for row, image in zip(wanted, pictures(batch.inputs[wanted], spec), strict=True):
                found[place + row] = image
            place += len(batch.inputs)
    return found
