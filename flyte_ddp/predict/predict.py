"""Predicts samples with a saved model, and writes a CSV table and an HTML page of the first predictions."""

import codecs
import csv
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import replace_file
from flyte_ddp.core.models.inputs import InputSpec, ModelInput
from flyte_ddp.core.objectives.table_columns import (
    TableColumns,
    describe_samples,
    format_sample_inputs,
    make_input_columns,
    merge_columns,
)
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.samples.leaves import Leaves
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.formatting import format_count, format_percent, join_first
from flyte_ddp.core.user_code.source import translate_user_errors
from flyte_ddp.datasets import open_prepared
from flyte_ddp.datasets.encoded.samples import BadSamples
from flyte_ddp.datasets.rows import MISSING
from flyte_ddp.models.stored_code import read_model_json
from flyte_ddp.objectives import Classification
from flyte_ddp.objectives.class_columns import make_unique_column_names
from flyte_ddp.predict.answer_table import (
    format_csv_cell,
    is_limited_to_top_classes,
    make_answer_columns,
    mark_rows_with_nan,
)
from flyte_ddp.predict.prediction_batches import (
    Batch,
    SavedModel,
    list_image_files,
    read_image_batches,
    read_test_batches,
)
from flyte_ddp.predict.row_batches import read_row_batches
from flyte_ddp.report.figures import Picture
from flyte_ddp.report.page import choose_class_colors, color_table, render_template, write_html

TOP_CLASSES = 5  # that the table of a model of many classes lists by default
PICTURES = 24  # on the page
PALETTE = 256  # colours that a PNG with a palette can have


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
    top_classes: int = TOP_CLASSES,
    settings: Settings | None = None,
) -> Path:
    """Write a saved model's predictions as a CSV table, a row per sample, and return the path of the table.

    Also writes an HTML page of the first predictions, and a PNG of each predicted mask into the folder
    ``<output>.masks``. Replaces existing files, and creates missing folders. Runs the code that the sidecar names, on a
    GPU if available.

    The columns are ``id``, ``prediction``, the truth (for a data set), and further answers of the model's objective,
    listed in docs/model.md. An image that cannot be decoded has an id and no answers.

    Args:
        model_path: The path of ``model.pt``.
        sidecar_path: The path of ``model.json``.
        images: A folder of images to predict. Give exactly one of ``images``, ``dataset`` and ``table``.
        dataset: The folder of a prepared data set, whose test split is predicted.
        table: A file of new rows to predict.
        output: The path of the CSV table.
        batch_size: Samples in a batch, by default the model's.
        bad_samples: Most samples that may fail to decode, by default the limit of the model's training.
        top_classes: With more than 100 classes or labels, the table lists this many likeliest answers of each sample.
            0: a column for each class, as with fewer classes.
        settings: Settings for loading data, by default ``Settings()``.

    Raises:
        UserError: The arguments do not fit, the model or the samples cannot be used, or the output cannot be written.
    """
    if [images, dataset, table].count(None) != 2:
        raise UserError(f"images={images}, dataset={dataset}, table={table}: give exactly one of the three")
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size={batch_size}: must be at least 1")
    if top_classes < 0:
        raise UserError(f"top_classes={top_classes}: must be at least 0 (0: a column for each class)")
    settings = settings or Settings()
    model = SavedModel(model_path, sidecar_path, settings, bad_samples)
    bad = BadSamples(model.bad_samples)
    if images is not None:
        batches = read_image_batches(model, images, list_image_files(images), batch_size or model.batch_size, bad)
    elif table is not None:
        batches = read_row_batches(model, str(table), batch_size, bad)
    elif dataset is not None:
        batches = read_test_batches(model, open_prepared(dataset), batch_size, bad)
    predictor = Predictor(model, top_classes)
    with replace_file(output) as file, replace_folder_on_success(get_mask_folder(output)) as masks:
        # surrogateescape: file names that are not UTF-8 are written unchanged.
        write_rows_and_masks(codecs.getwriter("utf-8")(file, "surrogateescape"), batches, predictor, masks)
    write_html(output.with_suffix(".html"), predictor.render_predictions_page(output.stem))
    print_samples_without_prediction(Progress(settings.progress), predictor.undefined, bad)
    return output


def write_rows_and_masks(file: Any, batches: Iterable[Batch], predictor: "Predictor", masks: Path) -> None:
    """Predict batches. Write a CSV row for each sample to ``file``, and the masks as PNG files into ``masks``.

    The header is written when the first sample is decoded.

    Raises:
        UserError: No sample can be decoded, the names of the columns change between batches, or a batch cannot be read.
    """
    writer: csv.DictWriter[str] | None = None
    waiting = list[dict[str, str]]()  # rows before the first decoded sample
    for batch in batches:
        columns = {"id": batch.ids, **predictor.predict_batch(batch, masks)}
        cells = [[format_csv_cell(name, value) for value in values] for name, values in columns.items()]
        waiting += [dict(zip(columns, row, strict=True)) for row in zip(*cells, strict=True)]
        if writer is None and any(batch.decoded):
            writer = csv.DictWriter(file, [*columns], restval="", lineterminator="\n")
            writer.writeheader()
        if writer is not None:
            if any(batch.decoded) and columns.keys() != {*writer.fieldnames}:
                raise UserError(
                    f"the table's columns are {', '.join(writer.fieldnames)} in one batch, but {', '.join(columns)} in "
                    "another; all batches must have the same columns"
                )
            writer.writerows(waiting)
            waiting.clear()
    if writer is None:
        raise UserError(f"none of the {predictor.samples:,} samples can be decoded; repair them")


