"""Data sets of images as arrays uint8 [N, H, W, C], with class numbers, several labels, numbers or masks."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.samples.class_names import normalize_class_names
from flyte_ddp.core.samples.leaves import convert_to_array, require_numbers
from flyte_ddp.datasets.leaf_conversion import convert_weights, require_class_numbers, unify_sides
from flyte_ddp.datasets.sample_arrays import SampleArrays

Images = NDArray[np.uint8]
CHUNK_BYTES = 4 << 20  # size of chunks in which pixels are counted: np.bincount needs eight times their memory


def image_arrays(
    train_images: Any,
    train_labels: Any,
    test_images: Any,
    test_labels: Any,
    classes: Sequence[str] | NDArray[np.str_],
    *,
    name: str = "",
    sample_weights: Any = None,
) -> SampleArrays:
    """Return a data set of images and labels, given as arrays, lists or CPU tensors.

    The objective decides what labels are. Class numbers are whole numbers [N], positions in ``classes``. Several labels
    are [N, len(classes)] with 1, 0, or NaN for unknown. Numbers to predict are float [N] or [N, d], with empty
    ``classes``. Masks are class numbers [N, H, W], with 255 for ignored pixels. Arrays are copied only to convert them.

    Args:
        train_images: uint8 [N, H, W, C], or [N, H, W] if grey.
        train_labels: Labels of the training images.
        test_images: Images with the same height, width and channels as the training images.
        test_labels: Labels of the test images.
        classes: Names of the classes.
        name: May be empty if the hyperparameter ``dataset`` names the callable that returns these arrays.
        sample_weights: Weights [N] of the training images for ``sampling`` "weighted". Finite, at least 0, not all 0.

    Raises:
        UserError: A type, a shape, a class name or a weight is unfit, or a class number [N] is outside
            0..len(classes)-1.
    """
    images, labels = dict[str, Images](), dict[str, NDArray[Any]]()
    for side, pixels, given in (("train", train_images, train_labels), ("test", test_images, test_labels)):
        images[side] = require_images(f"{side}_images", pixels)
        labels[side] = convert_targets(f"{side}_labels", given, images[side], len(classes))
    train_inputs, test_inputs = unify_sides("images", images["train"], images["test"])
    train_targets, test_targets = unify_sides("labels", labels["train"], labels["test"])
    names = normalize_class_names("classes", classes)
    weights = convert_weights(sample_weights, len(train_inputs))
    mean, std = channel_mean_and_std(images["train"])
    return SampleArrays(
        name, train_inputs, train_targets, test_inputs, test_targets, names, sample_weights=weights, mean=mean, std=std
    )


def require_images(name: str, values: Any) -> Images:
    """Return images as a contiguous array uint8 [N, H, W, C]. Grey images may be given as [N, H, W].

    Raises:
        UserError: The type is not uint8, the shape is another or looks like [N, C, H, W], or there is no image. The
            text begins with ``name``.
    """
    images = convert_to_array(name, values)
    if images.dtype != np.uint8:
        raise UserError(f"{name}: must be uint8 with values 0..255, got {images.dtype}; scale and convert them")
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or 0 in images.shape:
        raise UserError(f"{name}: must be [N, H, W, C] or [N, H, W] with at least one sample, got {list(images.shape)}")
    if images.shape[1] in (1, 3) and images.shape[3] > 4:
        raise UserError(f"{name}: {list(images.shape)} looks like [N, C, H, W]; transpose them to [N, H, W, C]")
    return np.ascontiguousarray(images)


def convert_targets(name: str, values: Any, images: Images, classes: int) -> NDArray[Any]:
    """Return the labels of ``images`` as a contiguous array in the type that training expects.

    Class numbers become int64 [N], several labels float32 [N, d], and numbers to predict float32 [N] or [N, d]. Masks
    [N, H, W] stay uint8, or become int64 from another type.

    Args:
        name: The name of the labels, with which errors begin.
        values: The labels as the user gave them.
        images: The images of the labels.
        classes: The number of classes, or 0 for numbers to predict.

    Raises:
        UserError: Labels do not fit the images, or the type does not fit ``classes``. Also if a class number is out of
            range. The class numbers of masks are not checked.
    """
    targets = convert_to_array(name, values)
    require_numbers(name, targets, "give class numbers, or numbers to predict")
    whole = targets.dtype.kind in "iu"
    if targets.ndim not in (1, 2, 3) or len(targets) != len(images):
        labels = f"must be one label for each of the {len(images)} images"
        raise UserError(f"{name}: {labels}, got shape {list(targets.shape)}")
    if targets.ndim == 3:
        if not whole or targets.shape != images.shape[:3]:
            rule = f"masks must be whole numbers in the images' shape {list(images.shape[:3])}"
            raise UserError(f"{name}: {rule}, got {targets.dtype} {list(targets.shape)}")
        return np.ascontiguousarray(targets, dtype=np.uint8 if targets.dtype == np.uint8 else np.int64)
    if targets.ndim == 2 or (targets.dtype.kind == "f" and not classes):
        return np.ascontiguousarray(targets, dtype=np.float32)
    if not whole:
        fix = "convert class numbers to int64, or omit classes to predict numbers"
        raise UserError(f"{name}: must be whole numbers, got {targets.dtype}; {fix}")
    if not classes:
        raise UserError("classes=(): each class needs a name; numbers to predict must be floats")
    require_class_numbers(name, targets, classes)
    return np.ascontiguousarray(targets, dtype=np.int64)


def channel_mean_and_std(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return exact mean and standard deviation of each channel of images uint8 [N, H, W, C], scaled to 0..1.

    The deviation of a constant channel is returned as 1.
    """
    rows = max(1, CHUNK_BYTES * len(images) // images.nbytes)  # images in a chunk
    chunks = [images[start : start + rows].reshape(-1, images.shape[3]) for start in range(0, len(images), rows)]
    counts = sum(np.stack([np.bincount(column, minlength=256) for column in chunk.T]) for chunk in chunks)
    mean, std = [], []
    for row in np.asarray(counts).tolist():
        pixels, total, squares = (sum(value**power * count for value, count in enumerate(row)) for power in range(3))
        spread = pixels * squares - total * total  # exact integers: 0 for a constant channel
        mean.append(total / (255 * pixels))
        std.append(math.sqrt(spread / (255 * pixels) ** 2) if spread else 1.0)  # inputs are divided by the deviation
    return tuple(mean), tuple(std)
