"""What a model is to predict, in batches: a folder of images, or the test split of a data set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from flyte_ddp.artifacts import MIDDLE
from flyte_ddp.datasets import ImageArrays
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.errors import UserError
from flyte_ddp.images import InputSpec, prepare
from flyte_ddp.loading import cropping, open_tests
from flyte_ddp.loading.decoding import DecodingError, decode, eight_bits
from flyte_ddp.settings import Settings

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")

Batch = tuple[Sequence[str], Sequence[str] | None, Tensor]
"""Ids, truths if known, and the model's input: float32 [N, C, H, W] on the device."""


def folder_batches(folder: Path, spec: InputSpec, crop: str, batch_size: int, device: torch.device) -> Iterator[Batch]:
    """The images below a folder, in the order of their paths."""
    if spec.channels not in (1, 3):
        raise UserError(
            f"the model takes {spec.channels} channels: image files have 1 or 3; predict a prepared data set instead"
        )
    paths = image_paths(folder)
    for start in range(0, len(paths), batch_size):
        part = paths[start : start + batch_size]
        pixels = [middle_of(path, spec.height) if crop == MIDDLE else read_image(path, spec.channels) for path in part]
        prepared = [prepare(image[None].to(device), spec) for image in pixels]
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
            pixels = np.array(eight_bits(image).convert("L" if channels == 1 else "RGB"))
    except UnidentifiedImageError as error:
        raise UserError(f"{path} is not an image: its contents are of no known format; remove or repair it") from error
    except (OSError, EOFError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise unreadable(path, error) from error
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels))


def middle_of(path: Path, size: int) -> Tensor:
    """The middle of an image file as training has seen it in evaluations: uint8 [size, size, 3]."""
    try:
        pixels = decode(path.read_bytes())
    except (OSError, DecodingError) as error:
        raise unreadable(path, error) from error
    height, width, _ = pixels.shape
    return torch.from_numpy(cropping.resized(pixels, cropping.middle_crop(height, width), size))


def unreadable(path: Path, error: Exception) -> UserError:
    """The error for a file that is no image, or a damaged one."""
    reason = getattr(error, "strerror", None) or str(error)
    return UserError(f"{path} cannot be read as an image ({reason}); remove or repair it")


def array_batches(arrays: ImageArrays, spec: InputSpec, batch_size: int, device: torch.device) -> Iterator[Batch]:
    """The test split of a data set held as arrays, in its own order."""
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


def encoded_batches(
    data: EncodedSet,
    spec: InputSpec,
    batch_size: int,
    device: torch.device,
    *,
    classes: Sequence[str],
    bad_samples: int,
    settings: Settings,
) -> Iterator[Batch]:
    """The test split of shards, or of a folder of images, as training has it."""
    if spec.channels != 3 or spec.height != spec.width:
        raise UserError(
            f"dataset={data.name!r}: has colour images that become squares, and the model takes {spec.channels} x "
            f"{spec.height} x {spec.width}; predict with a model that was trained on such images"
        )
    names = data.classes or classes
    tests = open_tests(data, spec.height, len(names), bad_samples, device=device, settings=settings)
    try:
        for place, images, labels in tests.batches(batch_size, 0, 1):
            ids = [str(index) for index in range(place.start, place.stop)]
            yield ids, [names[label] for label in labels.tolist()], prepare(images, spec)
    finally:
        tests.source.close()
