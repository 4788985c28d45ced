"""The interface through which a training gets data of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from flyte_ddp.core.hardware import Hardware
    from flyte_ddp.core.loading.split import Splits
    from flyte_ddp.core.models.sidecar import FittedObject
    from flyte_ddp.core.order.sampling import Indices, Order
    from flyte_ddp.core.samples.leaves import Leaves
    from flyte_ddp.core.settings import Settings


class DataSource(Protocol):
    """Data that can be opened on each rank. Instances are pickled, and sent to ranks."""

    def open(self, folder: Path) -> TrainingData:
        """Return the prepared data in a folder.

        Raises:
            UserError: The folder is damaged.
        """


class TrainingData(Protocol):
    """Prepared data, opened for a training."""

    name: str  # in errors
    digest: str  # of the prepared data
    crop: str  # of images in evaluations: "middle" for the middle square, or ""
    preprocessing: FittedObject  # for ``model.json``
    user_code: tuple[str, ...]  # each ``package.module:callable`` in ``preprocessing``

    def open_splits(self, hardware: Hardware, device: torch.device, settings: Settings) -> Splits:
        """Open this rank's splits, and start threads or processes that load samples.

        ``close()`` of the result ends the threads or processes.

        Raises:
            UserError: Data and hyperparameters do not fit together, or user code cannot be imported.
            UserCodeError: User code fails on a sample that is read here.
        """

    def name_classes(self, *, of_numbers: bool) -> tuple[str, ...]:
        """Return the names of the classes. ``of_numbers`` allows (), because targets that are numbers need no classes.

        Raises:
            UserError: The numbers of classes differ, or no number is known and ``of_numbers`` is False.
        """

    def count_classes(self, training: Order, classes: int) -> tuple[int, ...]:
        """Return the number of training samples, labels or pixels of each class, or () if unknown."""

    def check_stored_targets(self, check: Callable[[NDArray[Any]], None]) -> bool:
        """Call ``check`` with all stored targets of each side, and return whether stored targets exist.

        Raises:
            UserError: ``check`` has raised UserError. The error names the split, and if possible the sample.
        """

    def iterate_stored_targets(self, batch_size: int) -> Iterator[torch.Tensor]:
        """Yield the stored targets in batches, as training gets them. Long texts are cut."""

    def has_no_nan_targets(self) -> bool:
        """Return whether no target can be NaN. Reads all stored targets."""

    def list_not_finite(self, validation: Order) -> Iterable[tuple[str, np.int32]]:
        """Return, for each file of arrays, the split and number of the first sample with a NaN or infinite value.

        ``validation`` is the order of the validation split. Samples that training may skip do not count.
        """

    def name_sample(self, split: str, number: int) -> str:
        """Return a text that names a sample: split, number, and the id that the user gave to the sample.

        ``split`` is "training", "validation" or "test". ``number`` is a position in the data set's training samples
        (also for a validation sample) or test samples.
        """

    def make_input_columns(self, inputs: Leaves, samples: Indices) -> Mapping[str, Sequence[Any]]:
        """Return inputs of test samples as columns of a table, with the user's names and values."""

    def list_notes(self) -> list[str]:
        """Return sentences for the report about limits of these data."""
