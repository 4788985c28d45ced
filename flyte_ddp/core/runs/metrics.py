"""The records of ``metrics.jsonl``, each of which is a line, and the result of a rung."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.checks.records import Count, JsonRecord
from flyte_ddp.core.text.json_lines import read_records

Number = float | None  # None: not a finite number
Direction = Annotated[str, {"higher", "lower"}]


@dataclass(frozen=True, kw_only=True)
class MetricsRecord(JsonRecord):
    """A line of ``metrics.jsonl``."""

    time: float | None = None  # when the record was written, in seconds since 1970; None: not written yet


@dataclass(frozen=True, kw_only=True)
class StartRecord(MetricsRecord):
    """The start of an attempt."""

    kind = "start"
    resumed_after_step: Count | None = 0
    hyperparameters: Mapping[str, Any]  # of a training, or the arguments of a function
    num_ranks: Count
    num_nodes: Count
    device: str  # of rank 0
    backend: str  # of torch's process group, or "none"


@dataclass(frozen=True, kw_only=True)
class TrainingStart(StartRecord):
    """The start of an attempt of a training."""

    strategy: str  # of gradients, or "none"
    precision: str
    channels_last: bool = False
    threads_per_rank: Count
    parameters: Count
    training_samples: Count | None = None
    validation_samples: Count | None = None
    test_samples: Count | None = None
    steps: Count
    classes: list[str]  # in the order of the labels
    # Whether higher or lower is better, by the objective's measures, the main measure first.
    measures: Mapping[str, Direction] | None = None
    loss_unit: str = "cross-entropy (nats)"
    init_skipped: list[str] | None = None  # tensors that init_from did not give


@dataclass(frozen=True, kw_only=True)
class FunctionStart(StartRecord):
    """The start of an attempt of a user-defined function."""

    function: str
    resumed_from_other_code: bool | None = None


@dataclass(frozen=True, kw_only=True)
class StepRecord(MetricsRecord):
    """A record after a number of steps."""

    step: Count


@dataclass(frozen=True, kw_only=True)
class RestartRecord(StepRecord):
    """A restart of all ranks in place, after a failure. ``step`` is the step of the checkpoint to start from."""

    kind = "restart"
    reason: str
    seconds: float | None = None  # from the failure until the work resumed; None: another restart followed before


@dataclass(frozen=True, kw_only=True)
class TrainRecord(StepRecord):
    """The training since the last record, up to a step."""

    kind = "train"
    epoch: float
    learning_rate: Number = None
    gradient_norm: Number = None
    samples_per_second: Number = None  # of all ranks
    tokens_per_second: Number = None
    loss: Number = None


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(StepRecord):
    """An evaluation after a step: measures by name."""

    kind = "evaluation"
    epoch: Count
    validation: Mapping[str, Number] = field(default_factory=dict, metadata={"prefix": "validation_"})
    test: Mapping[str, Number] = field(default_factory=dict, metadata={"prefix": "test_"})


@dataclass(frozen=True, kw_only=True)
class ValuesRecord(StepRecord):
    """Numbers that a user-defined function has recorded for a step."""

    kind = "record"
    values: Mapping[str, Number] = field(default_factory=dict, metadata={"prefix": ""})


@dataclass(frozen=True, kw_only=True)
class Seconds(JsonRecord):
    """Seconds of rank 0 by activity."""

    data: float = 0.0
    forward_backward: float = 0.0
    communication: float = 0.0
    evaluation: float = 0.0
    other: float = 0.0
    total: float


@dataclass(frozen=True, kw_only=True)
class TrainingEnd(MetricsRecord):
    """The end of a finished training, with the measures of the kept weights by name."""

    kind = "end"
    test: Mapping[str, Number] = field(default_factory=dict, metadata={"prefix": "test_"})
    seconds: Seconds | None = None
    samples_per_second: Number = None
    stopped: str | None = None  # why the training ended early; empty: it did not
    notes: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class FunctionEnd(StepRecord):
    """The end of a user-defined function."""

    kind = "end"
    seconds: float


@dataclass(frozen=True)
class RungResult(JsonRecord):
    """The content of ``rung.json`` in a run that has stopped after a part of its steps."""

    step: Count  # steps that are done
    value: Number  # the measure select_by on the validation split, of the weights to keep if the run ended now


KINDS: dict[str, type[MetricsRecord]] = {
    kind.kind: kind for kind in (RestartRecord, TrainRecord, EvaluationRecord, ValuesRecord)
}


def read_metrics(path: Path) -> list[MetricsRecord]:
    """Read the records of a ``metrics.jsonl``. Lines that are no records are skipped.

    Raises:
        UserError: The file cannot be read, or a record lacks a field or has a value of another type.
    """
    return [*parse_metrics(read_records(path), f"{path} is damaged")]


def parse_metrics(values: Iterable[JsonObject], where: str) -> Iterator[MetricsRecord]:
    """Yield a record for each JSON object whose kind is known, and skip other objects.

    Raises:
        UserError: A field is missing, or a value has another type. The error begins with ``where``.
    """
    for value in values:
        kind = value.get("kind")
        if kind == "start":
            yield (FunctionStart if "function" in value else TrainingStart).from_json_value(value, where)
        elif kind == "end":
            yield (FunctionEnd if "step" in value else TrainingEnd).from_json_value(value, where)
        elif isinstance(kind, str) and kind in KINDS:
            yield KINDS[kind].from_json_value(value, where)
