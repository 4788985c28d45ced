"""Write metrics while a run trains, and print progress on the terminal. Only rank 0 writes."""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from flyte_ddp.core.hardware import Hardware
from flyte_ddp.core.machine.clock import DATA, STEPS
from flyte_ddp.core.machine.resources import read_cpu
from flyte_ddp.core.parallel import distributed
from flyte_ddp.core.parallel.strategies import WAITED
from flyte_ddp.core.progress import StepProgress
from flyte_ddp.core.runs.checkpoint import Arithmetic, State
from flyte_ddp.core.runs.metrics import EvaluationRecord, MetricsRecord, Seconds, StepRecord, TrainRecord
from flyte_ddp.core.runs.run_folder import METRICS
from flyte_ddp.core.text.json_lines import JsonLines, format_record, parse_records
from flyte_ddp.core.training.evaluate import Evaluation
from flyte_ddp.core.training.training_state import TrainingState

OTHER_RANKS_RECORDS = 4  # another rank than 0 may be ahead of rank 0 by a step, and by an evaluation
LONG_WAIT = 0.2  # share of the steps' time in which a GPU waits for data
SAVED = ("loss_sum", "weight", "samples", "samples_in_all", "training_seconds", "epoch_accuracies", "warnings")


class StepSums(NamedTuple):
    """Sums over all samples of a global batch, on all ranks and in all micro-batches."""

    loss: torch.Tensor  # of the weighted losses, fp64 []
    weight: torch.Tensor | int  # of the losses' weights, fp64 []; without weights the number of samples
    samples: int


class Recorder:
    """Adds up the losses of steps. On rank 0, writes metrics.jsonl and prints progress. Creation is collective."""

    def __init__(self, output_folder: Path, state: TrainingState) -> None:
        """Open metrics.jsonl in ``output_folder`` on rank 0, and start to count time. Collective."""
        self.settings, self.log_interval = state.settings, state.plan.loop.log_interval
        self.clock, self.device, self.total_steps = state.clock, state.device, state.total_steps
        self.writes = distributed.rank() == 0
        self.last_records: deque[StepRecord] = deque(maxlen=OTHER_RANKS_RECORDS)  # on ranks other than 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.weight: torch.Tensor | int = 0  # sum of weights since the last record, as loss_sum and samples are
        self.samples = 0
        self.samples_in_all = 0
        self.training_seconds = 0.0
        self.since = self.count_training_seconds()  # when the last record was written
        self.main_measure, self.counts_tokens = state.objective.main_measure, state.objective.counts_tokens
        self.epoch_accuracies: list[float] = []  # the main measure of the test split, after each evaluation
        self.arithmetic = gather_arithmetic(state.hardware, self.device)
        self.warnings: list[str] = []
        if self.writes:
            self.log = JsonLines(output_folder / METRICS)
            self.progress = StepProgress(self.settings.progress, state.total_steps, state.steps_per_epoch)

    def write(self, record: MetricsRecord) -> None:
        """Append a record to metrics.jsonl on rank 0. Other ranks keep the last four records in ``last_records``.

        If rank 0 is lost, another rank's last records complete the file.
        """
        if self.writes:
            self.log.write(record.to_json_value())
        elif isinstance(record, StepRecord):
            self.last_records.append(replace(record, time=time.time()))

    def size(self) -> int:
        """Return the length of metrics.jsonl in bytes, 0 on other ranks than 0."""
        return self.log.size() if self.writes else 0

    def close(self) -> None:
        if self.writes:
            self.progress.close()
            self.log.close()

    def state_dict(self) -> State:
        return {name: getattr(self, name) for name in SAVED} | {"seconds": self.count_training_seconds() - self.since}

    def load_state_dict(self, saved: State) -> None:
        """Restore the result of :meth:`state_dict`.

        Warnings that were added before the call are kept, after the saved warnings.
        """
        new = self.warnings
        for name in SAVED:
            setattr(self, name, saved[name])
        self.warnings = [*dict.fromkeys((*self.warnings, *new))]
        self.loss_sum = self.loss_sum.to(self.device)
        if isinstance(self.weight, torch.Tensor):
            self.weight = self.weight.to(self.device)
        self.since = self.count_training_seconds() - saved["seconds"]

    def count_training_seconds(self) -> float:
        """Return a time in seconds that stands still during evaluations. Only differences have a meaning."""
        return time.perf_counter() - self.clock.seconds["evaluation"]

    def record_step(
        self, epoch: int, step: int, sums: StepSums, learning_rate: float, gradient_norm: torch.Tensor | None = None
    ) -> None:
        """Add a step's loss, weights and samples to the sums since the last record.

        Every ``log_interval`` steps, and after the last step, waits for the GPU, writes a record to metrics.jsonl, and
        sets the sums to 0. May print progress in any step.

        Args:
            epoch: Number of the epoch, from 0.
            step: Number of steps that are done.
            sums: Sums over the global batch.
            learning_rate: The rate of the step.
            gradient_norm: Norm of the gradients before clipping, if they are clipped.
        """
        self.loss_sum += sums.loss
        self.weight = self.weight + sums.weight
        self.samples += sums.samples
        if step % self.log_interval and step != self.total_steps:
            if self.writes and self.progress.is_due():
                self.progress.show_step(step, {})
            return
        elapsed = self.count_training_seconds() - self.since
        self.training_seconds += elapsed
        self.samples_in_all += self.samples
        loss = self.loss_sum.item() / (float(self.weight) or 1.0)
        rates = {"samples": self.samples / elapsed}
        if self.counts_tokens:
            rates["tokens"] = float(self.weight) / elapsed
        record = TrainRecord(
            epoch=epoch,
            step=step,
            learning_rate=learning_rate,
            gradient_norm=None if gradient_norm is None else gradient_norm.item(),
            samples_per_second=rates["samples"],
            tokens_per_second=rates.get("tokens"),
            loss=loss,
        )
        self.write(record)
        if self.writes:
            shown = {unit: f"{rate:,.0f} {unit}/s" for unit, rate in rates.items()}
            self.progress.show_step(step, {"loss": f"loss {loss:.4f}", **shown})
        self.loss_sum.zero_()
        self.weight = self.samples = 0
        self.since = self.count_training_seconds()

    def record_evaluation(self, epoch: int, step: int, validation: Evaluation, test: Evaluation) -> None:
        """Write and print the measures of both splits on rank 0. Keeps the main measure in ``epoch_accuracies``."""
        self.epoch_accuracies.append(test.measures[self.main_measure])
        measures = {"validation": validation.measures, "test": test.measures}
        self.write(EvaluationRecord(epoch=epoch, step=step, validation=validation.measures, test=test.measures))
        if self.writes:
            self.progress.print_evaluation(step, measures, self.main_measure)

    def add_warning(self, warning: str) -> None:
        """Keep a warning for the report, and print the warning on rank 0. Ignores an empty warning."""
        if warning:
            self.warnings.append(warning)
            if self.writes:
                self.progress.print_note(warning)

    def seconds_by_activity(self) -> Seconds:
        """Return how many seconds this rank has spent in each activity, and in all.

        ``communication`` is the time that did not overlap with computation. On a GPU, ``data`` includes the waits for
        batches, and ``forward_backward`` the waits for kernels that the host has not launched yet.
        """
        spent = self.clock.seconds
        seconds = {
            "data": sum(spent[name] for name in DATA),
            "forward_backward": spent["forward_backward"] - spent[WAITED],
            "communication": spent["communication"] + spent[WAITED],
            "evaluation": spent["evaluation"],
        }
        total = self.clock.total()
        return Seconds(**seconds, other=total - sum(seconds.values()), total=total)


