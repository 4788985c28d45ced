"""The prepared data of a training whose hyperparameters name the data set."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.hardware import Hardware
from flyte_ddp.core.loading.padding import widen_type
from flyte_ddp.core.loading.split import Splits
from flyte_ddp.core.objectives.table_columns import TableColumns, make_input_columns
from flyte_ddp.core.order.sampling import Indices, Order
from flyte_ddp.core.samples.leaves import Leaves, Ragged
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets.prepared import apply_sampling, count_training_classes, resolve_class_names
from flyte_ddp.datasets.prepared_set import PreparedSet
from flyte_ddp.datasets.rows import normalize_columns

TRIED_TOKENS = 10_000  # first tokens of the texts, on which a user-defined objective's weights are tried
SIDES = {"train": "training", "test": "test"}


class OpenedData:
    """The TrainingData of hyperparameters and a prepared set."""

    def __init__(self, hp: Hyperparameters, prepared: PreparedSet) -> None:
        self.hp, self.prepared = hp, prepared
        self.name, self.digest, self.crop = hp.dataset, prepared.digest, prepared.crop
        self.preprocessing = prepared.preprocessing
        self.user_code = tuple(filter(None, (self.preprocessing.prepare, self.preprocessing.table)))
        self.name_sample, self.list_notes = prepared.name_sample, prepared.report_notes

    def open_splits(self, hardware: Hardware, device: torch.device, settings: Settings) -> Splits:
        """Open this rank's splits, and start threads or processes that load samples.

        The result's ``close`` ends these threads or processes. Their number is ``settings.loaders``. If this is 0, each
        core of the rank has a thread or process, except one core for the rank itself with a GPU.

        Raises:
            UserError: Data and hyperparameters do not fit together, or user code cannot be imported.
            UserCodeError: User code fails on a sample that is read here.
        """
        hp = self.hp
        orders = self.prepared.make_split_orders(hp.validation_fraction, hp.seed, hp.shuffle_shards)
        orders["training"] = apply_sampling(self.prepared, orders["training"], hp.sampling)
        # With a GPU, one core is left for the rank's thread, which starts the GPU's work.
        loaders = settings.loaders or max(1, hardware.threads - (device.type == "cuda"))
        return self.prepared.open_splits(orders, hp, device, replace(settings, loaders=loaders))

    def name_classes(self, *, of_numbers: bool) -> tuple[str, ...]:
        return resolve_class_names(self.prepared.class_names(of_numbers=of_numbers), self.hp, may_be_empty=of_numbers)

    def count_classes(self, training: Order, classes: int) -> tuple[int, ...]:
        return () if self.hp.sample else count_training_classes(self.prepared, training, classes)

    @cached_property
    def stored_targets(self) -> dict[str, NDArray[Any] | Ragged]:
        """The stored targets of "train" and "test", by side, if they are a single leaf.

        Empty if user code or files hold the targets.
        """
        sides = () if ":" in self.hp.collate else SIDES
        stored = {side: self.prepared.stored_leaves(side) for side in sides}
        single = (np.ndarray, Ragged)
        return {side: leaves[1] for side, leaves in stored.items() if leaves and isinstance(leaves[1], single)}

    def check_stored_targets(self, check: Callable[[NDArray[Any]], None]) -> bool:
        """Call ``check`` with the stored targets of each side, and return whether stored targets exist.

        Raises:
            UserError: ``check`` has raised UserError. The error names the split, and in ragged targets the sample.
        """
        for side, targets in self.stored_targets.items():
            try:
                check(as_rows(targets))
            except UserError as error:
                for row in range(len(targets)) if isinstance(targets, Ragged) else ():
                    try:
                        check(targets[row][np.newaxis])
                    except UserError as of_row:
                        raise UserError(f"{self.name_sample(SIDES[side], row)}: {of_row}") from None
                raise UserError(f"{SIDES[side]} targets: {error}") from None
        return bool(self.stored_targets)

    def iterate_stored_targets(self, batch_size: int) -> Iterator[torch.Tensor]:
        for targets in self.stored_targets.values():
            tried = as_rows(targets)[:, :TRIED_TOKENS] if isinstance(targets, Ragged) else targets
            for rows in np.array_split(tried, -(-len(tried) // batch_size)):
                batch = torch.tensor(rows)
                yield batch if self.prepared.pictures else widen_type(batch)

    def has_no_nan_targets(self) -> bool:
        # User code may return NaN.
        if any(":" in code for code in (self.hp.sample, self.hp.augment, self.hp.collate)):
            return False
        stored = self.stored_targets.values()
        return bool(stored) and not any(np.isnan(as_rows(targets)).any() for targets in stored)

    def list_not_finite(self, validation: Order) -> Iterator[tuple[str, np.int32]]:
        for file, row in self.prepared.not_finite.items():
            sample = np.int32(row)
            if file.startswith("test_"):
                yield "test", sample
            elif np.isin(sample, validation.samples_at(slice(None))):
                yield "validation", sample
            elif self.hp.sampling == "shuffled":  # another sampling may skip the sample
                yield "training", sample

    @cached_property
    def row_columns(self) -> dict[str, NDArray[Any]]:
        """The columns of the test rows as the user's code has read them, by name. Empty if no rows were kept."""
        rows = self.prepared.load_rows("test")
        return {} if rows is None else normalize_columns(rows)

    def make_input_columns(self, inputs: Leaves, samples: Indices) -> TableColumns:
        rows = {name: column[samples] for name, column in self.row_columns.items()}
        return make_input_columns(inputs, self.preprocessing.columns, rows)


def as_rows(targets: NDArray[Any] | Ragged) -> NDArray[Any]:
    """Return stored targets as rows. Targets of different lengths are a single row."""
    return targets.values[np.newaxis] if isinstance(targets, Ragged) else targets
