"""The prepared data of a training whose hyperparameters name the data set."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.catalog import encoded_kind
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.prepared import (
    PreparedSet,
    count_training_classes,
    refuse_too_few_shards,
    resolve_class_names,
)
from flyte_ddp.datasets.preprocessing import TABLE
from flyte_ddp.datasets.rows import normalize_columns
from flyte_ddp.datasets.sample_arrays import Ragged, SampleArrays, name_sample
from flyte_ddp.errors import UserError
from flyte_ddp.hardware import Hardware
from flyte_ddp.loading.collate import widen_type
from flyte_ddp.loading.opening import open_splits
from flyte_ddp.loading.split import Splits
from flyte_ddp.models.sidecar import MIDDLE
from flyte_ddp.objectives.table_columns import TableColumns, list_inputs
from flyte_ddp.order.sampling import Indices, Order
from flyte_ddp.samples.leaves import Leaves
from flyte_ddp.settings import Settings

TRIED_TOKENS = 10_000  # first tokens of the texts, on which a user-defined objective's weights are tried
SIDES = {"train": "training", "test": "test"}


class OpenedData:
    """The TrainingData of hyperparameters and a prepared set."""

    def __init__(self, hp: Hyperparameters, prepared: PreparedSet) -> None:
        self.hp, self.prepared = hp, prepared
        self.name, self.digest = hp.dataset, prepared.digest
        self.crop = MIDDLE if encoded_kind(hp.dataset) else ""
        self.preprocessing: Mapping[str, Any] = prepared.preprocessing if isinstance(prepared, SampleArrays) else {}
        self.user_code: tuple[str, ...] = tuple(
            self.preprocessing[key] for key in ("prepare", TABLE) if key in self.preprocessing
        )

    def check_ranks(self, ranks: int, workers: int) -> None:
        refuse_too_few_shards(self.prepared, self.hp, ranks=ranks, workers=workers)

    def open_splits(self, hardware: Hardware, device: torch.device, settings: Settings) -> Splits:
        return open_splits(self.prepared, self.hp, hardware, device, settings)

    def name_classes(self, *, of_numbers: bool) -> tuple[str, ...]:
        # An image folder's names are no classes if a user's function has made the targets, which are numbers.
        named = () if of_numbers and encoded_kind(self.hp.dataset) == "image_folder" else self.prepared.classes
        return resolve_class_names(named, self.hp, of_numbers=of_numbers)

    def count_classes(self, training: Order, classes: int) -> tuple[int, ...]:
        return () if self.hp.sample else count_training_classes(self.prepared, training, classes)

    @cached_property
    def stored_targets(self) -> dict[str, NDArray[Any]]:
        """The stored targets of "train" and "test", by side, if they are a single array. Ragged targets are one row.

        Empty if user code or files hold the targets.
        """
        sides = SIDES if isinstance(self.prepared, SampleArrays) and ":" not in self.hp.collate else {}
        stored = {side: getattr(self.prepared, f"{side}_targets") for side in sides}
        one = {side: each.values[np.newaxis] if isinstance(each, Ragged) else each for side, each in stored.items()}
        return {side: targets for side, targets in one.items() if isinstance(targets, np.ndarray)}

    def check_stored_targets(self, check: Callable[[NDArray[Any]], None]) -> bool:
        for side, stored in self.stored_targets.items():
            split, targets = SIDES[side], getattr(self.prepared, f"{side}_targets")
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
            is_ragged = isinstance(getattr(self.prepared, f"{side}_targets"), Ragged)
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
        for file, row in self.prepared.not_finite.items() if isinstance(self.prepared, SampleArrays) else ():
            sample = np.int32(row)
            if file.startswith("test_"):
                yield "test", sample
            elif np.isin(sample, validation.samples(slice(None))):
                yield "validation", sample
            elif self.hp.sampling == "shuffled":  # another sampling may skip the sample
                yield "training", sample

    def name_sample(self, split: str, number: int) -> str:
        return name_sample(self.prepared, split, number)

    @cached_property
    def row_columns(self) -> dict[str, NDArray[Any]]:
        """The columns of the test rows as the user's code has read them, by name. Empty if no rows were kept."""
        if not isinstance(self.prepared, SampleArrays) or not self.prepared.rows:
            return {}
        return normalize_columns(self.prepared.load_rows("test"))

    def list_inputs(self, inputs: Leaves, samples: Indices) -> TableColumns:
        rows = {name: column[samples] for name, column in self.row_columns.items()}
        return list_inputs(inputs, self.preprocessing.get("columns", {}), rows)

    def list_notes(self) -> list[str]:
        text = "The training data were a stream: each rank and each worker read different shards."
        return [text] if encoded_kind(self.hp.dataset) == "stream" else []
