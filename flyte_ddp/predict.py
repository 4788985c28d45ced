"""A trained model and images to a table of predictions."""

from __future__ import annotations

import codecs
import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from flyte_ddp import artifacts, datasets
from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing
from flyte_ddp.images import InputSpec, prepare

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")

Batch = tuple[Sequence[str], Sequence[str] | None, Tensor]
"""Ids, truths if known, and the model's input: float32 [N, C, H, W] on the device."""


def predict(
    model_path: Path,
    sidecar_path: Path,
    *,
    images: Path | None,
    dataset: Path | None,
    output: Path,
    batch_size: int = 500,
) -> Path:
    """Writes a CSV table with one row for each image.

    Its columns are ``id`` (path below ``images``, or index in the test split), ``guess`` (the likeliest class),
    ``truth`` (for a data set), ``score`` (the guess's probability) and ``score_<class>`` for every class.

    Args:
        model_path: ``model.pt`` of a run.
        sidecar_path: ``model.json`` of the same run.
        images: a folder of images, searched at all depths; files of other types and hidden ones are passed over.
        dataset: a prepared data set's folder, whose test split is predicted. Give this or ``images``.
        output: the table's path.
        batch_size: images in memory at a time.

    Raises:
        UserError: a missing, damaged or mismatched model; no images, or one that cannot be read; images whose channels
            the model does not take; an output that cannot be written.

    """
    if (images is None) == (dataset is None):
        raise UserError(f"images={images}, dataset={dataset}: give exactly one of the two")
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: must be at least 1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, sidecar = artifacts.load_model(model_path, sidecar_path, device)
    classes = [str(name) for name in sidecar["classes"]]
    spec = artifacts.input_spec(sidecar)
    if images is not None:
        batches = folder_batches(images, spec, batch_size, device)
    elif dataset is not None:
        batches = dataset_batches(dataset, spec, batch_size, device)

    truth_column = ["truth"] if dataset is not None else []
    with replacing(output) as file, torch.inference_mode():
        # surrogateescape: file names that are not UTF-8 go through as they are.
        table = csv.writer(codecs.getwriter("utf-8")(file, "surrogateescape"), lineterminator="\n")
        table.writerow(["id", "guess", *truth_column, "score", *(f"score_{name}" for name in classes)])
        for ids, truths, batch in batches:
            logits = model(batch).float()
            scores = torch.softmax(logits, dim=1).tolist()
            guesses = logits.argmax(dim=1).tolist()
            for row, (name, guess) in enumerate(zip(ids, guesses, strict=True)):
                truth = [] if truths is None else [truths[row]]
                numbers = [f"{score:.6g}" for score in (scores[row][guess], *scores[row])]
                table.writerow([name, classes[guess], *truth, *numbers])
    return output


def folder_batches(folder: Path, spec: InputSpec, batch_size: int, device: torch.device) -> Iterator[Batch]:
    """The images below a folder, in the order of their paths."""
    if spec.channels not in (1, 3):
        raise UserError(
            f"the model takes {spec.channels} channels: image files have 1 or 3; predict a prepared data set instead"
        )
    paths = image_paths(folder)
    for start in range(0, len(paths), batch_size):
        part = paths[start : start + batch_size]
        prepared = [prepare(read_image(path, spec.channels)[None].to(device), spec) for path in part]
        yield [path.relative_to(folder).as_posix() for path in part], None, torch.cat(prepared)


def image_paths(folder: Path) -> list[Path]:
    """Every image file below a folder, sorted."""
    if not folder.is_dir():
        raise UserError(f"images={folder}: must be a folder of images")
    paths = [
        Path(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    ]
    if not paths:
        raise UserError(f"images={folder}: no image in it; put {', '.join(SUFFIXES)} files there")
    return sorted(paths)


def read_image(path: Path, channels: int) -> Tensor:
    """One image file as uint8 [H, W, channels]: grey for 1 channel, RGB for 3."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip at 255 and not scale
                eight_bits = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            else:
                eight_bits = image.copy()
            pixels = np.array(eight_bits.convert("L" if channels == 1 else "RGB"))
    except UnidentifiedImageError as error:
        raise UserError(f"{path} is not an image: its contents are of no known format; remove or repair it") from error
    except (OSError, EOFError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path} cannot be read as an image ({reason}); remove or repair it") from error
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels))


def dataset_batches(folder: Path, spec: InputSpec, batch_size: int, device: torch.device) -> Iterator[Batch]:
    """The test split of a prepared data set, in its own order."""
    arrays = datasets.open_prepared(folder)
    if not isinstance(arrays, datasets.ImageArrays):
        raise UserError(
            f"dataset={arrays.name!r}: predictions are made of image files or of data sets held as arrays; "
            "give its images as a folder (images)"
        )
    channels = arrays.test_images.shape[3]
    if channels not in (1, spec.channels):
        raise UserError(
            f"data set {arrays.name!r} has {channels} channels: the model takes {spec.channels}; "
            "predict the data set that it was trained on, or one like it"
        )
    for start in range(0, len(arrays.test_images), batch_size):
        stop = min(start + batch_size, len(arrays.test_images))
        pixels = torch.from_numpy(np.array(arrays.test_images[start:stop])).to(device)
        truths = [arrays.classes[label] for label in arrays.test_labels[start:stop]]
        yield [str(index) for index in range(start, stop)], truths, prepare(pixels, spec)