class Predictor:
    """Predicts batches, counts predictions, and keeps PICTURES (24) samples with images for the page.

    The first samples are kept. With two classes, the samples with the highest scores of the second class are kept.
    """

    def __init__(self, model: SavedModel, top_classes: int = TOP_CLASSES) -> None:
        self.model, self.classifies = model, type(model.objective).answers is Classification.answers
        self.top_answers, self.top_truths = (
            top_classes if is_limited_to_top_classes(model.objective, method) else 0 for method in ("answers", "truths")
        )
        is_binary = self.classifies and len(model.classes) == 2
        self.ranking = (
            make_unique_column_names("score", model.classes)[1] if is_binary else ""
        )  # the second class's column
        self.predictions = Counter[str]()  # of classes
        self.pictures: list[Picture] = []
        self.samples = self.known = self.correct = 0
        self.undefined: list[str] = []  # ids of samples with NaN among the outputs, which have no prediction

    def predict_batch(self, batch: Batch, masks: Path) -> TableColumns:
        """Predict a batch, and return the columns of its table, except the id.

        Writes masks as PNG files into ``masks``, adds to the counts, and keeps samples for the page. Samples that
        cannot be decoded have "" in the answers. If no sample was decoded, returns only the columns of the truth.

        Raises:
            UserError: User-defined code fails, or the objective has no columns.
        """
        objective, truths, samples = self.model.objective, TableColumns(), len(batch.ids)
        if batch.truths is not None:
            truths = {"truth": batch.truths}
        elif batch.targets is not None:
            top, targets = self.top_truths, batch.targets
            truths = objective.top_truths(targets, top) if top else objective.truths(targets)
        decoded = [*compress(range(samples), batch.decoded)]
        self.samples += samples
        if not decoded:
            return truths
        with translate_user_errors(f"model {self.model.sidecar.model!r} on samples {batch.ids[0]} to {batch.ids[-1]}"):
            outputs = self.model.compute_outputs(batch.inputs)
        undefined = mark_rows_with_nan(outputs, len(decoded))
        self.undefined += [batch.ids[place] for place in compress(decoded, undefined)]
        targets = batch.targets[decoded] if isinstance(batch.targets, Tensor) else batch.targets
        answers = TableColumns()
        for name, values in make_answer_columns(self.model, outputs, targets, undefined, self.top_answers).items():
            cells: list[Any] = [""] * samples
            for place, value in zip(decoded, values, strict=True):
                cells[place] = value
            answers[name] = cells
        columns, shown = merge_columns(answers, truths), dict[int, Sequence[NDArray[Any]]]()
        if (predicted := objective.masks(outputs)) is not None:
            columns["mask"] = files = [""] * samples
            for place, mask in zip(decoded, predicted.cpu().numpy(), strict=True):
                files[place] = write_mask_png(masks, batch.ids[place], mask, len(self.model.classes))
                shown[place] = (mask,) if batch.targets is None else (batch.targets[place].cpu().numpy(), mask)
        texts = [describe_samples({} if shown else columns, name, samples) for name in ("prediction", "truth")]
        if batch.truths is not None:
            self.known += sum(texts[1][place] != MISSING for place in decoded)
            self.correct += sum(texts[0][place] == texts[1][place] for place in decoded)
        if self.classifies:
            self.predictions.update(name for name in columns["prediction"] if name)
        scores = columns.get(self.ranking or "score", [None] * samples)
        facts = {place: (texts[0][place], texts[1][place], scores[place]) for place in decoded}
        self.keep_samples_for_page(batch, facts, shown)
        return columns

    def keep_samples_for_page(
        self, batch: Batch, facts: Mapping[int, tuple[str, str, Any]], masks: Mapping[int, Sequence[NDArray[Any]]]
    ) -> None:
        """Add samples of the batch to ``pictures``, up to PICTURES (24).

        With two classes, keeps the samples with the highest scores of the second class, and drops other samples.

        Args:
            batch: The batch, of which decoded samples may be kept.
            facts: Prediction, truth and score of the decoded samples, by their place in the batch.
            masks: The masks of decoded samples, by place: the true mask if known, and the predicted mask.
        """
        spec, chosen = self.model.spec, np.arange(len(facts))[: PICTURES - len(self.pictures)]
        if self.ranking:
            chosen = np.argsort([-score for _, _, score in facts.values()], kind="stable")[:PICTURES]  # NaN last
        images = restore_images(batch.inputs, chosen, spec)
        columns = self.model.sidecar.preprocessing.columns
        inputs = make_input_columns(batch.inputs, columns, batch.rows)
        places = [*facts]
        for at, image in zip(chosen.tolist(), images, strict=False):
            place, values = places[at], format_sample_inputs(inputs, at)
            picture = Picture(batch.ids[place], image, *facts[place], masks=masks.get(place, ()), values=values)
            self.pictures.append(picture)
        if self.ranking:
            order = np.argsort([-float(picture.score or 0.0) for picture in self.pictures], kind="stable")
            self.pictures = [self.pictures[at] for at in order[:PICTURES]]

    def render_predictions_page(self, title: str) -> str:
        """Return the HTML page with the counts and the kept samples of all batches so far.

        ``title`` is the page's title.
        """
        facts, classes = [("Samples", f"{self.samples:,}")], self.model.classes
        if self.known:
            share = format_percent(self.correct / self.known)
            facts.append(("Correct", f"{self.correct:,} of {self.known:,}, {share}"))
        counted, pictured = self.predictions, f"The first {len(self.pictures)}"
        if len(counted) == 1 < counted.total():
            facts.append(("Predicted for all samples", next(iter(counted))))
        if self.ranking:
            pictured = f"The {len(self.pictures)} with the highest score of {classes[1]!r}"
            threshold = self.model.objective.facts.threshold
            shown = f"{counted[classes[1]]:,}" + (
                "" if threshold is None else f", with a score of at least {threshold:.4g}"
            )
            facts.append((f"Predicted {classes[1]!r}", shown))
        values = {"facts": facts, "pictured": pictured, "pictures": self.pictures}
        if any(picture.masks for picture in self.pictures):
            values["legend"] = [*zip(classes, choose_class_colors(len(classes)), strict=True)]
        return render_template("preview.html", title=title, heading="Predictions", **values)


