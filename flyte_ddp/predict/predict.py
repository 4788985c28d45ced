"""Predicting samples with a saved model: a CSV table, and an HTML page of the first predictions."""

import codecs
import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import compress, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.datasets import open_prepared
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.errors import UserError
from flyte_ddp.files import replace_file
from flyte_ddp.loading.encoded import BadSamples
from flyte_ddp.loading.facts import join_few
from flyte_ddp.models.artifacts import read_model_json
from flyte_ddp.models.images import InputSpec
from flyte_ddp.objectives.objective import list_floats
from flyte_ddp.objectives.table_columns import TableColumns, describe_samples, merge_columns
from flyte_ddp.predict.mask_files import MaskFolder
from flyte_ddp.predict.new_rows import read_new_rows
from flyte_ddp.predict.prediction_batches import (
    Batch,
    SavedModel,
    find_images,
    read_folder_batches,
    read_test_split,
)
from flyte_ddp.progress import Progress
from flyte_ddp.report.figures import Picture
from flyte_ddp.report.page import class_colors, render_template, write_html
from flyte_ddp.settings import Settings
from flyte_ddp.text.formatting import format_count, format_percent
from flyte_ddp.user_code.source import explain_own_errors

PICTURES = 24  # on the page


def write_prediction_table(
    model_path: Path,
    sidecar_path: Path,
    *,
    images: Path | None,
    dataset: Path | None,
    table: Path | None = None,
    output: Path,
    batch_size: int | None = None,
    bad_samples: int | None = None,
    settings: Settings | None = None,
) -> Path:
    """Write a saved model's predictions as a CSV table, a row per sample, and return the path of the table.

    Predicts one of three: the image files below the folder ``images``, the test split of the prepared data set in
    ``dataset``, or the new rows in the file ``table``. Also writes an HTML page of the first predictions, and a PNG of
    each predicted mask into the folder ``<output>.masks``. Columns are ``id``, ``prediction``, those of the truth (for
    a data set), and the other answers of the model's objective; docs/model.md lists them. An image that cannot be
    decoded has an id and no answers; ``bad_samples`` of them are allowed, None: as many as in the model's training.

    Replaces older files; makes missing folders. Runs the code that the sidecar names, on a GPU if there is one. Raises
    UserError for arguments that do not fit, a model or samples that cannot be used, and unwritable output.
    """
    if [images, dataset, table].count(None) != 2:
        raise UserError(f"images={images}, dataset={dataset}, table={table}: give exactly one of the three")
    if batch_size is not None and batch_size < 1:
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
            progress.print_note(f"images={images}: {format_count(others, 'file')} left out, as no images")
        batches = read_folder_batches(model, images, paths, batch_size or model.batch_size, bad)
    elif table is not None:
        rows, ids = read_new_rows(model.sidecar, str(table))
        batches = read_test_split(
            model, SampleArrays(str(table), rows, None, rows, None, test_ids=ids), batch_size, bad
        )
    elif dataset is not None:
        batches = read_test_split(model, open_prepared(dataset), batch_size, bad)
    first, header, undefined = FirstPredictions(model.classes), list[str](), list[str]()
    with (
        replace_file(output) as file,
        MaskFolder(mask_folder(output), len(model.classes)) as masks,
    ):
        # surrogateescape: file names that are not UTF-8 go through as they are.
        writer = csv.writer(codecs.getwriter("utf-8")(file, "surrogateescape"), lineterminator="\n")
        for batch in batches:
            answers = answer_batch(batch, model, masks, header)
            undefined += answers.undefined
            if not header:
                header = ["id", *answers.columns]
                writer.writerow(header)
            cells = [[format_cell(name, value) for value in values] for name, values in answers.columns.items()]
            writer.writerows(zip(batch.ids, *cells, strict=True))
            are_images, are_classes = isinstance(model.spec, InputSpec), batch.truths is not None
            shown = images_from_inputs(batch.inputs, model.require_images()) if are_images else repeat(None)
            first.add_batch(shown, answers.pictures, samples=len(batch.ids), are_classes=are_classes)
    write_html(output.with_suffix(".html"), first.render_page(output.stem))
    print_samples_without_prediction(progress, undefined, bad)
    return output


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


def print_samples_without_prediction(progress: Progress, undefined: Sequence[str], bad: BadSamples) -> None:
    if undefined:
        said = f"the outputs of {format_count(len(undefined), 'sample')} are NaN: no prediction for"
        progress.print_note(f"{said} {join_few(undefined)}; look at their inputs")
    if bad.names:
        listed = join_few(f"{name} ({reason})" for name, reason in bad.names.items())
        progress.print_note(f"no prediction for {len(bad.names):,} image(s), which cannot be decoded: {listed}")


