"""A data set of the user's own, made by a callable that the hyperparameters name."""

import operator
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.datasets.arrays import ImageArrays, Images, image_arrays
from flyte_ddp.datasets.identity import content_identity, digest_of
from flyte_ddp.errors import UserError
from flyte_ddp.pictures import opaque_picture
from flyte_ddp.progress import Progress
from flyte_ddp.user_code import load_callable
from flyte_ddp.user_source import user_source_digest


@dataclass(frozen=True)
class CustomSet:
    """A data set by the name of its callable, which takes the data source and returns what :func:`collect` takes."""

    spec: str

    def fingerprint(self, source: str) -> str:
        """Return a name for the user's code and the content of the source; imports no code, and copies no content."""
        identity = digest_of([self.spec, user_source_digest(self.spec), source, content_identity(source)])
        return f"{re.sub(r'[^A-Za-z0-9_.]', '-', self.spec)}-{identity[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[ImageArrays, str]:
        """Call the user's code; return the arrays, and where they came from."""
        del workspace  # where the user's code downloads to is its own affair
        arrays = collect(self.spec, load_callable(self.spec)(source), progress)
        return arrays, f"{self.spec}({source!r})"


def collect(spec: str, result: Any, progress: Progress) -> ImageArrays:
    """Return what the user's callable returned as checked arrays, or raise a UserError that names the callable.

    Args:
        spec: the name of the callable.
        result: an ``ImageArrays``, or a pair (training set, test set) of map-style data sets as torch's and
            torchvision's: ``len()``, and items of an image and a label. An image is a PIL image, a uint8 array [H, W]
            or [H, W, C], or a uint8 tensor [H, W] or [C, H, W]; a PIL image is put on white where it is transparent,
            and of 16 bits the upper 8 count. The names of the classes are the training set's ``classes``, or else 0,
            1, 2 and so on.
        progress: shows how many images were read.
    """
    if not isinstance(result, ImageArrays) and not (isinstance(result, (tuple, list)) and len(result) == 2):
        raise UserError(
            f"dataset={spec!r}: returned {type(result).__name__}; must return flyte_ddp.datasets.image_arrays(...) or "
            "a pair (training set, test set)"
        )
    try:
        if isinstance(result, ImageArrays):
            four = (result.train_images, result.train_labels, result.test_images, result.test_labels)
            return image_arrays(*four, classes=result.classes, name=spec)
        train_images, train_labels = read_samples("training set", result[0], progress)
        test_images, test_labels = read_samples("test set", result[1], progress)
        classes = getattr(result[0], "classes", None) or map(str, range(max(*train_labels, *test_labels) + 1))
        return image_arrays(train_images, train_labels, test_images, test_labels, list(classes), name=spec)
    except UserError as error:
        raise UserError(f"dataset={spec!r}: {error.message}") from error


def read_samples(which: str, samples: Any, progress: Progress) -> tuple[Images, list[int]]:
    """Return images [N, H, W, C] and labels [N] of a map-style data set, which errors call ``which``."""
    count = count_samples(which, samples)
    if count == 0:
        raise UserError(f"{which}: is empty")
    images, labels = np.empty((0,), dtype=np.uint8), []
    with progress.track(which, count, "images") as advance:
        for index in range(count):
            image, label = pixels_and_label(which, index, samples[index])
            if index == 0:
                images = np.empty((count, *image.shape), dtype=np.uint8)
            if image.shape != images.shape[1:]:
                one, other = ("x".join(map(str, shape)) for shape in (image.shape, images.shape[1:]))
                raise UserError(
                    f"{which}: image {index} is {one} and image 0 is {other}; all must have one size: resize them and "
                    "convert them to one mode"
                )
            images[index] = image
            labels.append(label)
            advance(1)
    return images, labels


def count_samples(which: str, samples: Any) -> int:
    """Return ``len(samples)``, or raise a UserError that calls the data set ``which``."""
    try:
        return len(samples)
    except TypeError:
        raise UserError(f"{which}: a {type(samples).__name__} has no len(); it must be a map-style data set") from None


def pixels_and_label(which: str, index: int, item: Any) -> tuple[Images, int]:
    """Return one item of a data set as uint8 [H, W, C] and a whole number, or raise a UserError."""
    try:
        image, label = item
        label = operator.index(label)
    except (TypeError, ValueError) as error:
        raise UserError(f"{which}: item {index} must be an image and a whole-number label: {error}") from error
    if hasattr(image, "convert"):  # a PIL image: palettes, CMYK and the like become RGB, bitmaps and 16 bits grey
        try:
            image = opaque_picture(image)
        except ValueError as error:
            raise UserError(f"{which}: image {index} cannot be taken: {error}") from None
        image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        raise UserError(
            f"{which}: image {index} is {pixels.dtype} {list(pixels.shape)}; must be a PIL image or uint8: "
            "leave out transforms such as ToTensor and Normalize, training does that itself"
        )
    if pixels.ndim == 2:
        return pixels[..., np.newaxis], label
    return (pixels.transpose(1, 2, 0) if hasattr(image, "permute") else pixels), label
