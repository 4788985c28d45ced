"""Images and labels as plain arrays, and the folder of files in which all ranks share them."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.class_names import class_names
from flyte_ddp.errors import UserError
from flyte_ddp.files import atomic_write

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
DESCRIPTION = "dataset.json"
TEST_DIGEST = "test_digest"  # the description's entry with the digest of the test split alone
FORMAT = {"format": 2}  # grows with each change of what equal sources are prepared to
CHUNK_BYTES = 4 << 20  # of images that are counted at a time: counting takes eight times their memory


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """A classification data set; :func:`image_arrays` makes one, :func:`open_arrays` opens a prepared one.

    ``train_images`` is uint8 [N, H, W, C] in C order with C = 1 for grey, ``train_labels`` int64 [N] with values in
    0..len(classes)-1; the test arrays likewise. ``mean`` and ``std`` are those of the training images scaled to 0..1,
    one number a channel. ``digest`` is the SHA-256 (hex) of the four arrays and the classes. Only :func:`open_arrays`
    fills in the last three.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    digest: str = ""


def image_arrays(
    train_images: Any,
    train_labels: Any,
    test_images: Any,
    test_labels: Any,
    classes: Sequence[str],
    *,
    name: str = "",
) -> ImageArrays:
    """Check arrays, lists or CPU tensors, and return them in the form that training uses.

    Args:
        train_images: uint8 [N, H, W, C], or [N, H, W] for grey images.
        train_labels: whole numbers [N], each the position of the sample's class in ``classes``.
        test_images: uint8 [M, H, W, C] or [M, H, W], of the same size and channels.
        test_labels: whole numbers [M].
        classes: the classes' names.
        name: what the data set is called; callables named in the hyperparameters can leave it out.

    Raises:
        UserError: another type or shape, no samples, no classes, names that are not UTF-8, or a label that is not a
            class's position.
    """
    if not classes:
        raise UserError("classes=(): there must be a name for each class")
    arrays = ImageArrays(
        name=name,
        train_images=convert_images("train_images", train_images),
        train_labels=convert_labels("train_labels", train_labels, len(train_images), len(classes)),
        test_images=convert_images("test_images", test_images),
        test_labels=convert_labels("test_labels", test_labels, len(test_images), len(classes)),
        classes=class_names("classes", classes),
    )
    train, test = ("x".join(map(str, images.shape[1:])) for images in (arrays.train_images, arrays.test_images))
    if train != test:
        raise UserError(f"train_images are {train} and test_images {test}: both must have one size")
    return arrays


def convert_images(name: str, values: Any) -> Images:
    """Return images as uint8 [N, H, W, C] in C order, or raise a UserError that calls them ``name``."""
    images = np.asarray(values)
    if images.dtype != np.uint8:
        raise UserError(f"{name}: must be uint8 with values 0..255, got {images.dtype}; scale and convert them")
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or 0 in images.shape:
        raise UserError(f"{name}: must be [N, H, W, C] or [N, H, W] with at least one sample, got {list(images.shape)}")
    if images.shape[1] in (1, 3) and images.shape[3] > 4:
        raise UserError(f"{name}: {list(images.shape)} looks like [N, C, H, W]; transpose them to [N, H, W, C]")
    return np.ascontiguousarray(images)


def convert_labels(name: str, values: Any, samples: int, classes: int) -> Labels:
    """Return labels as int64 [samples] in 0..classes-1, or raise a UserError that calls them ``name``."""
    labels = np.asarray(values)
    if labels.dtype.kind not in "iu":
        raise UserError(f"{name}: must be whole numbers, got {labels.dtype}")
    if labels.shape != (samples,):
        raise UserError(f"{name}: must be one label for each of the {samples} images, got shape {list(labels.shape)}")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise UserError(
            f"{name}: label {labels[wrong[0]]} of sample {wrong[0]} is not one of the {classes} classes: "
            f"must be 0..{classes - 1}"
        )
    return np.ascontiguousarray(labels, dtype=np.int64)