def rebuild_lost_metrics(metrics: bytes, records: Iterable[StepRecord], epoch: int, step: int) -> bytes:
    """Return the content of metrics.jsonl up to another rank's state, after rank 0 is lost.

    Args:
        metrics: The content of rank 0's metrics.jsonl. Lines that cannot be read are dropped.
        records: The other rank's last records. Records that ``metrics`` lacks are added.
        epoch: Epochs that are done in the other rank's state. Evaluations after this epoch are dropped.
        step: Steps that are done in the other rank's state. Records after this step are dropped.
    """
    lines: list[bytes] = []
    written: set[tuple[object, object]] = set()
    for line in metrics.splitlines():
        for value in parse_records([line]):
            is_later = value.get("step", 0) > step or (value["kind"] == "evaluation" and value["epoch"] > epoch)
            if not is_later:
                lines.append(line)
                written.add((value["kind"], value.get("step")))
    for record in records:
        is_later = record.step > step or (isinstance(record, EvaluationRecord) and record.epoch > epoch)
        if not is_later and (record.kind, record.step) not in written:
            lines.append(format_record(record.to_json_value()))
    return b"".join(line + b"\n" for line in lines)


def describe_waiting_for_data(seconds: Mapping[str, float], hardware: Hardware, loaders: int, *, pictures: bool) -> str:
    """Return advice, as text, if the GPU waited for data in more than a fifth of the steps' time, else "".

    On a CPU, steps are not timed, and the result is "".

    Args:
        seconds: Seconds by activity, from the clock.
        loaders: Processes or threads that load for this rank, or 0.
        pictures: Whether the inputs are images, which decides the advice.
    """
    steps = seconds.get(STEPS, 0.0)
    share = sum(seconds.get(name, 0.0) for name in DATA) / steps if steps else 0.0
    if share <= LONG_WAIT:
        return ""
    waited = f"The GPU waited {100 * share:.0f} % of the training time for data"
    if not loaders:
        return (
            f"{waited}, which the rank loads itself; use a GPU with enough memory for the data, or a larger batch_size."
        )
    cores, each = hardware.threads, ", for each rank" if hardware.num_ranks > 1 else ""
    more = f"FLYTE_DDP_LOADERS={cores - 1}" if loaders < cores - 1 else "more cores"
    less = "smaller stored pictures, or a smaller image_size" if pictures else "or faster functions that load samples"
    return f"{waited}: {loaders} loader process(es) on {cores} core(s){each}; use {more}, {less}."


def gather_arithmetic(hardware: Hardware, device: torch.device) -> Arithmetic:
    """Return what decides this run's rounding: number of ranks, all ranks' devices, and precision. Collective."""
    own = torch.cuda.get_device_name(device) if device.type == "cuda" else str(read_cpu())
    devices = distributed.gather_objects(own)
    return Arithmetic(
        num_ranks=len(devices),
        devices=", ".join(devices if len(set(devices)) > 1 else devices[:1]),
        precision=hardware.precision,
        threads=hardware.threads,
        channels_last="on" if hardware.channels_last else "off",
        strategy=hardware.strategy if len(devices) > 1 else "",
    )
