"""Columns of tables, and texts, for the samples and a model's answers."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.samples.leaves import Leaves, name_leaves
from flyte_ddp.core.text.formatting import format_value

MOST_COLUMNS = 1000  # most numbers of a sample that become columns of a table
SHOWN_NUMBERS = 6  # in a text
LONGEST = 100  # characters of a text

TableColumns = dict[str, Sequence[Any]]  # texts or numbers of n samples, by the name of the column


def make_number_columns(name: str, values: Any) -> TableColumns:
    """Return the numbers of n samples as columns ``<name>``, or ``<name>_0``, ``<name>_1`` and so on.

    Numbers of several tensors follow each other. Returns no columns if a sample has no numbers or more than 1,000, or
    if the tensors have different lengths.
    """
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.dim()]
    if not tensors or len({len(tensor) for tensor in tensors}) > 1:
        return {}
    rows = torch.cat([tensor.detach().double().cpu().reshape(len(tensor), -1) for tensor in tensors], dim=1)
    width = rows.shape[1]
    if not 0 < width <= MOST_COLUMNS:
        return {}
    single = len(tensors) == 1 and tensors[0].dim() == 1
    names = [name] if single else [f"{name}_{place}" for place in range(width)]
    return dict(zip(names, rows.T.tolist(), strict=True))


def make_input_columns(
    inputs: Leaves, columns: Mapping[str, Sequence[str]], rows: Mapping[str, NDArray[Any]]
) -> TableColumns:
    """Return up to 6 inputs of n samples as columns of a table, by name.

    Args:
        inputs: Inputs of the samples. The keys of a dict name leaves [n].
        columns: By leaf, the names of a table's columns, for leaves [n, columns].
        rows: Columns of the table's rows as read. If given, only these are returned.
    """
    found: TableColumns = {name: values.tolist() for name, values in rows.items()}
    for leaf, values in ({} if rows else name_leaves(inputs)).items():
        if isinstance(values, Tensor) and values.dim() == 1 and isinstance(inputs, Mapping):
            found[leaf] = values.tolist()
        elif isinstance(values, Tensor) and values.dim() == 2 and len(columns.get(leaf, ())) == values.shape[1]:
            found |= zip(columns[leaf], values.T.tolist(), strict=True)
    return dict(islice(found.items(), SHOWN_NUMBERS))


def format_sample_inputs(columns: Mapping[str, Sequence[Any]], place: int) -> dict[str, str]:
    """Return the values of the sample at position ``place`` as texts, by column name."""
    return {name: format_page_cell(values[place]) for name, values in columns.items()}


def merge_columns(answers: TableColumns, truths: TableColumns) -> TableColumns:
    """Return a table's columns in order: ``prediction``, the truths, the other answers.

    Raises:
        UserError: An answer has the name of a truth, or is called id, image or mask.
    """
    for name in answers:
        if name in ("id", "image", "mask") or name in truths:
            raise UserError(
                f"the objective's answers have a column {name!r}, which already exists in the table; rename the column"
            )
    first = {name: answers[name] for name in answers if name == "prediction"}
    return {**first, **truths, **answers}


def describe_samples(columns: Mapping[str, Sequence[Any]], name: str, samples: int) -> list[str]:
    """Return a short text for each sample, from the column ``name`` or else the columns ``name_...``.

    A text has up to 6 values and about 100 characters. Without these columns, texts are empty. ``samples`` is the
    number of samples.
    """
    chosen = [columns[name]] if name in columns else [
        values for column, values in columns.items() if column.startswith(f"{name}_")
    ]  # fmt: skip
    more = ", ..." if len(chosen) > SHOWN_NUMBERS else ""
    rows = zip(*chosen[:SHOWN_NUMBERS], strict=True) if chosen else [()] * samples
    texts = (", ".join(map(format_page_cell, row)) + more for row in rows)
    return [text if len(text) <= LONGEST else f"{text[:LONGEST]}..." for text in texts]


def format_page_cell(value: Any) -> str:
    """Return a text unchanged, and a number as a short text. NaN becomes "unknown"."""
    return value if isinstance(value, str) else "unknown" if math.isnan(value) else format_value(value)
