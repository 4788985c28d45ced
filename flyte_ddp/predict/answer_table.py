"""The columns of the table of predictions, and the cells of a CSV file."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.objectives.objective import list_float_tensors, overrides
from flyte_ddp.core.objectives.table_columns import TableColumns
from flyte_ddp.core.samples.leaves import Leaves
from flyte_ddp.objectives import Classification, Multilabel, Objective, Segmentation
from flyte_ddp.predict.prediction_batches import SavedModel

MANY_CLASSES = 100  # or labels; with more, the table lists the likeliest of each sample


def make_answer_columns(
    model: SavedModel, outputs: Any, targets: Leaves, undefined: NDArray[np.bool_], top_classes: int = 0
) -> TableColumns:
    """Return a model's outputs for a batch as columns of a table, made by the model's objective.

    In undefined rows, texts become "", and numbers stay.

    Args:
        model: The saved model.
        outputs: The model's outputs for a batch.
        targets: The targets of the batch, which show which outputs are padding, or None.
        undefined: Which rows are undefined, bool [n].
        top_classes: The number of likeliest classes with a column. 0: all classes.

    Raises:
        UserError: The objective has no columns.
    """
    objective, where = model.objective, model.sidecar.objective
    shown = outputs if targets is None else objective.hide_padding(outputs, targets)
    given = {**(objective.top_answers(shown, top_classes) if top_classes else objective.answers(shown))}
    if not given:
        raise UserError(f"objective={where!r}: has no columns for a table of predictions; override its method answers")
    for name, values in given.items():
        if undefined.any() and isinstance(values[0], str):  # the first class is no prediction of NaN
            given[name] = ["" if bad else value for bad, value in zip(undefined, values, strict=True)]
    return given


def is_limited_to_top_classes(objective: Objective, method: str) -> bool:
    """Return whether a table lists only the likeliest of more than 100 classes or labels.

    If the user's objective overrides ``method``, returns False.
    """
    kinds = Classification, Multilabel, Segmentation
    ours = any(isinstance(objective, kind) and not overrides(objective, kind, method) for kind in kinds)
    return ours and objective.outputs > MANY_CLASSES


def mark_rows_with_nan(outputs: Any, samples: int) -> NDArray[np.bool_]:
    """Return for each sample of a batch whether its outputs have a NaN, bool [samples].

    Tensors without a row for each sample are ignored.
    """
    found = np.zeros(samples, dtype=np.bool_)
    for tensor in list_float_tensors(outputs):
        if tensor.shape[:1] == (samples,):
            found |= tensor.isnan().reshape(samples, -1).any(dim=1).cpu().numpy()
    return found


def format_csv_cell(column: str, value: Any) -> str:
    """Return a number or text as the text of a CSV cell. NaN becomes "".

    Floats have six significant digits in the columns score, probability and share, and in columns such as "score_NAME".
    In other columns, floats have all digits, without an exponent.
    """
    if isinstance(value, (str, int, np.integer)):
        return str(value)
    if math.isnan(value):
        return ""
    if column.partition("_")[0] in ("score", "probability", "share"):
        return f"{value:.6g}"
    single = np.float32(value)
    return np.format_float_positional(single if float(single) == value else np.float64(value), trim="-")
