"""The interface of prepared data sets, whatever their kind. A new kind is a subclass in a file of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import file_digest, get_file_version, list_files
from flyte_ddp.core.models.sidecar import FittedObject
from flyte_ddp.core.order.sampling import Indices, ListedOrder, split_indices
from flyte_ddp.datasets.prepared_folder import (
    DESCRIPTION,
    FORMAT,
    VERIFIED,
    WEIGHTS,
    Description,
    write_array,
    write_json,
)

if TYPE_CHECKING:
    import torch

    from flyte_ddp.core.loading.split import Split, Splits
    from flyte_ddp.core.models.inputs import ModelInput
    from flyte_ddp.core.order.shard_order import Orders, SampleOrder
    from flyte_ddp.core.progress import Progress
    from flyte_ddp.core.samples.leaves import Leaves
    from flyte_ddp.core.samples.pictures import Pixels
    from flyte_ddp.core.settings import Settings
    from flyte_ddp.datasets.encoded.samples import BadSamples


@dataclass(frozen=True)
class Opening:
    """What decides how the test split is loaded for a trained model."""

    device: torch.device
    settings: Settings  # the number of loaders (0: one for each core), and the cache of shards
    spec: ModelInput | None = None  # the model's inputs, which decide the inputs' order and types; None: the data's
    classes: int = 0  # 0: user code makes the targets
    sample: str = ""  # hyperparameters of the training
    collate: str = "stacked"
    seed: int = 0
    bad: BadSamples | None = None  # collects the samples that cannot be decoded


class Definition(Protocol):
    """A data set before the fetch."""

    def fingerprint(self, source: str) -> str:
        """Return a text that changes with the data and can be part of a file name.

        ``source`` is the hyperparameter ``data_source``.
        """

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[PreparedSet, str]:
        """Read the data, and return the data set, and a text about where the data were read.

        Files may be written to the folder ``workspace``, and what remains there becomes part of the prepared folder.
        """


class PreparedSet:
    """Base class of prepared data sets. Only the table ``flyte_ddp.catalog.KINDS`` lists the kinds."""

    name: str  # the hyperparameter ``dataset``
    classes: tuple[str, ...]  # names; empty if the set has none
    digest: str  # SHA-256 (hex) of the content
    opening: ClassVar[str]  # module of functions that open this kind, imported at first use because of torch
    crop: ClassVar[str] = ""  # "middle" if evaluations use the middle square of images
    named_targets: ClassVar[bool] = True  # whether targets that are not class numbers have the order of ``classes``
    advice: ClassVar[str] = "add samples"  # for a split without samples
    preprocessing: FittedObject = FittedObject()
    not_finite: Mapping[str, int] = MappingProxyType({})  # by file of targets: first sample with NaN or infinity
    sample_weights: NDArray[np.float64] | None = None  # [N], with which training may draw samples

    if TYPE_CHECKING:  # at run time, a dataclass would take these properties for the defaults of its fields

        @property
        def train_samples(self) -> int: ...

        @property
        def test_samples(self) -> int: ...

        @property
        def pictures(self) -> bool:
            """Whether inputs are images."""

    def list_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the stored arrays by file name without ``.npy``. The base class has only weights."""
        return {} if self.sample_weights is None else {WEIGHTS: self.sample_weights}

    def write_other_files(self, folder: Path) -> None:
        """Write the files that are no arrays into a prepared folder. By default nothing is written."""

    def describe_content(self) -> Mapping[str, Any]:
        """Return the entries of ``dataset.json`` that only sets of this kind have. Other sets have none."""
        return {}

    @classmethod
    def define(cls, dataset: str, test_dataset: str, *, decoded_by_user: bool) -> Definition:
        """Return the definition of a data set whose name has an address.

        The arguments are hyperparameters. If ``decoded_by_user`` is True, user code makes the samples of the files.
        """
        raise NotImplementedError

    @classmethod
    def open(cls, folder: Path, description: Description) -> Self:
        """Return the data set in a prepared folder. Arrays are memory-mapped. Any error means a damaged folder."""
        raise NotImplementedError

    def compute_digests(self) -> tuple[str, str]:
        """Return the SHA-256 (hex) of the whole set, and of the test split with the names of the classes."""
        return self.digest, self.digest

    def make_test_order(self) -> SampleOrder:
        """Return the order of the test split. The order is the same in each call."""
        return ListedOrder(np.arange(self.test_samples, dtype=np.int32))

    def list_training(self) -> Indices:
        """Return the numbers of the training samples, ascending, validation included."""
        return np.arange(self.train_samples, dtype=np.int32)

    def make_split_orders(self, validation_fraction: float, seed: int, shuffle_shards: int) -> Orders:  # noqa: ARG002
        """Return the orders of "training", "validation" and "test" by these names.

        ``shuffle_shards`` is the number of shards from which a batch is drawn. Only sets of shards use the number.
        """
        samples = self.list_training()
        rest, held_out = split_indices(len(samples), validation_fraction, seed)
        training, validation = ListedOrder(samples[rest], seed), ListedOrder(samples[held_out])
        return {"training": training, "validation": validation, "test": self.make_test_order()}

    def training_targets(self) -> NDArray[Any] | None:
        """Return the labels or targets of all training samples as one array, or None if unknown.

        Targets are unknown in shards and in sets on demand, and if targets have several leaves. The samples of the
        validation split are included.
        """
        return None

    def stored_leaves(self, side: str) -> tuple[Leaves, Leaves] | None:  # noqa: ARG002
        """Return inputs and targets of a side, "train" or "test", if all samples are stored as arrays, else None."""
        return None

    def load_rows(self, side: str) -> Any:  # noqa: ARG002
        """Return the rows of a side as the user's code has read them, or None if no rows were kept."""
        return None

    def ids(self, side: str) -> NDArray[np.str_] | None:  # noqa: ARG002
        """Return the names [N] that the user gave to the samples of a side, or None."""
        return None

    def name_sample(self, split: str, number: int) -> str:
        """Return a sample's split and number in words, with the id that the user gave to the sample.

        ``split`` is "training", "validation" or "test". ``number`` is a position in the data set's training or test
        samples, also for a validation sample.
        """
        ids = self.ids("test" if split == "test" else "train")
        return f"{split} sample {number}" + ("" if ids is None else f" (id {str(ids[number])!r})")

    def class_names(self, *, of_numbers: bool) -> tuple[str, ...]:  # noqa: ARG002
        """Return the names of the classes. If ``of_numbers`` is True, the targets are not class numbers."""
        return self.classes

    def needs_classes(self, hp: Hyperparameters) -> bool:
        """Return whether the targets are class numbers, so that the number of classes must be known."""
        raise NotImplementedError

    def check_settings(self, hp: Hyperparameters) -> None:
        """Raise UserError if hyperparameters do not fit this kind of data, such as ``image_size`` for texts."""
        if self.pictures:
            if hp.collate != "stacked":
                what = f"dataset={self.name!r} has images, which all have one size"
                raise UserError(f"collate={hp.collate!r}: {what}; omit collate")
            return
        what = f"dataset={self.name!r} has samples that are not images"
        if ":" not in hp.model:
            images = "return PIL images or uint8 arrays, without ToTensor and Normalize"
            raise UserError(f"model={hp.model!r}: needs images, but {what}; use a user-defined model, or {images}")
        if hp.image_size:
            raise UserError(f"image_size={hp.image_size}: {what}; set image_size=0")
        if hp.augment != "none" and ":" not in hp.augment:
            raise UserError(f"augment={hp.augment!r}: {what}; set augment=none, or use a user-defined function")

    def no_samples_error(self, purpose: str) -> UserError:
        problem = f"has no samples for {purpose}; {self.advice}, hold out less, or set test_dataset"
        return UserError(f"dataset={self.name!r}: {problem}")

    def notes(self) -> Sequence[str]:
        """Return lines for users about the content."""
        return ()

    def report_notes(self) -> list[str]:
        """Return sentences for the report about limits of a training on these data."""
        return []

    def open_splits(self, orders: Orders, hp: Hyperparameters, device: torch.device, settings: Settings) -> Splits:
        """Open this rank's splits, and start threads or processes that load samples.

        Args:
            orders: The orders of "training", "validation" and "test".
            settings: The settings, with the number of threads or processes, if the kind of data needs any.

        Raises:
            UserError: Data and hyperparameters do not fit together, or user code cannot be imported.
            UserCodeError: User code fails on a sample that is read here.
        """
        splits: Splits = resolve_name(f"{self.opening}:open_splits")(self, orders, hp, device, settings)
        return splits

    def open_test_split(self, opening: Opening) -> tuple[Split, ModelInput]:
        """Open the test split for a trained model, and start threads or processes that load samples.

        Returns:
            The split, and the specification of its inputs. The caller must close the split's source.

        Raises:
            UserError: Samples do not fit together, the split is empty, or user code cannot be imported.
            UserCodeError: User code fails on a sample that is read here.
        """
        split: tuple[Split, ModelInput] = resolve_name(f"{self.opening}:open_test_split")(self, opening)
        return split

    def iterate_test_images(self, opening: Opening) -> Iterator[Pixels]:
        """Yield the test split's images, uint8 [H, W, C], neither cropped nor resized.

        Skips encoded images that cannot be decoded, and decodes encoded images ahead in threads. Does not skip items of
        user code.

        Raises:
            UserError: An image cannot be read, or an item of user code is unfit.
            UserCodeError: User code fails.
            MachineError: User code does not return within FLYTE_DDP_TIMEOUT.
        """
        images: Iterator[Pixels] = resolve_name(f"{self.opening}:iterate_test_images")(self, opening)
        return images

    def identify_samples(self, side: str) -> NDArray[np.uint64]:  # noqa: ARG002
        """Return an identifying number for each sample of a side, or an empty array if the numbers are unknown.

        Equal samples without ids have equal numbers. By default empty.
        """
        return np.empty(0, np.uint64)

    def identify_tested(self, ids: Sequence[str]) -> NDArray[np.uint64]:  # noqa: ARG002
        """Return an identifying number for each test sample that was evaluated, whose ``ids`` are given."""
        return self.identify_samples("test")


def write_prepared_set(data: PreparedSet, folder: Path, origin: Mapping[str, str]) -> None:
    """Write a data set into an existing folder: arrays, other files, ``verified.json``, and ``dataset.json`` last.

    ``origin`` holds further entries of ``dataset.json``, such as ``data_source``.
    """
    arrays = data.list_arrays()
    for name, array in arrays.items():
        write_array(folder / f"{name}.npy", array)
    data.write_other_files(folder)
    digest, test_digest = data.compute_digests()
    own = (folder / DESCRIPTION, folder / VERIFIED)
    files = {str(path.relative_to(folder)): path for path in list_files(folder) if path not in own}
    description = Description(
        format=FORMAT,
        name=data.name,
        classes=data.classes,
        digest=digest,
        test_digest=test_digest,
        weighted=WEIGHTS in arrays,
        files={name: file_digest(path) for name, path in files.items()},
        content={**data.describe_content(), **origin},
    )
    write_json(folder / VERIFIED, {name: get_file_version(path) for name, path in files.items()})
    write_json(folder / DESCRIPTION, description.to_json_value(), indent=1)