def images_from_inputs(inputs: Tensor, spec: InputSpec) -> Iterator[NDArray[np.uint8]]:
    """Yield each of a model's normalised inputs [n, C, H, W] as an image, uint8 [H, W, C], on the CPU."""
    mean, std = (torch.tensor(values, device=inputs.device).view(-1, 1, 1) for values in (spec.mean, spec.std))
    for image in inputs:
        values = (image.float() * std + mean).clamp(0, 1).mul(255).round().byte()
        yield values.permute(1, 2, 0).cpu().numpy()


def own_decoding(sidecar_path: Path) -> str:
    """Return the hyperparameter ``sample`` of a model's training, "" if it had none."""
    return str(read_model_json(sidecar_path).get("hyperparameters", {}).get("sample", ""))


def mask_folder(table: Path) -> Path:
    return table.with_name(f"{table.name}.masks")


class Answers(NamedTuple):
    """What the model says of a batch's samples."""

    columns: TableColumns  # of the table, without the id; empty texts where a sample cannot be decoded
    pictures: Sequence[Picture]  # of the decoded samples, without their images
    undefined: Sequence[str] = ()  # ids of the samples with NaN among their outputs; they have no prediction


def answer_batch(batch: Batch, model: SavedModel, masks: MaskFolder, header: Sequence[str]) -> Answers:
    """Predict a batch and return the answers, and write masks; ``header`` has the columns of earlier batches."""
    truths: TableColumns = {}
    if batch.truths is not None:
        truths = {"truth": batch.truths}
    elif batch.targets is not None:
        truths = model.objective.truths(batch.targets)
    empty, inputs, samples = [""] * len(batch.ids), batch.inputs, sum(batch.decoded)
    if header and not samples:
        return Answers({name: truths.get(name, empty) for name in header[1:]}, [])
    if not samples:  # a model gets no empty batch: to learn the names of the columns it gets a black image
        inputs, samples = inputs.new_zeros(1, *inputs.shape[1:]), 1
    with explain_own_errors(f"model {model.sidecar['model']!r} on samples {batch.ids[0]} to {batch.ids[-1]}"):
        outputs = model.compute_outputs(inputs)
    undefined = find_undefined_rows(outputs, samples)
    given = find_answers(model, outputs, undefined)
    found = {name: iter(values) for name, values in given.items()}
    answers: TableColumns = {
        name: [next(values) if decoded else "" for decoded in batch.decoded] for name, values in found.items()
    }
    columns = merge_columns(answers, truths)
    decoded = [*compress(range(len(batch.ids)), batch.decoded)]
    predicted, shown = model.objective.masks(outputs), dict[int, Sequence[NDArray[Any]]]()
    if predicted is not None:
        columns["mask"] = files = [*empty]
        for place, mask in zip(decoded, predicted.cpu().numpy(), strict=False):  # a black image has no place
            files[place] = masks.write_mask(batch.ids[place], mask)
            shown[place] = (mask,) if batch.targets is None else (batch.targets[place].cpu().numpy(), mask)
    described = {} if shown else columns
    texts = [describe_samples(described, name, len(batch.ids)) for name in ("prediction", "truth")]
    scores = columns.get("score", [None] * len(batch.ids))
    pictures = [
        Picture(batch.ids[place], None, texts[0][place], texts[1][place], scores[place], masks=shown.get(place, ()))
        for place in decoded
    ]
    return Answers(columns, pictures, [batch.ids[place] for place, bad in zip(decoded, undefined, strict=False) if bad])


def find_answers(model: SavedModel, outputs: Any, undefined: NDArray[np.bool_]) -> dict[str, Sequence[Any]]:
    """Return the objective's answers of a batch by column; no texts of samples that are ``undefined`` [n]."""
    given, samples = {**model.objective.answers(outputs)}, len(undefined)
    where = f"objective={model.sidecar.get('objective', 'classification')!r}"
    if not given:
        raise UserError(f"{where}: has no columns for a table of predictions; override its method answers")
    for name, values in given.items():
        if len(values) != samples:
            raise UserError(
                f"{where}: answers returned {len(values)} values in column {name!r}: must be one for each of the "
                f"{samples} samples"
            )
        if undefined.any() and isinstance(values[0], str):  # the likeliest class of NaN is the first: nobody said so
            given[name] = ["" if bad else value for bad, value in zip(undefined, values, strict=True)]
    return given


def find_undefined_rows(outputs: Any, samples: int) -> NDArray[np.bool_]:
    found = np.zeros(samples, dtype=np.bool_)
    for tensor in list_floats(outputs):
        if tensor.shape[:1] == (samples,):
            found |= tensor.isnan().reshape(samples, -1).any(dim=1).cpu().numpy()
    return found


def format_cell(column: str, value: Any) -> str:
    """Return a table's value as a text: six digits of a probability or share, all of another number's; NaN is ""."""
    if isinstance(value, (str, int, np.integer)):
        return str(value)
    if math.isnan(value):
        return ""
    if column.partition("_")[0] in ("score", "probability", "share"):
        return f"{value:.6g}"
    single = np.float32(value)
    return np.format_float_positional(single if float(single) == value else np.float64(value), trim="-")
