"""Predicting images with a saved model: a table (CSV) and a page of the first ones."""

import codecs
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flyte_ddp.datasets import open_prepared
from flyte_ddp.datasets.image_folder import listed_kinds
from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing
from flyte_ddp.formatting import counted
from flyte_ddp.loading.encoded import BadSamples
from flyte_ddp.loading.facts import few
from flyte_ddp.models import artifacts
from flyte_ddp.models.images import InputSpec
from flyte_ddp.predict.prediction_batches import Batch, Request, folder_batches, image_paths, split_batches
from flyte_ddp.progress import Progress
from flyte_ddp.report.previews import FirstPredictions
from flyte_ddp.settings import Settings


def predict(
    model_path: Path,
    sidecar_path: Path,
    *,
    images: Path | None,
    dataset: Path | None,
    output: Path,
    batch_size: int = 500,
    bad_samples: int | None = None,
    settings: Settings | None = None,
) -> Path:
    """Write a CSV table with one row for each image, and beside it a page (HTML) of the first ones; return its path.

    Its columns are ``id`` (path below ``images``; of a data set the file's name, the key in a shard, or the index in
    the test split), ``prediction`` (the likeliest class), ``truth`` (for a data set), ``score`` (the prediction's
    probability) and ``score_<class>`` for every class. An image that cannot be decoded has no prediction and no scores.

    Args:
        model_path: ``model.pt`` of a run.
        sidecar_path: ``model.json`` of the same run.
        images: a folder of images, searched at all depths; hidden files are skipped, others skipped and counted.
        dataset: a prepared data set's folder, whose test split is predicted. Give this or ``images``.
        output: the table's path.
        batch_size: images in memory at a time.
        bad_samples: how many images may be impossible to decode; None: as many as in the model's training.
        settings: for shards: where they are cached, and how many threads decode; whether to print what was left out.

    Raises:
        UserError: a missing, damaged or mismatched model; no images, one that cannot be read, or too many that cannot
            be decoded; images whose channels the model does not take; an output that cannot be written.
    """
    if (images is None) == (dataset is None):
        raise UserError(f"images={images}, dataset={dataset}: give exactly one of the two")
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: must be at least 1")
    if bad_samples is not None and bad_samples < 0:
        raise UserError(f"bad_samples={bad_samples}: must be at least 0")
    settings = settings or Settings()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, sidecar = artifacts.load_model(model_path, sidecar_path, device)
    classes = [str(name) for name in sidecar["classes"]]
    if bad_samples is None:
        bad_samples = sidecar.get("hyperparameters", {}).get("bad_samples", 0)
    request = Request(artifacts.input_spec(sidecar), batch_size, device, BadSamples(bad_samples))
    if images is not None:
        paths, others = image_paths(images)
        if others:
            left_out = f"{counted(sum(others.values()), 'file')} left out, as no images: {listed_kinds(others)}"
            Progress(settings.progress).note(f"images={images}: {left_out}")
        batches = folder_batches(images, paths, request, crop=sidecar["input"].get("crop", ""))
    elif dataset is not None:
        batches = split_batches(open_prepared(dataset), request, classes=classes, settings=settings)
    truth_column = ["truth"] if dataset is not None else []
    with replacing(output) as file, torch.no_grad():
        # surrogateescape: file names that are not UTF-8 go through as they are.
        table = csv.writer(codecs.getwriter("utf-8")(file, "surrogateescape"), lineterminator="\n")
        table.writerow(["id", "prediction", *truth_column, "score", *(f"score_{name}" for name in classes)])
        first = FirstPredictions()
        for batch in batches:
            rows = [*rows_of(batch, model, classes)]
            table.writerows(rows)
            first.add_batch(pictures(batch.inputs, request.spec), rows, truths=batch.truths is not None)
    with replacing(output.with_suffix(".html")) as file:
        file.write(first.page(output.stem).encode("ascii"))
    if bad := request.bad.names:
        listed = few(f"{name} ({reason})" for name, reason in bad.items())
        note = f"no prediction for {len(bad):,} image(s), which cannot be decoded: {listed}"
        Progress(settings.progress).note(note)
    return output


def pictures(inputs: Tensor, spec: InputSpec) -> Iterator[NDArray[np.uint8]]:
    """Yield a model's inputs [n, C, H, W] as images, uint8 [H, W, C]."""
    mean, std = (torch.tensor(values, device=inputs.device).view(-1, 1, 1) for values in (spec.mean, spec.std))
    for image in inputs:
        values = (image.float() * std + mean).clamp(0, 1).mul(255).round().byte()
        yield values.permute(1, 2, 0).cpu().numpy()


def rows_of(batch: Batch, model: nn.Module, classes: Sequence[str]) -> Iterator[list[str]]:
    """Yield the table's row for each sample of a batch."""
    logits = model(batch.inputs).float() if len(batch.inputs) else torch.empty(0, len(classes))
    answers = zip(logits.argmax(dim=1).tolist(), torch.softmax(logits, dim=1).tolist(), strict=True)
    for row, (name, decoded) in enumerate(zip(batch.ids, batch.decoded, strict=True)):
        prediction, *numbers = [""] * (2 + len(classes))
        if decoded:
            best, scores = next(answers)
            prediction, numbers = classes[best], [f"{score:.6g}" for score in (scores[best], *scores)]
        yield [name, prediction, *([] if batch.truths is None else [batch.truths[row]]), *numbers]
