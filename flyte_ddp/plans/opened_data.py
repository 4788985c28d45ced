"""The prepared data of a training whose hyperparameters name the data set."""

from collections.abc import Callable, Iterator
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
from flyte_ddp.core.objectives.table_columns import TableColumns, list_inputs
from flyte_ddp.core.order.sampling import Indices, Order
from flyte_ddp.core.samples.leaves import Leaves, Ragged
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets.prepared import count_training_classes, order_and_open_splits, resolve_class_names
from flyte_ddp.datasets.prepared_set import PreparedSet
from flyte_ddp.datasets.rows import normalize_columns
from flyte_ddp.models.preprocessing import TABLE

TRIED_TOKENS = 10_000  # first tokens of the texts, on which a user-defined objective's weights are tried
SIDES = {"train": "training", "test": "test"}


class OpenedData:
    """The TrainingData of hyperparameters and a prepared set."""

    def __init__(self, hp: Hyperparameters, prepared: PreparedSet) -> None:
        self.hp, self.prepared = hp, prepared
        self.name, self.digest = hp.dataset, prepared.digest
        self.crop, self.preprocessing = prepared.crop, prepared.preprocessing
        self.user_code: tuple[str, ...] = tuple(
            self.preprocessing[key] for key in ("prepare", TABLE) if key in self.preprocessing
        )

    def open_splits(self, hardware: Hardware, device: torch.device, settings: Settings) -> Splits:
        return order_and_open_splits(self.prepared, self.hp, hardware, device, settings)

    def name_classes(self, *, of_numbers: bool) -> tuple[str, ...]:
        return resolve_class_names(self.prepared.class_names(of_numbers=of_numbers), self.hp, may_be_empty=of_numbers)

    def count_classes(self, training: Order, classes: int) -> tuple[int, ...]:
        return () if self.hp.sample else count_training_classes(self.prepared, training, classes)

    @cached_property
    def stored_targets(self) -> dict[str, NDArray[Any]]:
        """The stored targets of "train" and "test", by side, if they are a single array. Ragged targets are one row.

        Empty if user code or files hold the targets.
        """
        one = {
            side: each.values[np.newaxis] if isinstance(each, Ragged) else each for side, each in self.targets.items()
        }
        return {side: targets for side, targets in one.items() if isinstance(targets, np.ndarray)}

    @cached_property
    def targets(self) -> dict[str, Leaves]:
        """The stored targets of "train" and "test", by side. Empty if user code or files hold the targets."""
        sides = () if ":" in self.hp.collate else SIDES
        stored = {side: self.prepared.stored_leaves(side) for side in sides}
        return {side: leaves[1] for side, leaves in stored.items() if leaves is not None}

    def check_stored_targets(self, check: Callable[[NDArray[Any]], None]) -> bool:
        for side, stored in self.stored_targets.items():
            split, targets = SIDES[side], self.targets[side]
            try:
                check(stored)
            except UserError as error:
                for row in range(len(targets.ends)) if isinstance(targets, Ragged) else ():
                    try:
                        check(np.asarray(targets[row])[np.newaxis])
                    except UserError as of_row:
                        raise UserError(f"{self.name_sample(split, row)}: {of_row}") from None
                raise UserError(f"{split} targets: {error}") from None
        return bool(self.stored_targets)

    def iterate_stored_targets(self, batch_size: int) -> Iterator[torch.Tensor]:
        for side, stored in self.stored_targets.items():
            is_ragged = isinstance(self.targets[side], Ragged)
            tried = stored[:, :TRIED_TOKENS] if is_ragged else stored
            for rows in np.array_split(tried, -(-len(tried) // batch_size)):
                batch = torch.tensor(rows)
                yield batch if self.prepared.pictures else widen_type(batch)

    def has_no_nan_targets(self) -> bool:
        # User code may return NaN.
        if any(":" in code for code in (self.hp.sample, self.hp.augment, self.hp.collate)):
            return False
        return bool(self.stored_targets) and not any(np.isnan(stored).any() for stored in self.stored_targets.values())

    def list_not_finite(self, validation: Order) -> Iterator[tuple[str, np.int32]]:
        for file, row in self.prepared.not_finite.items():
            sample = np.int32(row)
            if file.startswith("test_"):
                yield "test", sample
            elif np.isin(sample, validation.samples_at(slice(None))):
                yield "validation", sample
            elif self.hp.sampling == "shuffled":  # another sampling may skip the sample
                yield "training", sample

    def name_sample(self, split: str, number: int) -> str:
        return self.prepared.name_sample(split, number)

    @cached_property
    def row_columns(self) -> dict[str, NDArray[Any]]:
        """The columns of the test rows as the user's code has read them, by name. Empty if no rows were kept."""
        rows = self.prepared.load_rows("test")
        return {} if rows is None else normalize_columns(rows)

    def list_inputs(self, inputs: Leaves, samples: Indices) -> TableColumns:
        rows = {name: column[samples] for name, column in self.row_columns.items()}
        return list_inputs(inputs, self.preprocessing.get("columns", {}), rows)

    def list_notes(self) -> list[str]:
        return self.prepared.report_notes()
