"""Predicting images with a saved model: a CSV table, and an HTML page of the first predictions."""

import codecs
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.datasets import open_prepared
from flyte_ddp.datasets.image_folder import join_kinds
from flyte_ddp.errors import UserError
from flyte_ddp.files import replace_file
from flyte_ddp.formatting import format_count
from flyte_ddp.loading.encoded import BadSamples
from flyte_ddp.loading.facts import join_few
from flyte_ddp.models.images import InputSpec
from flyte_ddp.predict.prediction_batches import (
    BATCH_SIZE,
    Batch,
    SavedModel,
    find_images,
    read_folder_batches,
    read_test_split,
)
from flyte_ddp.progress import Progress
from flyte_ddp.report.page import write_html
from flyte_ddp.report.previews import FirstPredictions
from flyte_ddp.settings import Settings


def write_prediction_table(
    model_path: Path,
    sidecar_path: Path,
    *,
    images: Path | None,
    dataset: Path | None,
    output: Path,
    batch_size: int = BATCH_SIZE,
    bad_samples: int | None = None,
    settings: Settings | None = None,
) -> Path:
    """Predict images; write a CSV table with a row for each, and an HTML page of the first; return the table's path.

    Predicts either the image files below the folder ``images``, without hidden ones, or the test split of the prepared
    data set in the folder ``dataset``. Columns are ``id``, ``prediction`` (the likeliest class), ``truth`` (for a data
    set), ``score`` (the prediction's probability) and ``score_<class>`` for every class. The ``id`` is the path below
    ``images``; for a data set the file's name, the key in a shard, or, for arrays, the index in the test split. An
    image that cannot be decoded has no prediction and no scores; ``bad_samples`` of them are allowed, None: as many as
    the model's training allowed.

    Replaces ``output`` and the page beside it; makes missing folders. Runs the code that the sidecar names, and the
    model on a GPU if there is one. ``settings`` say where remote shards are cached, how many threads decode, and
    whether to print to stderr which files are no images and which images have no prediction. Raises UserError for both
    or neither of ``images`` and ``dataset``; a ``batch_size`` below 1; negative ``bad_samples``; a missing, damaged or
    mismatched model; no images; an unreadable image, or too many that cannot be decoded; channels that the model does
    not take; unwritable output.
    """
    if (images is None) == (dataset is None):
        raise UserError(f"images={images}, dataset={dataset}: give exactly one of the two")
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: must be at least 1")
    if bad_samples is not None and bad_samples < 0:
        raise UserError(f"bad_samples={bad_samples}: must be at least 0")
    settings = settings or Settings()
    progress = Progress(settings.progress)
    model = SavedModel(model_path, sidecar_path, settings, bad_samples)
    bad = BadSamples(model.bad_samples)
    if images is not None:
        paths, others = find_images(images)
        if others:
            left_out = f"{format_count(sum(others.values()), 'file')} left out, as no images: {join_kinds(others)}"
            progress.print_note(f"images={images}: {left_out}")
        batches = read_folder_batches(model, images, paths, batch_size, bad)
    elif dataset is not None:
        batches = read_test_split(model, open_prepared(dataset), batch_size, bad)
    truth_column = ["truth"] if dataset is not None else []
    with replace_file(output) as file:
        # surrogateescape: file names that are not UTF-8 go through as they are.
        table = csv.writer(codecs.getwriter("utf-8")(file, "surrogateescape"), lineterminator="\n")
        table.writerow(["id", "prediction", *truth_column, "score", *(f"score_{name}" for name in model.classes)])
        first = FirstPredictions()
        for batch in batches:
            rows = [*predict_rows(batch, model)]
            table.writerows(rows)
            first.add_batch(images_from_inputs(batch.inputs, model.spec), rows, truths=batch.truths is not None)
    write_html(output.with_suffix(".html"), first.render_page(output.stem))
    if bad.names:
        listed = join_few(f"{name} ({reason})" for name, reason in bad.names.items())
        progress.print_note(f"no prediction for {len(bad.names):,} image(s), which cannot be decoded: {listed}")
    return output


def images_from_inputs(inputs: Tensor, spec: InputSpec) -> Iterator[NDArray[np.uint8]]:
    """Yield each of a model's normalised inputs [n, C, H, W] as an image, uint8 [H, W, C], on the CPU."""
    mean, std = (torch.tensor(values, device=inputs.device).view(-1, 1, 1) for values in (spec.mean, spec.std))
    for image in inputs:
        values = (image.float() * std + mean).clamp(0, 1).mul(255).round().byte()
        yield values.permute(1, 2, 0).cpu().numpy()


def predict_rows(batch: Batch, model: SavedModel) -> Iterator[list[str]]:
    """Compute a batch's logits, and yield a table row for each sample: id, prediction, truth if known, scores."""
    logits = model.compute_logits(batch.inputs)
    answers = zip(logits.argmax(dim=1).tolist(), torch.softmax(logits, dim=1).tolist(), strict=True)
    for row, (name, decoded) in enumerate(zip(batch.ids, batch.decoded, strict=True)):
        prediction, *numbers = [""] * (2 + len(model.classes))
        if decoded:
            best, scores = next(answers)
            prediction, numbers = model.classes[best], [f"{score:.6g}" for score in (scores[best], *scores)]
        yield [name, prediction, *([] if batch.truths is None else [batch.truths[row]]), *numbers]