def print_samples_without_prediction(progress: Progress, undefined: Sequence[str], bad: BadSamples) -> None:
    """Print how many samples have no prediction, with examples. Prints nothing if all samples have a prediction.

    Samples in ``undefined`` have NaN among their outputs. Samples in ``bad`` cannot be decoded.
    """
    if undefined:
        said = f"the outputs of {format_count(len(undefined), 'sample')} are NaN: no prediction for"
        progress.print_note(f"{said} {join_first(sorted(undefined))}; check their inputs")
    if bad.names:
        listed = join_first(sorted(f"{name} ({reason})" for name, reason in bad.names.items()))
        progress.print_note(f"no prediction for {len(bad.names):,} image(s), which cannot be decoded: {listed}")


def restore_images(
    inputs: Leaves, places: NDArray[np.int64] | list[int], spec: ModelInput
) -> Iterator[NDArray[np.uint8] | None]:
    """Yield the images, uint8 [H, W, C] on the CPU, from which the model's inputs at ``places`` were made.

    The normalisation is undone, but not the resizing. For inputs that are no images, yields None.
    """
    if not isinstance(spec, InputSpec):
        yield from [None] * len(places)
        return
    mean, std = (torch.tensor(values, device=inputs.device).view(-1, 1, 1) for values in (spec.mean, spec.std))
    for image in inputs[places]:
        values = (image.float() * std + mean).clamp(0, 1).mul(255).round().byte()
        yield values.permute(1, 2, 0).cpu().numpy()


def read_sample_setting(sidecar_path: Path) -> str:
    """Return the hyperparameter ``sample`` of a model's training, or "" if the training had none."""
    return str(read_model_json(sidecar_path).hyperparameters.get("sample", ""))


def get_mask_folder(table: Path) -> Path:
    return table.with_name(f"{table.name}.masks")


@contextmanager
def replace_folder_on_success(path: Path) -> Iterator[Path]:
    """Yield a new, empty folder. If the block raises no error, the new folder replaces the folder at ``path``.

    If the block leaves the new folder empty, no folder remains at ``path``. If the block raises an error, the folder at
    ``path`` remains, and the new folder is deleted. The parent folder must exist.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
        new = Path(temporary, path.name)
        new.mkdir()
        yield new
        shutil.rmtree(path, ignore_errors=True)
        if any(new.iterdir()):
            new.rename(path)


def write_mask_png(folder: Path, name: str, mask: NDArray[Any], classes: int) -> str:
    """Write a mask [H, W] of class numbers as a PNG into ``folder``. Returns the path relative to the parent.

    ``name`` is the sample's id, which may contain folders. Missing folders are created. If the file exists, a number is
    appended to the name. With up to 256 ``classes``, the PNG has colours.
    """
    path = Path(folder, *[part for part in PurePosixPath(name).parts if part not in ("/", "..")] or ["mask"])
    path.parent.mkdir(parents=True, exist_ok=True)
    file, number = path.with_name(f"{path.name}.png"), 1
    while file.exists():
        number += 1
        file = path.with_name(f"{path.name}-{number}.png")
    image = Image.fromarray(mask.astype(np.uint16 if classes > PALETTE else np.uint8))
    if classes <= PALETTE:
        image.putpalette(color_table(classes).tobytes())
    image.save(file, format="PNG")
    return file.relative_to(folder.parent).as_posix()
