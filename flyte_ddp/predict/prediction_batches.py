"""Batches of what a model predicts: a folder of images, or the test split of a data set."""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.datasets import ImageArrays
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.image_folder import SUFFIXES, files_below, is_image, kind_of_file, listed_kinds
from flyte_ddp.datasets.prepared import PreparedSet
from flyte_ddp.errors import UserError
from flyte_ddp.loading import cropping, open_tests
from flyte_ddp.loading.decoding import DecodingError, decode, with_pillow
from flyte_ddp.loading.encoded import BadSamples, EncodedImages
from flyte_ddp.models.artifacts import MIDDLE
from flyte_ddp.models.images import InputSpec, prepare
from flyte_ddp.settings import Settings


class Batch(NamedTuple):
    """Samples to predict; those that cannot be decoded have no input."""

    ids: Sequence[str]
    truths: Sequence[str] | None  # the classes of all samples, if they are known
    decoded: Sequence[bool]  # whether each sample could be decoded
    inputs: Tensor  # of the decoded samples: float32 [n, C, H, W] on the device


class Request(NamedTuple):
    """The model's input, the number of images of a batch, their device, and the counter of undecodable images."""

    spec: InputSpec
    batch_size: int
    device: torch.device
    bad: BadSamples


def folder_batches(folder: Path, paths: Sequence[Path], request: Request, crop: str) -> Iterator[Batch]:
    """Read and prepare the images at these paths below a folder, in their order."""
    spec, batch_size, device, bad = request
    if spec.channels not in (1, 3):
        raise UserError(
            f"the model takes {spec.channels} channels: image files have 1 or 3; predict a prepared data set instead"
        )
    for start in range(0, len(paths), batch_size):
        part = paths[start : start + batch_size]
        pixels = [pixels_of(path, spec, crop, bad) for path in part]
        prepared = [prepare(image[None].to(device), spec) for image in pixels if image is not None]
        ids = [path.relative_to(folder).as_posix() for path in part]
        nothing = torch.empty(0, spec.channels, spec.height, spec.width, device=device)
        yield Batch(ids, None, [image is not None for image in pixels], torch.cat([nothing, *prepared]))


def image_paths(folder: Path) -> tuple[list[Path], Mapping[str, int]]:
    """Return every image file below a folder, sorted, by the rules of training, and counts of its other files by kind.

    Raises:
        UserError: it cannot be listed, or has no images.
    """
    if not folder.is_dir():
        raise UserError(f"images={folder}: must be a folder of images")
    names = [entry.name for entry in files_below(str(folder.absolute()))]
    others = Counter(kind_of_file(name) for name in names if not is_image(name))
    if len(names) == others.total():
        found = f" but {listed_kinds(others)}" if others else ""
        raise UserError(f"images={folder}: no image in it{found}; put {', '.join(SUFFIXES)} files there")
    return sorted(folder / name for name in names if is_image(name)), others


def pixels_of(path: Path, spec: InputSpec, crop: str, bad: BadSamples) -> Tensor | None:
    """Return an image file as uint8 [H, W, C]; None if it cannot be decoded and ``bad`` allows that."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); remove it, or make it readable") from error
    try:
        if crop == MIDDLE:
            return torch.from_numpy(cropping.squared(decode(content), spec.height))  # as in evaluations during training
        pixels = with_pillow(content, "L" if spec.channels == 1 else "RGB")
        return torch.from_numpy(pixels.reshape(*pixels.shape[:2], spec.channels))
    except DecodingError as error:
        bad.add(str(path), str(error))
        return None


def split_batches(
    data: PreparedSet, request: Request, *, classes: Sequence[str], settings: Settings
) -> Generator[Batch, None, None]:
    """Yield the test split of a data set; ``classes`` are the model's, for a data set that does not name its own."""
    if isinstance(data, ImageArrays):
        return array_batches(data, request)
    return encoded_batches(data, request, classes=classes, settings=settings)


def array_batches(arrays: ImageArrays, request: Request) -> Generator[Batch, None, None]:
    """Yield the test split of a data set of arrays, in its own order."""
    spec, batch_size, device, _ = request
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
        ids = [str(index) for index in range(start, stop)]
        yield Batch(ids, truths, [True] * len(ids), prepare(pixels, spec))


def encoded_batches(
    data: EncodedSet, request: Request, *, classes: Sequence[str], settings: Settings
) -> Generator[Batch, None, None]:
    """Yield the test split of shards, or of a folder of images, as training evaluates it."""
    spec, batch_size, device, bad = request
    if spec.channels != 3 or spec.height != spec.width:
        raise UserError(
            f"dataset={data.name!r}: has colour images that become squares, and the model takes {spec.channels} x "
            f"{spec.height} x {spec.width}; predict with a model that was trained on such images"
        )
    names = data.classes or classes
    tests = open_tests(data, spec.height, len(names), bad, device=device, settings=settings)
    images = tests.source
    assert isinstance(images, EncodedImages)
    with closing(images):
        for place, (pixels, labels, ids) in tests.batches(batch_size, 0, 1):
            samples = tests.order.samples(place)
            decoded = [sample not in images.replaced for sample in samples.tolist()]
            truths = [
                names[label if good else images.label(sample)]  # not that of its substitute
                for label, good, sample in zip(labels.tolist(), decoded, samples.tolist(), strict=True)
            ]
            yield Batch(ids, truths, decoded, prepare(pixels[torch.tensor(decoded)], spec))
