"""Data sets of images in a folder or under a prefix, with one folder for each class (``class/name.jpg``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.order.sampling import TEST, ListedOrder, split_indices
from flyte_ddp.core.order.shard_order import TEST_FRACTION
from flyte_ddp.datasets.encoded.encoded_set import EncodedSet
from flyte_ddp.datasets.encoded.image_list import ImageList, NameList, list_images
from flyte_ddp.datasets.prepared_folder import Description, read_array
from flyte_ddp.datasets.rows import digest_texts

if TYPE_CHECKING:
    from flyte_ddp.core.settings import Settings
    from flyte_ddp.datasets.encoded.readers import ImageReader

COLUMNS = ("labels", "sizes", "tags")  # of an ImageList; each is written as one .npy file


class ImageFolderSet(EncodedSet):
    """A data set of image files, ``image_folder:ADDRESS``."""

    train: ImageList
    test: ImageList | None
    read_source = staticmethod(list_images)

    @staticmethod
    def open_source(folder: Path, side: str, address: str, described: Description) -> ImageList:
        names, ends, labels, sizes, tags = (
            read_array(folder, f"{side}_{column}.npy") for column in ("names", "name_ends", *COLUMNS)
        )
        others = described.content["others"][side]
        return ImageList(address, described.classes, NameList(names, ends), labels, sizes, tags, others)

    def list_arrays(self) -> dict[str, NDArray[Any]]:
        arrays = dict[str, NDArray[Any]]()
        for side, source in self.list_sources().items():
            names = [name.encode("utf-8", "surrogateescape") for name in source.names]
            columns = {column: getattr(source, column) for column in COLUMNS}
            columns["names"] = np.frombuffer(b"".join(names), np.uint8)
            columns["name_ends"] = np.cumsum([*map(len, names)], dtype=np.int64)
            arrays |= {f"{side}_{column}": values for column, values in columns.items()}
        return arrays

    def describe_content(self) -> Mapping[str, Any]:
        return {"others": {side: source.others for side, source in self.list_sources().items()}}

    def open_reader(
        self,
        source: ImageList,
        settings: Settings,  # noqa: ARG002
        streams: int = 16,  # noqa: ARG002
        *,
        members: bool = False,
    ) -> ImageReader:
        """Return a reader of the images of ``source``. Nothing is read yet.

        With ``members``, the reader returns each image as a sample with a single file. The other arguments have no
        effect.
        """
        from flyte_ddp.datasets.encoded.readers import FileReader

        return FileReader(source, members=members)

    @cached_property
    def train_samples(self) -> int:
        return len(self.train.names)

    def make_test_order(self) -> ListedOrder:
        """Return the order of the test split. Without a test set, the split is a tenth of the images."""
        samples = np.arange(len(self.test_source.names), dtype=np.int64)
        return ListedOrder(samples if self.test is not None else split_indices(len(samples), TEST_FRACTION, 0, TEST)[1])

    def training_targets(self) -> NDArray[Any]:
        return self.train.labels

    def class_names(self, *, of_numbers: bool) -> tuple[str, ...]:
        # The folders' names are no classes if a user's function has made the targets, which are numbers.
        return () if of_numbers else self.classes

    def notes(self) -> list[str]:
        return [note for source in self.list_sources().values() for note in source.describe_images()]

    def identify_samples(self, side: str) -> NDArray[np.uint64]:  # noqa: ARG002
        """Return digests of name and size of all samples that are not in the test split, whatever the side."""
        sizes = np.array([f"{name} {size}" for name, size in name_sizes(self.train).items()])
        return digest_texts(sizes[self.list_training()].tolist())

    def identify_tested(self, ids: Sequence[str]) -> NDArray[np.uint64]:
        sizes = name_sizes(self.test_source)
        return digest_texts([f"{name} {sizes.get(name, '')}" for name in ids])


def name_sizes(images: ImageList) -> dict[str, int]:
    """Return the sizes of image files by name.

    Names alone do not identify files, because a later release may use the same names for other files.
    """
    return dict(zip(images.names, images.sizes.tolist(), strict=True))
