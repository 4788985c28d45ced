"""Data sets of arrays of images and labels: check the arrays, and open a prepared folder of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.datasets.prepared_folder import ArraySet, open_folder, read_array
from flyte_ddp.errors import UserError
from flyte_ddp.samples.class_names import normalize_class_names

Images = NDArray[np.uint8]
Targets = NDArray[Any]

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
CHUNK_BYTES = 4 << 20  # images are counted in chunks of this size: np.bincount takes eight times their memory


@dataclass(frozen=True, eq=False)
class ImageArrays(ArraySet):
    """A data set of images as arrays; only :func:`open_arrays` sets ``mean``, ``std`` and ``digest``."""

    name: str
    train_images: Images  # uint8 [N, H, W, C] in C order, with C = 1 for grey
    train_labels: Targets  # class numbers int64 [N], numbers float32 [N] or [N, d], or masks of class numbers [N, H, W]
    test_images: Images  # uint8 [M, H, W, C]
    test_labels: Targets  # [M, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()  # of each channel of the training images, scaled to 0..1
    std: tuple[float, ...] = ()
    digest: str = ""
    sample_weights: NDArray[np.float64] | None = None

    pictures = True

    # What sets of other samples call these.
    train_inputs = property(lambda self: self.train_images)
    train_targets = property(lambda self: self.train_labels)
    test_inputs = property(lambda self: self.test_images)
    test_targets = property(lambda self: self.test_labels)

    def list_arrays(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name) for name in ARRAYS}

    def describe_content(self) -> dict[str, Any]:
        mean, std = channel_mean_and_std(self.train_images)
        return {"mean": mean, "std": std}


def image_arrays(
    train_images: Any,
    train_labels: Any,
    test_images: Any,
    test_labels: Any,
    classes: Sequence[str] | NDArray[np.str_],
    *,
    name: str = "",
    sample_weights: Any = None,
) -> ImageArrays:
    """Check arrays, lists or CPU tensors of images and labels, and return them as :class:`ImageArrays`.

    Images are uint8 [N, H, W, C], or [N, H, W] if grey; test images have the training images' height, width and
    channels. Labels are what the objective needs: class numbers [N], positions in ``classes``; 0 and 1, or NaN for
    unknown, for each of several labels [N, len(classes)]; numbers to predict, float [N] or [N, d], without ``classes``;
    or a mask of class numbers for each image [N, H, W], 255 where a pixel does not count. ``name`` may be empty if the
    hyperparameter ``dataset`` names the callable that returns these arrays. ``sample_weights`` [N], for ``sampling``
    "weighted", are of the training images, not all 0. Raises a UserError for another type or shape, unfit class names,
    or class numbers outside 0..len(classes)-1. Copies arrays only to convert them.
    """
    images = [require_images("train_images", train_images), require_images("test_images", test_images)]
    labels = [
        convert_targets(name, values, of, len(classes))
        for name, values, of in (("train_labels", train_labels, images[0]), ("test_labels", test_labels, images[1]))
    ]
    for what, arrays in (("images", images), ("labels", labels)):
        train, test = ("x".join(map(str, array.shape[1:])) or "numbers" for array in arrays)
        if train != test:
            raise UserError(f"train_{what} are {train} and test_{what} {test}: both must have one size")
    if labels[0].dtype != labels[1].dtype:
        types = f"train_labels are {labels[0].dtype} and test_labels {labels[1].dtype}"
        raise UserError(f"{types}: both must have one type")
    names = normalize_class_names("classes", classes)
    weights = None if sample_weights is None else convert_weights(sample_weights, len(images[0]))
    return ImageArrays(name, images[0], labels[0], images[1], labels[1], names, sample_weights=weights)


def require_array(name: str, values: Any) -> NDArray[Any]:
    """Return ``values`` as an array; UserError about ``name`` for ragged, GPU or masked ones, or 2**63 and more."""
    refuse_masked(name, values)
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # torch raises a RuntimeError for a tensor with gradients
        raise UserError(f"{name}: is no array ({error}); give one of equal parts, in the CPU's memory") from None
    if array.dtype == np.uint64 and array.max(initial=0) >= 2**63:
        raise UserError(f"{name}: has {array.max()}: whole numbers must be below 2**63; give floats, or lower ones")
    return array


def refuse_masked(name: str, values: Any) -> None:
    parts = values if isinstance(values, (list, tuple)) else [values]
    if any(isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part) for part in parts):
        raise UserError(
            f"{name}: has masked values, and the mask would be lost; fill them (.filled(0), of targets that are floats "
            ".filled(np.nan)), or give the mask as an array of its own"
        )


def require_images(name: str, values: Any) -> Images:
    """Return uint8 images as C-contiguous [N, H, W, C], also of [N, H, W]; UserError for other types or layouts."""
    images = require_array(name, values)
    if images.dtype != np.uint8:
        raise UserError(f"{name}: must be uint8 with values 0..255, got {images.dtype}; scale and convert them")
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or 0 in images.shape:
        raise UserError(f"{name}: must be [N, H, W, C] or [N, H, W] with at least one sample, got {list(images.shape)}")
    if images.shape[1] in (1, 3) and images.shape[3] > 4:
        raise UserError(f"{name}: {list(images.shape)} looks like [N, C, H, W]; transpose them to [N, H, W, C]")
    return np.ascontiguousarray(images)


def convert_targets(name: str, values: Any, images: Images, classes: int) -> Targets:
    """Return contiguous targets, int64 [N], float32 [N] or [N, d], or masks uint8 or int64 [N, H, W]; or UserError."""
    targets, samples = require_array(name, values), len(images)
    if targets.dtype.kind not in "biuf":
        raise UserError(f"{name}: must be numbers, got {targets.dtype}")
    if targets.ndim == 3 and targets.dtype.kind in "iu":
        if targets.shape != images.shape[:3]:
            of = f"{list(targets.shape)}, and the images are {list(images.shape[:3])}"
            raise UserError(f"{name}: the masks are {of}: a mask must have its image's height and width")
        small = targets.dtype == np.uint8
        return np.ascontiguousarray(targets, dtype=np.uint8 if small else np.int64)
    if targets.ndim == 3 and len(targets) == samples:
        raise UserError(f"{name}: masks must be whole numbers, got {targets.dtype}; convert them to class numbers")
    if targets.ndim not in (1, 2) or len(targets) != samples:
        raise UserError(f"{name}: must be one label for each of the {samples} images, got shape {list(targets.shape)}")
    if targets.ndim == 2 or (targets.dtype.kind == "f" and not classes):
        return np.ascontiguousarray(targets, dtype=np.float32)
    if targets.dtype.kind == "b" or (targets.dtype.kind == "f" and classes):
        raise UserError(
            f"{name}: must be whole numbers, got {targets.dtype}; convert class numbers to int64, or leave out classes "
            "to predict numbers"
        )
    if not classes:
        raise UserError("classes=(): there must be a name for each class; numbers to predict must be float")
    require_class_numbers(name, targets, classes)
    return np.ascontiguousarray(targets, dtype=np.int64)


def require_class_numbers(name: str, targets: Targets, classes: int) -> None:
    """Raise UserError, with ``name`` in its text, for class numbers [N] that are not in 0..classes-1."""
    wrong = np.flatnonzero((targets < 0) | (targets >= classes))
    if len(wrong):
        raise UserError(
            f"{name}: label {targets[wrong[0]]} of sample {wrong[0]} is not one of the {classes} classes: "
            f"must be 0..{classes - 1}"
        )


def convert_weights(values: Any, samples: int) -> NDArray[np.float64]:
    """Return ``values`` as weights float64 [samples]; UserError unless all are finite and >= 0, and one is above 0."""
    weights = require_array("sample_weights", values)
    if weights.dtype.kind not in "fiu":
        raise UserError(f"sample_weights: must be numbers, got {weights.dtype}")
    if weights.shape != (samples,):
        raise UserError(
            f"sample_weights: must be one number for each of the {samples} training samples, got {list(weights.shape)}"
        )
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise UserError(
            f"sample_weights: weight {weights[wrong[0]]} of sample {wrong[0]}: must be a finite number of at least 0"
        )
    if not weights.any():
        raise UserError("sample_weights: are all 0; give those above 0 that training shall draw")
    return np.ascontiguousarray(weights, dtype=np.float64)


def channel_mean_and_std(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return exact mean and deviation of each channel of images uint8 [N, H, W, C], scaled to 0..1."""
    rows = max(1, CHUNK_BYTES * len(images) // images.nbytes)  # images in a chunk
    chunks = [images[start : start + rows].reshape(-1, images.shape[3]) for start in range(0, len(images), rows)]
    counts = sum(np.stack([np.bincount(column, minlength=256) for column in chunk.T]) for chunk in chunks)
    mean, std = [], []
    for row in np.asarray(counts).tolist():
        pixels, total, squares = (sum(value**power * count for value, count in enumerate(row)) for power in range(3))
        spread = pixels * squares - total * total  # exact, as Python's integers are: 0 for a constant channel
        mean.append(total / (255 * pixels))
        std.append(math.sqrt(spread / (255 * pixels) ** 2) if spread else 1.0)  # inputs are divided by it
    return tuple(mean), tuple(std)


def open_arrays(folder: Path) -> ImageArrays:
    with open_folder(folder) as (description, fields):
        fields |= {key: tuple(description[key]) for key in ("mean", "std")}
        fields |= {name: read_array(folder, f"{name}.npy") for name in ARRAYS}
        return ImageArrays(**fields)
