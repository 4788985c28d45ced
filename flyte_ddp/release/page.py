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
from flyte_ddp.release.answers import Answers, Model
from flyte_ddp.release.judge import Judgement
from flyte_ddp.report.confusions import confusion_section
from flyte_ddp.report.figures import Picture
from flyte_ddp.report.page import rendered

PICTURED = 12  # samples of each kind


def write_page(judgement: Judgement, name: str, path: Path) -> Path:
    """Writes the page of the verdict on a model of that name."""
    models = {"Challenger": judgement.challenger, "Champion": judgement.champion}
    page = rendered(
        "verdict.html",
        name=name,
        verdict=judgement.verdict,
        models={title: percent(model.accuracy) for title, model in models.items() if model is not None},
        confusions={
            title: confusion_section(count_confusions(model.labels, model.predictions), judgement.model.classes)
            for title, model in models.items()
            if model is not None
        },
        parts_of_split=judgement.parts,
        pictured=told_apart(judgement),
    )
    with replacing(path) as file:
        file.write(page.encode("ascii"))
    return path


def told_apart(judgement: Judgement) -> dict[str, list[Picture]]:
    """Pictures of the first samples that only one of the two models gets right, as the challenger's inputs."""
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
    return {
        headline: [picture(int(place), images, wrong, judgement.model.classes) for place in places]
        for headline, (places, wrong) in wanted.items()
        if len(places)
    }


def images_of(model: Model, split: PreparedSet, places: set[int]) -> dict[int, NDArray[np.uint8]]:
    """The images [H, W, C] at these places among the samples that can be decoded."""
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


def picture(place: int, images: dict[int, NDArray[np.uint8]], wrong: Answers, classes: list[str]) -> Picture:
    """A sample with the prediction of the model that is wrong about it."""
    prediction, label = int(wrong.predictions[place]), int(wrong.labels[place])
    score = float(wrong.scores.confidence[place])
    return Picture(f"sample {wrong.ids[place]}", images[place], classes[prediction], classes[label], score)
