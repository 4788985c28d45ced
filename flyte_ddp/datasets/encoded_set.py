"""Data sets that stay where they are, of encoded images: shards, or a folder or prefix of image files.

What is prepared of them is small: which samples there are, where these are, and what their classes are called.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.catalog import encoded_kind
from flyte_ddp.datasets.arrays import (
    DESCRIPTION,
    FORMAT,
    TEST_DIGEST,
    map_array,
    read_description,
    refuse_damage,
    write_array,
    write_json,
)
from flyte_ddp.datasets.identity import digest_of
from flyte_ddp.datasets.image_folder import ImageList, list_images
from flyte_ddp.errors import UserError
from flyte_ddp.shards.first_sample import refuse_unfit
from flyte_ddp.shards.index import Part, Shard, ShardIndex, many_objects, read_index

IMAGE_FOLDER = "image_folder"
COLUMNS = ("labels", "sizes", "tags")  # of a list of images, beside their names


@dataclass(frozen=True, eq=False)
class EncodedSet:
    """A data set of encoded images of any size. ``test`` is None where a part of ``train`` is held out for testing."""

    name: str  # as in the hyperparameters
    classes: tuple[str, ...]
    digest: str
    train: ShardIndex | ImageList
    test: ShardIndex | ImageList | None
    mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)  # of ImageNet's images, as torchvision's models take them
    std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)

    @property
    def tested(self) -> ShardIndex | ImageList:
        """Where the test split is."""
        return self.train if self.test is None else self.test

    def refuse_unreadable(self) -> None:
        """Read the first sample of shards, and raise a UserError if it has no image or no label, or cannot be read."""
        for source in (self.train, self.test):
            if isinstance(source, ShardIndex):
                refuse_unfit(source)


def look_up(dataset: str, test_dataset: str) -> EncodedSet:
    """Read the indexes, or list the files, that ``dataset`` and ``test_dataset`` name.

    Raises a UserError if they cannot be read, are empty, or do not have the same classes.
    """
    read = list_images if encoded_kind(dataset) == IMAGE_FOLDER else read_index
    train: Any = read(dataset.partition(":")[2])
    test: Any = read(test_dataset.partition(":")[2]) if test_dataset else None
    if test is not None and test.classes and train.classes and test.classes != train.classes:
        other = sorted(set(test.classes) ^ set(train.classes))[:3] or ["another order"]
        raise UserError(
            f"test_dataset={test_dataset!r}: has other classes than dataset (such as {', '.join(other)}); "
            "both must have the same"
        )
    digests = [train.digest, test.digest if test is not None else ""]
    return EncodedSet(dataset, train.classes, digest_of(digests), train, test)


def write_encoded_set(data: EncodedSet, folder: Path, origin: dict[str, str]) -> None:
    """Write the indexes or lists of a data set into an existing folder, the description last, with ``origin`` in it."""
    left_out = {}
    for split, source in {"train": data.train, "test": data.test}.items():
        if isinstance(source, ShardIndex):
            parts = [[part.name, part.weight] for part in source.parts]
            write_json(folder / f"{split}.json", {"name": source.name, "parts": parts, "shards": source.shards})
        elif source is not None:
            names = [name.encode("utf-8", "surrogateescape") for name in source.names]
            write_array(folder / f"{split}_names.npy", np.frombuffer(b"".join(names), np.uint8))
            write_array(folder / f"{split}_name_ends.npy", np.cumsum([*map(len, names)], dtype=np.int64))
            left_out[split] = source.left_out
            for column in COLUMNS:
                write_array(folder / f"{split}_{column}.npy", getattr(source, column))
    description = {
        **FORMAT,
        "name": data.name,
        "classes": data.classes,
        "digest": data.digest,
        TEST_DIGEST: digest_of([data.tested.digest, "a tenth" if data.test is None else "all", *data.classes]),
        "left_out": left_out,
        **origin,
    }
    write_json(folder / DESCRIPTION, description, indent=1)


def open_encoded_set(folder: Path) -> EncodedSet:
    """Open what :func:`write_encoded_set` left; lists of files are memory-mapped, and shared by all processes.

    Raises a UserError if a file is missing or damaged.
    """
    described = read_description(folder)
    with refuse_damage(folder):
        classes, tests, left_out = tuple(described["classes"]), described["test_dataset"], described["left_out"]
        train = open_split(folder, "train", described["name"], classes, left_out)
        test = open_split(folder, "test", tests, classes, left_out) if tests else None
        return EncodedSet(described["name"], classes, described["digest"], train, test)


def open_split(
    folder: Path, split: str, dataset: str, classes: tuple[str, ...], left_out: Mapping[str, Mapping[str, int]]
) -> ShardIndex | ImageList:
    """Return the index of a split, or the list of its files; ``left_out`` counts other files, by split and kind."""
    if encoded_kind(dataset) != IMAGE_FOLDER:
        with many_objects():
            content = json.loads((folder / f"{split}.json").read_bytes())
            shards = [Shard._make([*row[:-1], tuple(row[-1]) if row[-1] else None]) for row in content["shards"]]
        return ShardIndex(content["name"], shards, tuple(Part(*part) for part in content["parts"]), classes)
    address = dataset.partition(":")[2]
    names = Names(*(map_array(folder / f"{split}_{column}.npy") for column in ("names", "name_ends")))
    labels, sizes, tags = (map_array(folder / f"{split}_{column}.npy") for column in COLUMNS)
    return ImageList(address, classes, names, labels, sizes, tags, left_out[split])


class Names(Sequence[str]):
    """Many texts in one memory-mapped array."""

    def __init__(self, content: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.content, self.ends = content, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: Any) -> Any:
        start = int(self.ends[number - 1]) if number else 0
        return self.content[start : int(self.ends[number])].tobytes().decode("utf-8", "surrogateescape")
