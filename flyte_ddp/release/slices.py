"""Slices of a test split: parts of it that are looked at as classes are, listed in a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.storage import UnavailableError


class Row(NamedTuple):
    """A line of the file."""

    line: int
    sample: str
    slice: str


def read_slices(address: str) -> list[Row]:
    """The rows of a CSV file with the columns ``id`` and ``slice``.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        content = storage.retried(address, storage.read)
    except UnavailableError as failure:
        raise failure.explained(f"slices={address!r}: cannot be read: {failure}; check the address") from None
    try:
        text = content.decode("utf-8-sig")  # Excel begins its files with a byte order mark
        table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        if not {"id", "slice"} <= {*(table.fieldnames or ())}:
            raise UserError(f"slices={address!r}: must have the columns id and slice; its first line names others")
        rows = [Row(table.line_num, row["id"], row["slice"]) for row in table]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"slices={address!r}: is no CSV file in UTF-8 ({error}); write it anew") from None
    for row in rows:
        if not row.sample or not row.slice:
            raise UserError(f"slices={address!r}: line {row.line} has no id or no slice; complete it")
    return rows


def slice_members(address: str, ids: Sequence[str], undecoded: Collection[str]) -> dict[str, NDArray[np.int64]]:
    """The samples of each slice.

    Args:
        address: of the file.
        ids: of the samples that there are answers to.
        undecoded: those of samples that could not be decoded, which belong to no slice.

    Raises:
        UserError: the file cannot be read, or names a sample that is not in the test split.
    """
    places = {name: place for place, name in enumerate(ids)}
    members: dict[str, set[int]] = {}
    for line, sample, name in read_slices(address):
        if sample in places:
            members.setdefault(name, set()).add(places[sample])
        elif sample not in undecoded:
            raise UserError(f"slices={address!r}: id {sample!r} in line {line} is not in the test split; correct it")
    return {name: np.array(sorted(found), dtype=np.int64) for name, found in members.items()}
