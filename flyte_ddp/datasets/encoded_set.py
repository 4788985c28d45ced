"""Data sets of encoded images that stay where they are: a prepared folder holds lists, addresses and class names."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.catalog import IMAGENET, encoded_kind
from flyte_ddp.datasets import prepared_folder
from flyte_ddp.datasets.identity import digest_lines
from flyte_ddp.datasets.image_folder import ImageList, list_images
from flyte_ddp.errors import UserError
from flyte_ddp.shards.index import Part, Shard, ShardIndex, pause_garbage_collector, read_index
from flyte_ddp.shards.scanning import refuse_unfit_samples

IMAGE_FOLDER = "image_folder"
COLUMNS = ("labels", "sizes", "tags")  # of an ImageList; each is written as one .npy file


@dataclass(frozen=True, eq=False)
class EncodedSet:
    """A data set of encoded images of any size. If ``test`` is None, a tenth of ``train`` is held out for testing."""

    name: str  # the hyperparameter ``dataset``
    classes: tuple[str, ...]
    digest: str  # SHA-256 (hex) of both sources
    train: ShardIndex | ImageList
    test: ShardIndex | ImageList | None
    mean, std = IMAGENET  # torchvision's pretrained models expect ImageNet's values
    pictures: ClassVar[bool] = True

    @property
    def is_stream(self) -> bool:
        return encoded_kind(self.name) == "stream"

    @property
    def test_source(self) -> ShardIndex | ImageList:
        return self.train if self.test is None else self.test


def read_encoded_set(dataset: str, test_dataset: str) -> EncodedSet:
    """Read the shard indexes, or list the image files, of both addresses.

    ``dataset`` alone decides whether both are read as shard indexes or as image folders. If ``test_dataset`` is empty,
    the result has ``test=None``.

    Raises:
        UserError: An address cannot be read, an index is malformed, or a class folder has no images. Also if both
            sources have class names and these differ.
    """
    read = list_images if encoded_kind(dataset) == IMAGE_FOLDER else read_index
    train: Any = read(dataset.partition(":")[2])
    test: Any = read(test_dataset.partition(":")[2]) if test_dataset else None
    if test is not None and test.classes and train.classes and test.classes != train.classes:
        other = sorted(set(test.classes) ^ set(train.classes))[:3] or ["the order"]
        problem = f"its classes differ from those of dataset (for example, {', '.join(other)})"
        raise UserError(f"test_dataset={test_dataset!r}: {problem}; both must have the same classes")
    digests = [train.digest, test.digest if test is not None else ""]
    return EncodedSet(dataset, train.classes, digest_lines(digests), train, test)


def prepare_encoded_set(dataset: str, test_dataset: str, folder: Path, *, decoded_by_user: bool = False) -> None:
    """Write indexes or file lists into an existing folder, then ``verified.json``, and ``dataset.json`` last.

    Unless ``decoded_by_user`` is set, the first sample of each data set of shards is read, and must have an image and a
    label.

    Raises:
        UserError: The data cannot be read or are unfit.
    """
    data = read_encoded_set(dataset, test_dataset)
    others = {}
    for split, source in {"train": data.train, "test": data.test}.items():
        if isinstance(source, ShardIndex):
            if not decoded_by_user:
                refuse_unfit_samples(source)
            content = {"name": source.name, "parts": source.parts, "shards": source.shards}
            prepared_folder.write_json(folder / f"{split}.json", content)
        elif source is not None:
            names = [name.encode("utf-8", "surrogateescape") for name in source.names]
            columns = {column: getattr(source, column) for column in COLUMNS}
            columns["names"] = np.frombuffer(b"".join(names), np.uint8)
            columns["name_ends"] = np.cumsum([*map(len, names)], dtype=np.int64)
            for column, values in columns.items():
                prepared_folder.write_array(folder / f"{split}_{column}.npy", values)
            others[split] = source.others
    test_part = "a tenth" if data.test is None else "all"
    test_digest = digest_lines([data.test_source.digest, test_part, *data.classes])
    more = {"others": others, "data_source": "", "test_dataset": test_dataset}
    prepared_folder.write_description(folder, data, more, digest=data.digest, test_digest=test_digest)


def open_encoded_set(folder: Path) -> EncodedSet:
    """Open the data set that :func:`prepare_encoded_set` wrote to ``folder``. File lists are memory-mapped.

    Raises:
        UserError: The folder is damaged.
    """

    def read_prepared_split(dataset: str, split: str) -> ShardIndex | ImageList:
        """Return the index or file list of ``split`` ("train" or "test"). ``dataset`` is the address with its kind."""
        if encoded_kind(dataset) != IMAGE_FOLDER:
            with pause_garbage_collector():
                content = json.loads((folder / f"{split}.json").read_bytes())
                shards = [Shard._make([*row[:-1], tuple(row[-1]) if row[-1] else None]) for row in content["shards"]]
            return ShardIndex(content["name"], shards, tuple(Part(*part) for part in content["parts"]), classes)
        names, ends, labels, sizes, tags = (
            prepared_folder.read_array(folder, f"{split}_{column}.npy") for column in ("names", "name_ends", *COLUMNS)
        )
        address = dataset.partition(":")[2]
        return ImageList(address, classes, NameList(names, ends), labels, sizes, tags, others[split])

    described = prepared_folder.read_description(folder)
    with prepared_folder.translate_damage_to_user_error(folder):
        classes, tests, others = tuple(described["classes"]), described["test_dataset"], described["others"]
        train = read_prepared_split(described["name"], "train")
        test = read_prepared_split(tests, "test") if tests else None
        return EncodedSet(described["name"], classes, described["digest"], train, test)


class NameList(Sequence[str]):
    """A list of texts in one memory-mapped array. ``content`` holds the bytes, and ``ends`` the end of each text."""

    def __init__(self, content: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.content, self.ends = content, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: Any) -> Any:
        start = int(self.ends[number - 1]) if number else 0
        return self.content[start : int(self.ends[number])].tobytes().decode("utf-8", "surrogateescape")
