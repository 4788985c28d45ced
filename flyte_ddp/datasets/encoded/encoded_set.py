"""Data sets of encoded images that stay where they are: a prepared folder holds lists, addresses and class names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.catalog import IMAGENET
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.order.sampling import Indices
from flyte_ddp.core.progress import Progress
from flyte_ddp.datasets.prepared_folder import Description
from flyte_ddp.datasets.prepared_set import PreparedSet
from flyte_ddp.datasets.rows import digest_texts
from flyte_ddp.storage.identity import digest_lines

if TYPE_CHECKING:
    from flyte_ddp.core.settings import Settings
    from flyte_ddp.datasets.encoded.readers import ImageReader


@dataclass(frozen=True, eq=False)
class EncodedSet(PreparedSet):
    """A data set of encoded images of any size. If ``test`` is None, a tenth of ``train`` is held out for testing."""

    name: str  # the hyperparameter ``dataset``
    classes: tuple[str, ...]
    digest: str  # SHA-256 (hex) of both sources
    train: Any  # a list of images, as the kind of data set has it
    test: Any
    opening = "flyte_ddp.datasets.encoded.opening"
    mean, std = IMAGENET  # torchvision's pretrained models expect ImageNet's values
    pictures = True
    crop = "middle"
    named_targets = False  # class names may be folders, not the names of a user-defined function's targets

    @property
    def test_source(self) -> Any:
        return self.train if self.test is None else self.test

    @staticmethod
    def read_source(address: str) -> Any:
        """Read the list of the images at an address.

        Raises:
            UserError: The address cannot be read, or the list is unfit.
        """
        raise NotImplementedError

    @staticmethod
    def open_source(folder: Path, side: str, address: str, described: Description) -> Any:
        """Return the list of a side that a prepared folder holds. Large lists are memory-mapped."""
        raise NotImplementedError

    def open_reader(self, source: Any, settings: Settings, streams: int = 16, *, members: bool = False) -> ImageReader:
        """Return a reader of the images of ``source``. Nothing is read yet.

        A reader of shards keeps two shards open for each of ``streams``, and downloads one ahead. With ``members``, the
        reader returns the files of a sample in place of image and label.
        """
        raise NotImplementedError

    @classmethod
    def read(cls, dataset: str, test_dataset: str) -> Self:
        """Read the lists of both addresses. If ``test_dataset`` is empty, the result has ``test=None``.

        Raises:
            UserError: An address cannot be read, or a list is unfit. Also if both sources have class names and these
                differ.
        """
        train = cls.read_source(dataset.partition(":")[2])
        test = cls.read_source(test_dataset.partition(":")[2]) if test_dataset else None
        if test is not None and test.classes and train.classes and test.classes != train.classes:
            other = sorted(set(test.classes) ^ set(train.classes))[:3] or ["the order"]
            problem = f"its classes differ from those of dataset (for example, {', '.join(other)})"
            raise UserError(f"test_dataset={test_dataset!r}: {problem}; both must have the same classes")
        digest = digest_lines([train.digest, test.digest if test is not None else ""])
        return cls(dataset, train.classes, digest, train, test)

    @classmethod
    def open(cls, folder: Path, description: Description) -> Self:
        name, tests = description.name, description.test_dataset
        train = cls.open_source(folder, "train", name.partition(":")[2], description)
        test = cls.open_source(folder, "test", tests.partition(":")[2], description) if tests else None
        return cls(name, description.classes, description.digest, train, test)

    @classmethod
    def define(cls, dataset: str, test_dataset: str, *, decoded_by_user: bool) -> EncodedSource:
        return EncodedSource(cls, dataset, test_dataset, decoded_by_user)

    def list_sources(self) -> dict[str, Any]:
        """Return the sources by side, "train" and perhaps "test"."""
        return {side: source for side, source in (("train", self.train), ("test", self.test)) if source is not None}

    def compute_digests(self) -> tuple[str, str]:
        part = "a tenth" if self.test is None else "all"
        return self.digest, digest_lines([self.test_source.digest, part, *self.classes])

    def list_training(self) -> Indices:
        samples = super().list_training()
        return (
            samples if self.test is not None else np.setdiff1d(samples, self.make_test_order().samples_at(slice(None)))
        )

    def check_first_samples(self) -> None:
        """Raise UserError if the first sample of a source lacks an image or a label. By default reads nothing."""

    def needs_classes(self, hp: Hyperparameters) -> bool:
        return not hp.sample  # only ranks call the user-defined function, so its targets are unknown before

    def identify_tested(self, ids: Sequence[str]) -> NDArray[np.uint64]:
        return digest_texts([f"{name} " for name in ids])


@dataclass(frozen=True)
class EncodedSource:
    """The addresses of a data set of encoded images. Images are not copied."""

    kind: type[EncodedSet]
    dataset: str  # hyperparameters
    test_dataset: str
    decoded_by_user: bool  # else the first samples must have an image and a label

    def fingerprint(self, source: str) -> str:
        """Return a text that changes with the addresses and the lists of the images."""
        del source  # is empty
        # The names contain the addresses. A prepared folder refers to addresses, so another address needs another
        # folder.
        digest = self.kind.read(self.dataset, self.test_dataset).digest
        identity = digest_lines([self.dataset, self.test_dataset, digest])
        return f"{self.dataset.partition(':')[0]}-{identity[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[EncodedSet, str]:
        """Read the lists of the images, and return the data set and its name.

        Raises:
            UserError: The data cannot be read or are unfit.
        """
        del source, workspace, progress  # only lists are read
        data = self.kind.read(self.dataset, self.test_dataset)
        if not self.decoded_by_user:
            data.check_first_samples()
        return data, self.dataset
