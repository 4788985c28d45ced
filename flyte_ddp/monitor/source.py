"""The addresses of a window of new samples: one flat, frozen, validated dataclass."""

# No "from __future__ import annotations" here: flytekit derives the console's form from real types.
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from flyte_ddp.core.checks.fields import CheckedFields, setting
from flyte_ddp.core.errors import UserError

KINDS = ("images", "dataset", "table")
ADDRESSES = (*KINDS, "data_source", "truth")
# Python's fields without %c, %x and %X, which have spaces and slashes: %c3%a9 is an encoded letter.
FIELD = re.compile("%[aAbBdfGHIjmMpSuUVwWyYzZ%]")


@dataclass(frozen=True)
class WindowSource(CheckedFields, called="window setting"):
    """The addresses of a window's samples and truth. Give exactly one of images, dataset and table."""

    images: str = setting(
        "",
        "Folder of images to predict. Each address may contain fields of strftime for the window's time, such as "
        "s3://bucket/in/%Y-%m-%d/%H.",
    )
    dataset: str = setting("", "Data set whose test split is predicted, as in the hyperparameters.")
    table: str = setting("", "File of new rows, read by the model's `prepare`, such as s3://bucket/%Y%m%d.csv.")
    data_source: str = setting("", "Location of the files of dataset, as in the hyperparameters.")
    truth: str = setting(
        "",
        "A CSV file with the columns `id` and `truth`, for classification and regression; ids as in the tables of "
        "predictions. A dataset has its own truth.",
    )
    hours_back: int = setting(
        0,
        "Hours from the time in the addresses to the start of the run: 1 reads the previous hour.",
        at_least=0,
        at_most=87_600,
    )
    fail_on_alarm: bool = setting(True, "Whether an alarm ends the execution as failed, so that Flyte notifies people.")

    def fill_in_time(self, time: datetime) -> Self:
        """Return a copy with the fields of strftime filled in by ``time``, in UTC, less ``hours_back``.

        Raises:
            UserError: Not exactly one of images, dataset and table is given, or both dataset and truth are given. A
                percent sign begins no field.
        """
        if sum(bool(getattr(self, kind)) for kind in KINDS) != 1:
            given = ", ".join(f"{kind}={getattr(self, kind)!r}" for kind in KINDS)
            raise UserError(f"{given}: give exactly one of the three")
        if self.truth and self.dataset:
            raise UserError(f"truth={self.truth!r}: dataset={self.dataset!r} has its own truth; omit truth or dataset")
        moment = time.astimezone(UTC) - timedelta(hours=self.hours_back)
        filled: dict[str, Any] = {name: fill_in_address(name, getattr(self, name), moment) for name in ADDRESSES}
        return replace(self, **filled)

    @property
    def address(self) -> str:
        """The images, the table, or the data set with its source, as text."""
        return self.images or self.table or " ".join(filter(None, (self.dataset, self.data_source)))


def fill_in_address(name: str, address: str, moment: datetime) -> str:
    """Return an address with the fields of strftime filled in. ``name`` is the setting's name for errors.

    Raises:
        UserError: A percent sign begins no field.
    """
    if unknown := re.search("%.{0,2}", FIELD.sub("", address)):
        raise UserError(
            f"{name}={address!r}: {unknown[0]!r} is not a field of strftime such as %Y, %m, %d and %H; write a "
            "percent sign of the address as %%"
        )
    return moment.strftime(address)
