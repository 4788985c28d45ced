"""Write tables of predictions, and read them."""

import csv
from pathlib import Path
from typing import Any

from flyte_ddp.predict.predict import write_prediction_table


def predict_rows(model: Path, sidecar: Path, output: Path, **options: Any) -> list[dict[str, str]]:
    """Write the table of predictions of ``images`` or of a ``dataset``, and return the rows."""
    write_prediction_table(model, sidecar, output=output, **{"images": None, "dataset": None, **options})
    with output.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return [*csv.DictReader(file)]
