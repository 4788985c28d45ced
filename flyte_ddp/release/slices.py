"""Reads CSV files with facts about samples by id, such as the slices of a policy."""

import csv
import io
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError


def read_id_table(setting: str, column: str, address: str) -> list[tuple[int, str, str]]:
    """Read a CSV file, with retries, and return line number, id and the value of ``column`` for each row.

    Other columns are ignored. A cell that is missing at the end of a line is "". ``setting`` names the file in errors.
    Raises UserError if the file cannot be read, is malformed, or lacks a column.
    """
    try:
        content = storage.call_with_retries(address, storage.read_file)
    except storage.UnavailableError as failure:
        raise failure.to_user_error(f"{setting}={address!r}: cannot be read: {failure}; check the address") from None
    try:
        text = content.decode("utf-8-sig")  # Excel begins its files with a byte order mark
        table = csv.DictReader(io.StringIO(text, newline=""), restval="", strict=True)
        if not {"id", column} <= {*(table.fieldnames or ())}:
            raise csv.Error(f"its first line is {text.partition(chr(10))[0].rstrip()!r}")  # noqa: TRY301 (one message)
        rows = []
        for row in table:
            if None in row:
                raise csv.Error(f"line {table.line_num} has more cells than the first line")  # noqa: TRY301 (as above)
            rows.append((table.line_num, row["id"], row[column]))
    except (UnicodeDecodeError, csv.Error) as error:
        rule = f"must be CSV in UTF-8 with the columns id and {column}"
        raise UserError(f"{setting}={address!r}: {rule} ({error})") from None
    return rows


def read_slices(address: str) -> list[tuple[int, str, str]]:
    """Read a CSV file, with retries, and return the line number, the id and the slice of each row.

    Raises UserError if the file cannot be read, is malformed, or has no rows.
    """
    rows = read_id_table("slices", "slice", address)
    if not rows:
        rule = "has no rows, so no slice would be checked"
        raise UserError(f"slices={address!r}: {rule}; write the file again, or omit slices")
    return rows


def group_by_slice(address: str, ids: Sequence[str], undecoded: Collection[str]) -> dict[str, NDArray[np.int64]]:
    """Read a CSV file of slices, and return each slice's positions in ``ids``, ascending, by the slice's name.

    A sample may be in several slices. Ids in ``undecoded`` are skipped.

    Raises:
        UserError: The file cannot be read, or has no rows. An id is in neither ``ids`` nor ``undecoded``, or a line has
            no slice.
    """
    places = {name: place for place, name in enumerate(ids)}
    members: dict[str, set[int]] = {}
    for line, sample, name in read_slices(address):
        if name and sample in places:
            members.setdefault(name, set()).add(places[sample])
        elif not name or sample not in undecoded:
            what = "is not in the test split" if name else "has no slice"
            raise UserError(f"slices={address!r}: id {sample!r} in line {line} {what}; correct it")
    return {name: np.array(sorted(found), dtype=np.int64) for name, found in members.items()}
