"""The rows of a new file in batches. Unusable rows count as samples that cannot be decoded."""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.text.formatting import format_count, join_first
from flyte_ddp.datasets.encoded.samples import BadSamples
from flyte_ddp.datasets.rows import MISSING
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.datasets.table import name_targets, number_names
from flyte_ddp.predict.new_rows import load_preprocessing
from flyte_ddp.predict.prediction_batches import Batch, SavedModel, mask_undecoded_targets, read_prepared_batches


def read_row_batches(
    model: SavedModel, table: str, batch_size: int | None, bad: BadSamples
) -> Generator[Batch, None, None]:
    """Yield the rows of a new file in batches of model inputs, with truths if the file has targets.

    The user's code reads the file ``table`` at the first ``next()``. Unusable rows are added to ``bad``, and keep their
    place in the batch: with id, with ``decoded`` False, and without input. ``batch_size``, by default the model's,
    counts usable rows.

    Raises:
        UserError: The user's code fails. More rows are unusable than ``bad.allowed``, or no row is usable. A class is
            not the model's.
    """
    new = load_preprocessing(model.sidecar).read(table)
    every = new.ids if new.ids is not None else np.arange(len(new.places) + len(new.bad)).astype(str)
    bad.names |= {f"row {every[place]}": reason for place, reason in new.bad.items()}
    if len(new.bad) > bad.allowed or not len(new.places):
        first = next(iter(new.bad))
        problem = (
            f"{len(new.bad):,} of {format_count(len(every), 'row')} cannot be predicted, for example {every[first]}"
        )
        fix = f"fill in missing values, or set bad_samples={len(new.bad)} to skip these rows"
        raise UserError(f"{table}: {problem}: {new.bad[first]}; {fix}")
    targets, names = convert_new_targets_and_classes(model, new.targets, table)
    rows = {} if new.rows is None else {"test": new.rows}
    data = SampleArrays(
        table, new.inputs, None, new.inputs, targets, classes=names, test_ids=every[new.places], rows=rows
    )
    start = done = 0
    for batch in read_prepared_batches(model, data, batch_size):
        done += len(batch.ids)
        end = int(new.places[done]) if done < len(new.places) else len(every)  # with the bad rows at the end
        yield insert_undecoded_rows(
            batch, every[start:end].tolist(), [place not in new.bad for place in range(start, end)]
        )
        start = end


def insert_undecoded_rows(batch: Batch, ids: Sequence[str], usable: Sequence[bool]) -> Batch:
    """Return a batch of usable rows with the unusable rows inserted, as samples that cannot be decoded.

    Args:
        batch: The usable rows.
        ids: The ids of all rows, in order.
        usable: For each row, whether the row is in ``batch``.
    """
    if all(usable):
        return batch
    truths, targets = None, batch.targets
    if batch.truths is not None:
        found = iter(batch.truths)
        truths = [next(found) if good else "" for good in usable]
    if isinstance(targets, Tensor):
        places = torch.tensor(usable).cumsum(0).sub(1).clamp(min=0).to(targets.device)
        targets = mask_undecoded_targets(targets[places], usable)
    return batch._replace(ids=ids, truths=truths, decoded=usable, targets=targets)


def convert_new_targets_and_classes(model: SavedModel, targets: Any, table: str) -> tuple[Any, tuple[str, ...]]:
    """Return new rows' targets as class numbers of the model, and the model's class names.

    An unknown class is -1. If the model has no classes, or a row has several targets, returns the targets as float32.
    If ``targets`` is None, returns None and (). ``table`` names the file in errors.

    Raises:
        UserError: A class is not the model's.
    """
    if targets is None:
        return None, ()
    values, classes = np.asarray(targets), tuple(model.classes)
    if values.ndim != 1 or not classes:
        return np.ascontiguousarray(values, dtype=np.float32), classes
    declared = classes if model.sidecar.preprocessing.numbered else ()
    named = name_targets(values, declared, table)
    if unknown := sorted({*named.tolist()}.difference(classes, [MISSING])):
        raise UserError(f"{table}: the target {unknown[0]!r} is not a class of the model ({join_first(classes)})")
    return number_names(named, classes), classes
