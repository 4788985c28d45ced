"""The numbers that a user-defined function records, in metrics.jsonl and as progress on stderr."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loops.checkpoints import check_step_not_before
from flyte_ddp.core.progress import StepProgress
from flyte_ddp.core.runs.metrics import FunctionEnd, MetricsRecord, ValuesRecord
from flyte_ddp.core.runs.run_folder import METRICS
from flyte_ddp.core.text.json_lines import JsonLines

RESERVED_KEYS = ("kind", "time")  # keys of each record
LARGEST_INT = 2**63  # from here on, whole numbers are recorded as floats, which all readers of JSON accept


class Records:
    """Writes records to ``folder/metrics.jsonl``, and shows progress.

    ``first`` is the step from which the run resumes.
    """

    def __init__(self, folder: Path, progress: str, first: int = 0) -> None:
        self.log, self.progress = JsonLines(folder / METRICS), StepProgress(progress)
        self.step, self.began = first, time.monotonic()

    def write(self, record: MetricsRecord) -> None:
        self.log.write(record.to_json_value())

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a record of a step's numbers to metrics.jsonl, and show the numbers as progress.

        Raises:
            UserError: The step goes back, a value is not a number, or a name is ``kind`` or ``time``.
        """
        check_step_not_before("record", step, self.step)
        numbers = dict[str, float]()
        for name, value in values.items():
            if name in RESERVED_KEYS:
                raise UserError(f"record: {name!r} is a reserved key of each record; choose another name")
            try:
                number = value.item() if hasattr(value, "item") else value  # of a tensor or an array
                numbers[name] = number if type(number) is int and abs(number) < LARGEST_INT else float(number)
            except OverflowError:  # a whole number beyond all floats
                numbers[name] = math.inf if number > 0 else -math.inf
            except (TypeError, ValueError, RuntimeError):
                raise UserError(
                    f"record: {name} is of type {type(value).__name__}; must be a number, or a tensor of one "
                    "element; use results.event for texts"
                ) from None
        self.step = step
        self.write(ValuesRecord(step=step, values=numbers))
        self.progress.show_step(step, numbers)

    def end(self) -> None:
        self.write(FunctionEnd(step=self.step, seconds=time.monotonic() - self.began))

    def close(self) -> None:
        self.progress.close()
        self.log.close()