def normalisation(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of images uint8 [N, H, W, C], scaled to 0..1.

    Exact but for one rounding to fp64, as they come from counts of the 256 values. The deviation of a constant channel
    is given as 1: inputs are divided by it.
    """
    rows = max(1, CHUNK_BYTES * len(images) // images.nbytes)
    chunks = [images[start : start + rows].reshape(-1, images.shape[3]) for start in range(0, len(images), rows)]
    counts = sum(np.stack([np.bincount(column, minlength=256) for column in chunk.T]) for chunk in chunks)
    mean, std = [], []
    for row in np.asarray(counts).tolist():
        pixels = sum(row)
        total = sum(value * count for value, count in enumerate(row))
        squares = sum(value * value * count for value, count in enumerate(row))
        spread = pixels * squares - total * total
        mean.append(total / (255 * pixels))
        std.append(math.sqrt(spread / (255 * pixels) ** 2) if spread else 1.0)
    return tuple(mean), tuple(std)


def content_digest(arrays: ImageArrays, names: Sequence[str] = ARRAYS) -> str:
    """Return the SHA-256 (hex) of the arrays with these names (type, shape and values) and of the classes' names."""
    digest = hashlib.sha256(json.dumps(arrays.classes).encode())
    for name in names:
        array = getattr(arrays, name)
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.reshape(-1).data)
    return digest.hexdigest()


def write_arrays(arrays: ImageArrays, folder: Path, origin: dict[str, str]) -> None:
    """Write a data set and its measures into an existing folder, the description last, with ``origin`` in it.

    Raises OSErrors, whose errno tells a full disk.
    """
    for name in ARRAYS:
        write_array(folder / f"{name}.npy", getattr(arrays, name))
    mean, std = normalisation(arrays.train_images)
    description = {
        **FORMAT,
        "name": arrays.name,
        "classes": arrays.classes,
        "mean": mean,
        "std": std,
        "digest": content_digest(arrays),
        TEST_DIGEST: content_digest(arrays, ARRAYS[2:]),
        **origin,
    }
    write_json(folder / DESCRIPTION, description, indent=1)


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write content as JSON, whole or not at all."""
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=indent).encode())  # json.dump would go through all of it in Python


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write an array in C order as a ``.npy`` file, whole or not at all."""
    with atomic_write(path) as file:  # not by numpy.save, whose error for a full disk has no errno
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


def open_arrays(folder: Path) -> ImageArrays:
    """Open a prepared folder; its arrays are memory-mapped, read-only, and shared by all processes that open it.

    Raises a UserError if the folder is not a prepared data set, or a file of it is missing or truncated.
    """
    description = read_description(folder)
    with refuse_damage(folder):
        return ImageArrays(
            name=description["name"],
            classes=tuple(description["classes"]),
            mean=tuple(description["mean"]),
            std=tuple(description["std"]),
            digest=description["digest"],
            **{name: map_array(folder / f"{name}.npy") for name in ARRAYS},
        )


def map_array(path: Path) -> NDArray[Any]:
    """Return the array of a ``.npy`` file, memory-mapped and read-only."""
    mapped: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


def read_description(folder: Path) -> dict[str, Any]:
    """Return what ``dataset.json`` in a prepared folder says, or raise a UserError if it is missing or damaged."""
    if not (folder / DESCRIPTION).exists():
        raise UserError(f"{folder}: is not a prepared data set, there is no {DESCRIPTION} in it; fetch one there")
    with refuse_damage(folder):
        return dict(json.loads((folder / DESCRIPTION).read_bytes()))


@contextmanager
def refuse_damage(folder: Path) -> Iterator[None]:
    """Turn an exception of a block that reads a prepared folder into a UserError."""
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}: the prepared data set is damaged ({error}); delete the folder and fetch it again"
        ) from error


def total_bytes(arrays: ImageArrays) -> int:
    """Return the size of the four arrays, which is what the prepared folder takes on the disk."""
    return sum(getattr(arrays, name).nbytes for name in ARRAYS)
