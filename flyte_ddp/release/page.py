"""The HTML page of a verdict: checks, confusions, and samples that only one of the two models gets right."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, permutations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.objectives.table_columns import format_sample_inputs, make_input_columns
from flyte_ddp.core.text.formatting import format_measure, format_sentence, format_value, name_measure
from flyte_ddp.core.text.sections import Curve
from flyte_ddp.objectives import Classification
from flyte_ddp.objectives.classification import count_confusions
from flyte_ddp.predict.predict import restore_images
from flyte_ddp.predict.prediction_batches import read_test_batches
from flyte_ddp.release.evaluation import Evaluation
from flyte_ddp.release.judgement import Judgement
from flyte_ddp.report.figures import Picture, draw_two_curves, make_confusion_view
from flyte_ddp.report.page import render_template, write_html

PICTURED = 12  # samples of each kind


def write_verdict_page(judgement: Judgement, name: str, path: Path) -> Path:
    """Write the HTML page of a judgement, replacing an existing file, and return the path.

    ``name`` is the model's name. Reads samples of the test split, perhaps over the network.
    """
    evaluations, verdict = {"Challenger": judgement.challenger, "Champion": judgement.champion}, judgement.verdict
    models = {title: model for title, model in evaluations.items() if model is not None}
    page = render_template(
        "verdict.html",
        name=name,
        verdict=verdict,
        measure=name_measure(verdict.measure),
        models={title: format_measure(verdict.measure, model.score) for title, model in models.items()},
        notes=[f"{title}: {text}" for title, model in models.items() for text in describe_classifier(model)],
        confusions={
            title: make_confusion_view(
                count_confusions(*(model.columns[key].long().numpy() for key in ("truth", "prediction"))),
                judgement.model.classes,
            )
            for title, model in models.items()
            if model.classifies
        },
        parts_of_split=judgement.part_checks,
        pictured=show_disagreements(judgement),
        describe_reason=describe_reason,
        dataset=judgement.data.name,
        curves=[*draw_ranking_curves(models, judgement.model.classes)],
    )
    return write_html(path, page)


def describe_classifier(model: Evaluation) -> Iterator[str]:
    """Yield a sentence about a classifier's threshold, and a sentence if all predictions are the same class.

    Yields nothing if the model is not a classifier.
    """
    if not model.classifies:
        return
    assert isinstance(model.objective, Classification)
    facts = model.objective.facts
    if facts.threshold is not None:
        yield f"Samples with a score of at least {format_value(facts.threshold)} are predicted as {facts.classes[1]!r}."
    if single := model.objective.describe_single_prediction(model.columns):
        yield single


def draw_ranking_curves(models: Mapping[str, Evaluation], labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the SVG of each label's ROC or precision-recall chart, with a curve for each model.

    Yields nothing unless the main measure is AUROC or average precision. A model with NaN or infinite outputs has no
    curve. ``models`` are evaluations by title, and ``labels`` are the names of the labels.
    """
    measure = next((model.objective.main_measure for model in models.values()), "")
    place = {"auroc": 0, "average_precision": 1}.get(measure)  # in a label's pair of curves
    if place is None:
        return
    by_name = dict[str, dict[str, Curve]]()
    for title, model in models.items():
        found = model.objective.binary_labels(model.columns) if model.finite.all() else None
        names = [""] if model.classifies else labels or map(str, range(len(model.columns["truth"][0])))
        for curve in found.draw_curves([*names])[place::2] if found else ():
            by_name.setdefault(curve.name, {})[title] = curve
    for name, curves in by_name.items():
        yield name, draw_two_curves(curves)


def describe_reason(reason: str) -> str:
    """Return the reason of a verdict or a check as a sentence."""
    if reason[:1] in ("+", "-"):
        reason = f"the difference is {reason}"
    return format_sentence(re.sub(r"^([^:;]+?) (better|worse) by ", r"its \1 is \2 by ", reason))


def show_disagreements(judgement: Judgement) -> dict[tuple[str, str], list[Picture]]:
    """Return the first PICTURED (12) samples that only the challenger, or only the champion, classifies correctly.

    The key ("challenger", "champion") has the samples of the challenger, and ("champion", "challenger") the samples of
    the champion. A key without samples is missing. Returns {} unless both models classify. Reads the test split,
    perhaps over the network.
    """
    mine, theirs, names = judgement.challenger, judgement.champion, judgement.model.classes
    found = dict[tuple[str, str], list[Picture]]()
    if mine is None or theirs is None or not (mine.classifies and theirs.classifies):
        return found
    sides = {"challenger": mine, "champion": theirs}
    chosen = {
        (right, wrong): np.flatnonzero(sides[right].correct & ~sides[wrong].correct)[:PICTURED].tolist()
        for right, wrong in permutations(sides)
    }
    samples = read_test_samples(judgement, {*mine.places[[*chain(*chosen.values())]].tolist()})
    for (right, wrong), places in chosen.items():
        columns = sides[wrong].columns
        for place in places:
            truth, prediction = (names[int(columns[key][place])] for key in ("truth", "prediction"))
            facts = prediction, truth, float(columns["confidence"][place])
            image, values = samples[int(mine.places[place])]
            name = f"sample {mine.ids[place]}" if mine.ids[place].isdecimal() else mine.ids[place]
            found.setdefault((right, wrong), []).append(Picture(name, image, *facts, values=values))
    return found


def read_test_samples(
    judgement: Judgement, wanted: Collection[int]
) -> dict[int, tuple[NDArray[np.uint8] | None, dict[str, str]]]:
    """Read the test split up to the last of the ``wanted`` positions, and return the wanted samples by position.

    A position counts the samples that can be decoded.

    Returns:
        For an image, the pixels uint8 [H, W, C] and {}. For other samples, None and the inputs as texts by column.
    """
    model, found, start = judgement.model, dict[int, tuple[NDArray[np.uint8] | None, dict[str, str]]](), 0
    columns = model.sidecar.preprocessing.columns
    with closing(read_test_batches(model, judgement.data)) as batches:
        for batch in batches:
            if start > max(wanted, default=-1):
                break
            samples = sum(batch.decoded)
            places = [place for place in range(start, start + samples) if place in wanted]
            values = make_input_columns(batch.inputs, columns, batch.rows)
            images = restore_images(batch.inputs, [place - start for place in places], model.spec)
            for place, image in zip(places, images, strict=True):
                found[place] = image, format_sample_inputs(values, place - start)
            start += samples
    return found
