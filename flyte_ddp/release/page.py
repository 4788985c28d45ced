"""The page of a verdict: its checks, the samples that only one of the two models gets right, the confusions."""

from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.confusions import count_confusions
from flyte_ddp.datasets.prepared import PreparedSet
from flyte_ddp.formatting import format_percent
from flyte_ddp.predict.predict import images_from_inputs
from flyte_ddp.predict.prediction_batches import read_test_split
from flyte_ddp.predict.saved_model import SavedModel
from flyte_ddp.release.judge import Judgement
from flyte_ddp.report.figures import Picture, confusion_section
from flyte_ddp.report.page import render_template, write_html

PICTURED = 12  # samples of each kind


def write_page(judgement: Judgement, name: str, path: Path) -> Path:
    """Write the HTML page of a judgement to a path, and return the path; may read the test split again for pictures.

    Replaces a file there is already. ``name`` is the model's in the registry.
    """
    answers = {"Challenger": judgement.challenger, "Champion": judgement.champion}
    models = {title: model for title, model in answers.items() if model is not None}
    page = render_template(
        "verdict.html",
        name=name,
        verdict=judgement.verdict,
        models={title: format_percent(model.accuracy) for title, model in models.items()},
        confusions={
            title: confusion_section(count_confusions(model.labels, model.predictions), judgement.model.classes)
            for title, model in models.items()
        },
        parts_of_split=judgement.parts,
        pictured=picture_differences(judgement),
    )
    return write_html(path, page)


def picture_differences(judgement: Judgement) -> dict[str, list[Picture]]:
    """Return pictures by headline: the first PICTURED samples that only challenger, or only champion, gets right.

    Reads the test split for their images. Empty if the verdict did not need both models' predictions.
    """
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
    images = read_images(judgement.model, judgement.split, {place for found, _ in wanted.values() for place in found})
    names, found = judgement.model.classes, dict[str, list[Picture]]()
    for headline, (places, wrong) in wanted.items():
        for place in places.tolist():
            prediction, truth = names[wrong.predictions[place]], names[wrong.labels[place]]
            score = float(wrong.scores.confidence[place])
            picture = Picture(f"sample {wrong.ids[place]}", images[place], prediction, truth, score)
            found.setdefault(headline, []).append(picture)
    return found


def read_images(model: SavedModel, split: PreparedSet, places: set[int]) -> dict[int, NDArray[np.uint8]]:
    """Read the test split up to the last of these places; return the model's inputs there as uint8 [H, W, C], by place.

    A place is a position among the samples that can be decoded, from 0.
    """
    found: dict[int, NDArray[np.uint8]] = {}
    place = 0
    with closing(read_test_split(model, split)) as batches:
        for batch in batches:
            if place > max(places, default=-1):
                break
            wanted = [row for row in range(len(batch.inputs)) if place + row in places]
            for row, image in zip(wanted, images_from_inputs(batch.inputs[wanted], model.spec), strict=True):
                found[place + row] = image
            place += len(batch.inputs)
    return found
