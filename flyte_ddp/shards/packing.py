"""Packing samples into shards: a folder of images, or a data set of images and labels."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp import sampling, storage
from flyte_ddp.datasets.progress import Progress
from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.shards.scanning import create_index

SAMPLES_PER_SHARD = 1000
AHEAD = 32  # images that are read at the same time

Members = Mapping[str, bytes]  # by extension


def pack(
    samples: Callable[[int], tuple[str, Members]],
    count: int,
    folder: Path,
    *,
    classes: Sequence[str],
    name: str = "train",
    per_shard: int = SAMPLES_PER_SHARD,
    seed: int | None = 0,
    progress: str = "auto",
) -> ShardIndex:
    """Writes samples into shards and their index, ``<name>.json``, which comes last.

    The same samples make the same files to the last byte, whenever and wherever they are packed.

    Args:
        samples: gives a sample's key and members by its number, and may be called from several threads.
        count: how many there are.
        folder: where to; made if it is not there.
        classes: the classes' names, for the index.
        name: of the data set and the beginning of the files' names.
        per_shard: samples in a shard; the last one may have fewer.
        seed: of the order in which samples are packed; None keeps their own. Training mixes neighbouring shards only,
            so that samples in an order of their own (class by class) should be mixed here.

    Raises:
        UserError: no samples, or a folder that cannot be written to.
    """
    if count == 0:
        raise UserError(f"{name}: there is no sample to pack")
    if per_shard < 1:
        raise UserError(f"samples_per_shard={per_shard}: must be at least 1")
    order = np.arange(count)
    if seed is not None:
        order = sampling.random_stream(sampling.PACKING, seed).permutation(order)
    paths = []
    digits = max(6, len(str(-(-count // per_shard) - 1)))
    with ThreadPoolExecutor(AHEAD) as pool, Progress(progress).track("packing", count, "samples") as advance:
        for number, start in enumerate(range(0, count, per_shard)):
            path = folder / f"{name}-{number:0{digits}d}.tar"
            with replacing(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for key, members in pool.map(samples, order[start : start + per_shard].tolist()):
                    for extension, content in members.items():
                        header = tarfile.TarInfo(f"{key}{extension}")
                        header.size = len(content)
                        archive.addfile(header, io.BytesIO(content))
                    advance(1)
            paths.append(str(path))
    return create_index(paths, folder / f"{name}.json", name=name, classes=classes, progress="off")


def pack_image_folder(address: str, folder: Path, **options: Any) -> ShardIndex:
    """Packs the images ``class/name.jpg`` below a folder or prefix, as they are, with the classes' numbers.

    Args:
        address: a path, or s3:// or gs://.
        options: of :func:`pack`.

    Raises:
        UserError: there are no images in it, or they cannot be read.
    """
    from flyte_ddp.datasets.image_folder import list_images

    found = list_images(address)

    def sample(number: int) -> tuple[str, Members]:
        image = found.names[number]
        where = storage.join(address, image)
        try:
            content = storage.with_retries(where, [where], storage.read)
        except storage.AllFailedError as error:
            raise UserError(f"image {where}: cannot be read ({next(iter(error.failures.values()))})") from None
        stem, _, extension = image.rpartition(".")
        place, _, last = stem.rpartition("/")
        key = f"{place}/{last.replace('.', '%2E')}"  # a key ends at the first dot
        return key, {f".{extension.lower()}": content, ".cls": str(found.labels[number]).encode()}

    return pack(sample, len(found.names), folder, classes=found.classes, **options)


def pack_images(samples: Any, folder: Path, *, classes: Sequence[str] = (), **options: Any) -> ShardIndex:
    """Packs a map-style data set of (PIL image or uint8 array, label), such as torchvision's, as PNG: without loss.

    Args:
        samples: has ``len()`` and gives an image and a label for each number.
        classes: the classes' names; those that the data set has itself, if none are given.
        options: of :func:`pack`.
    """
    from PIL import Image

    width = len(str(len(samples) - 1))

    def sample(number: int) -> tuple[str, Members]:
        picture, label = samples[number]
        if not isinstance(picture, Image.Image):
            picture = Image.fromarray(np.squeeze(np.asarray(picture)))
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        return f"{number:0{width}d}", {".png": buffer.getvalue(), ".cls": str(int(label)).encode()}

    named = classes or getattr(samples, "classes", ())
    return pack(sample, len(samples), folder, classes=[str(label) for label in named], **options)


def pack_source(source: str, folder: Path, *, split: str = "train", **options: Any) -> ShardIndex:
    """Packs whatever ``source`` names: a folder or prefix of images, a data set by its name, or a user's own.

    Args:
        source: as on the command line (``python -m flyte_ddp.shards pack --help``).
        split: train or test, of a data set that has both.
        options: of :func:`pack`.
    """
    from flyte_ddp import catalog
    from flyte_ddp.datasets import fetch, open_arrays
    from flyte_ddp.user_code import SPEC, load_callable

    if source in catalog.DATASETS:
        with tempfile.TemporaryDirectory(dir=made(folder), prefix=".data.") as data:
            arrays = open_arrays(fetch(source, "", Path(data) / source, progress="off"))
            images, labels = (getattr(arrays, f"{split}_{what}") for what in ("images", "labels"))
            return pack_images(Pairs(images, labels), folder, classes=arrays.classes, **options)
    if SPEC.fullmatch(source):
        both = load_callable(source)("")
        if not isinstance(both, (tuple, list)) or len(both) != 2:
            raise UserError(f"{source}: returned {type(both).__name__}; must return a pair (train, test) of data sets")
        return pack_images(both[split == "test"], folder, **options)
    return pack_image_folder(source, folder, **options)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Arrays as a map-style data set."""

    images: Any
    labels: Any

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return self.images[number], int(self.labels[number])


def made(folder: Path) -> Path:
    """The folder, which is there then."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another folder") from None
    return folder
