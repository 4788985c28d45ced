"""Read what a run has recorded: the starts of its attempts, records by step, and its end."""

from pathlib import Path
from typing import Any

from flyte_ddp.errors import UserError
from flyte_ddp.text.json_lines import read_records

Record = dict[str, Any]


class RunRecords:
    """The records of ``metrics.jsonl``; UserError without one of a start."""

    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        self.starts: list[Record] = []  # of all attempts, oldest first
        self.end: Record = {}  # empty: the last attempt has not finished
        self.by_step: dict[str, dict[int, Record]] = {"train": {}, "evaluation": {}, "record": {}}  # by their kind
        for record in read_records(path):
            kind = record.get("kind")
            if kind == "start":
                self.starts.append(record)
                self.end = {}
                if (checkpoint := record.get("resumed_after_step")) is not None:
                    for steps in self.by_step.values():
                        for step in [step for step in steps if step > checkpoint]:
                            del steps[step]
            elif kind == "end":
                self.end = record
            elif kind in self.by_step:
                # Of a value that was recorded twice in a step, perhaps by an earlier attempt, the newest counts.
                self.by_step[kind].setdefault(record["step"], {}).update(record)
        if not self.starts:
            raise UserError(f"{path} has no start record: give the folder of a run that began")
