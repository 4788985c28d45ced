"""A data set that a callable of the user returns; the hyperparameter ``dataset`` names the callable."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.datasets.identity import content_identity, digest_lines
from flyte_ddp.datasets.images import (
    ImageArrays,
    Images,
    Targets,
    convert_weights,
    image_arrays,
    refuse_masked,
    require_array,
)
from flyte_ddp.datasets.on_demand_set import OnDemand, OnDemandSet, call_seeded, require_samples, split_item
from flyte_ddp.datasets.sample_arrays import SampleArrays, arrays
from flyte_ddp.errors import UserError
from flyte_ddp.progress import Progress
from flyte_ddp.samples.leaves import Leaves, form_of, group_leaves, restore_leaves
from flyte_ddp.samples.pictures import require_pixels
from flyte_ddp.user_code.callables import load_callable
from flyte_ddp.user_code.source import user_source_digest

CustomData = ImageArrays | SampleArrays | OnDemandSet
SETS = ("training set", "test set")


@dataclass(frozen=True)
class CustomSet:
    """A data set that the callable ``spec`` (``package.module:callable``) returns, given the data source."""

    spec: str

    def fingerprint(self, source: str) -> str:
        """Return a name by the callable's name and code, and address and content of ``source``; import nothing."""
        identity = digest_lines([self.spec, user_source_digest(self.spec), source, content_identity(source)])
        return f"{re.sub(r'[^A-Za-z0-9_.]', '-', self.spec)}-{identity[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[CustomData, str]:
        """Call the user's callable with ``source``; return checked data and the call as text. Its errors go through."""
        del workspace  # the user's code chooses its own place for downloads
        result = call_seeded(load_callable(self.spec), source)
        called = f"{self.spec}({source!r})"
        if isinstance(result, OnDemand):
            samples, weights = (len(result.train), len(result.test)), getattr(result.train, "sample_weights", None)
            weights = None if weights is None else convert_weights(weights, samples[0])
            content = [*map(str, samples), *result.classes, *([] if weights is None else map(str, weights.tolist()))]
            digest = digest_lines([self.fingerprint(source), *content])
            pictures = has_images("training set", result.train)
            return OnDemandSet(self.spec, source, *samples, result.classes, digest, weights, pictures), called
        return arrays_from_result(self.spec, result, progress), called


def arrays_from_result(spec: str, result: Any, progress: Progress) -> ImageArrays | SampleArrays:
    """Return a callable's ``result`` as arrays named ``spec``, map-style sets read into memory; UserError if unfit."""
    if isinstance(result, SampleArrays):
        return replace(result, name=spec)
    if isinstance(result, ImageArrays):  # checked, because the user may have made it without image_arrays()
        pairs = result.train_images, result.train_labels, result.test_images, result.test_labels
        return image_arrays(*pairs, result.classes, name=spec, sample_weights=result.sample_weights)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise UserError(
            f"dataset={spec!r}: returned {type(result).__name__}; must return arrays(...), image_arrays(...) or "
            "on_demand(...) of flyte_ddp, or a pair (training set, test set)"
        )
    try:
        if not has_images("training set", result[0]):
            sides = (read_leaves(name, each, progress) for name, each in zip(SETS, result, strict=True))
            about = {name: getattr(result[0], name, None) for name in ("classes", "sample_weights")}
            return arrays(*sides, **{key: value for key, value in about.items() if value is not None}, name=spec)
        train_images, train_labels = read_map_style_set("training set", result[0], progress)
        test_images, test_labels = read_map_style_set("test set", result[1], progress)
        given = getattr(result[0], "classes", None)
        classes = [] if given is None else list(given)
        if not classes and train_labels.dtype.kind in "iu" and train_labels.ndim == 1:
            classes = [str(label) for label in range(max(train_labels.max(), test_labels.max()) + 1)]
        weights = getattr(result[0], "sample_weights", None)
        return image_arrays(
            train_images, train_labels, test_images, test_labels, classes, name=spec, sample_weights=weights
        )
    except UserError as error:
        raise UserError(f"dataset={spec!r}: {error.message}") from error


def has_images(set_name: str, samples: Any) -> bool:
    """Return whether the first item of a map-style data set, which is read, is a pair with a picture."""
    require_samples(set_name, samples)
    item = samples[0]
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    pixels = getattr(item[0], "numpy", lambda: item[0])()
    return hasattr(pixels, "convert") or (getattr(pixels, "dtype", None) == np.uint8 and pixels.ndim in (2, 3))


def read_leaves(set_name: str, samples: Any, progress: Progress) -> tuple[Leaves, Leaves]:
    """Read a map-style data set; return inputs and targets, each leaf a list of its samples' arrays."""
    count = require_samples(set_name, samples)
    pairs = list[tuple[Leaves, Leaves]]()
    with progress.track(set_name, count, "samples") as advance:
        for index in range(count):
            try:
                pairs.append(split_item(samples[index]))
            except ValueError as error:
                raise UserError(
                    f"{set_name}: item {index} {error}; of whole arrays return arrays(train, test)"
                ) from None
            advance(1)
    names = [f"item {index} of the {set_name}" for index in range(count)]
    inputs, targets = (
        restore_leaves(form_of(sides[0]), group_leaves(kind, sides, names))
        for kind, sides in zip(("inputs", "targets"), zip(*pairs, strict=True), strict=True)
    )
    return inputs, targets


def read_map_style_set(set_name: str, samples: Any, progress: Progress) -> tuple[Images, Targets]:
    count = require_samples(set_name, samples)
    images, labels = np.empty((0,), dtype=np.uint8), list[Targets]()
    with progress.track(set_name, count, "images") as advance:
        for index in range(count):
            image, label = convert_sample(f"{set_name}: item {index}", samples[index])
            if index == 0:
                images = np.empty((count, *image.shape), dtype=np.uint8)
            if image.shape != images.shape[1:]:
                one, other = ("x".join(map(str, shape)) for shape in (image.shape, images.shape[1:]))
                raise UserError(
                    f"{set_name}: image {index} is {one} and image 0 is {other}; all must have one size: resize them "
                    "and convert them to one mode"
                )
            if labels and label.shape != labels[0].shape:
                raise UserError(
                    f"{set_name}: label {index} has shape {list(label.shape)} and label 0 has {list(labels[0].shape)}; "
                    "all must have one"
                )
            images[index] = image
            labels.append(label)
            advance(1)
    return images, np.stack(labels)


def convert_sample(where: str, item: Any) -> tuple[Images, Targets]:
    """Return pixels uint8 [H, W, C] and label of an item; ``where`` begins the text of a UserError."""
    try:
        image, given = item
        label = require_array("its label", given)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} must be an image and a label: {error}") from error
    if label.dtype.kind not in "biuf":
        raise UserError(f"{where}: its label is a {type(given).__name__}; must be a number or numbers")
    refuse_masked(f"{where}: its image", image)
    return require_pixels(f"{where}: its image", image), label
