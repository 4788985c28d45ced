"""Successive halving: each rung trains trials for a part of their steps, and the best third enters the next rung.

A trial is an ordinary run, which stops at each rung, and resumes from a checkpoint.
"""

# No "from __future__ import annotations" here: flytekit derives the types of tasks from real types.
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, List, Optional  # noqa: UP035

from dataclasses_json import DataClassJsonMixin

from flyte_ddp import storage
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.checks.parsing import parse_json
from flyte_ddp.core.checks.records import Count, JsonRecord
from flyte_ddp.core.errors import BusyError, OutOfMemoryError, RankError, UnreachableError, UserError
from flyte_ddp.core.runs.metrics import RungResult
from flyte_ddp.core.runs.run_folder import RUNG, UNFINISHED, is_finished
from flyte_ddp.core.text.formatting import format_measure, name_measure
from flyte_ddp.plans.identity import run_name
from flyte_ddp.pods.paths import resolve_folder
from flyte_ddp.report.report import Run
from flyte_ddp.storage import MissingError, UnavailableError
from flyte_ddp.sweep.space import ETA, Sweep, draw_trials


@dataclass(frozen=True)
class RungProgress(JsonRecord):
    """The results of a trial at the end of a rung, as stored in a file."""

    step: Count  # steps that are done
    steps: Count  # of the whole run
    value: float  # of select_by on the validation split
    higher: bool  # whether higher values are better
    curve: list[list[float]]  # each evaluation's step and value
    seconds: float = 0.0  # that this rung took


@dataclass(frozen=True)
class TrialResult(DataClassJsonMixin):
    """A trial in a rung: the training to do, and later the results."""

    trial: int  # its number, from 0
    hp: Hyperparameters
    run: str  # name of the run
    steps_divisor: int  # the rung ends after 1 / steps_divisor of the run's steps
    step: int = 0  # steps that are done
    steps: int = 0  # of the whole run
    value: Optional[float] = None  # noqa: UP045  # of select_by on the validation split; None: failed
    higher: bool = False  # whether higher values are better
    failed: str = ""  # why
    seconds: float = 0.0  # that this rung took
    curve: List[List[float]] = field(default_factory=list)  # noqa: UP006  # each evaluation's step and value

    @property
    def loss(self) -> float | None:
        """The value with a sign for which less is better, or None for a failed trial."""
        return self.value if self.value is None or not self.higher else -self.value


def plan_rung(sweep: Sweep, base: Hyperparameters, data_version: str, done: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the next trials to train after the trials ``done``, or [] if the last rung is done.

    With tpe, the first rung comes in groups of up to nine trials. If the sweep draws fewer trials than requested,
    prints the reason.

    Args:
        sweep: The settings of the sweep.
        base: The hyperparameters that are not varied.
        data_version: The version of the data, as check_and_identify_run returns it.
        done: The results of all trials of all earlier calls, in the same order, with failed trials.

    Raises:
        UserError: All trials of a rung have failed, or the hyperparameters' rules reject all trials.
    """
    parts, fingerprint = sweep.list_divisors(), data_version.partition("@")[0].removeprefix("datasets/")
    first = [each for each in done if each.steps_divisor == parts[0]]
    drawn = draw_trials(sweep, base, {each.hp: each.loss for each in first})
    if new := drawn[len(first) :]:
        if not sweep.is_adaptive() and (missing := sweep.describe_missing_trials(len(drawn))):
            print(missing, flush=True)
        return [
            TrialResult(number, hp, run_name(hp, fingerprint), parts[0]) for number, hp in enumerate(new, len(first))
        ]
    for steps_divisor, following in pairwise(parts):
        results = [each for each in done if each.steps_divisor == steps_divisor]
        if not any(each.steps_divisor == following for each in done):
            best = rank_trials(results)[: max(1, len(results) // ETA)]
            return [TrialResult(each.trial, each.hp, each.run, following) for each in best]
    return []


def rank_trials(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the results of a rung without failed trials, best first. Raises UserError if all trials have failed.

    Equal values are ordered by the number of the trial. At least one result is needed.
    """
    ranked = sorted((each for each in results if each.value is not None), key=lambda each: (each.loss, each.trial))
    if not ranked:
        [(reason, count)] = Counter(each.failed for each in results).most_common(1)
        share = describe_share(results[0].steps_divisor)
        raise UserError(f"no trial has reached {share} of its steps: {count} of {len(results)} failed with: {reason}")
    return ranked


def describe_share(steps_divisor: int) -> str:
    return f"1/{steps_divisor}" if steps_divisor > 1 else "all"


def pick_winner(done: Sequence[TrialResult]) -> TrialResult:
    """Return the best result among the trials that were trained to the end. Raises UserError if all have failed."""
    return rank_trials([each for each in done if each.steps_divisor == 1])[0]


def run_rung(trial: TrialResult, results: str, train: Callable[[Path], object]) -> TrialResult:
    """Train a trial up to the end of its rung by ``train(folder)``, and return the trial with results.

    Reads the results if the folder or address ``results`` already has them, and trains nothing. Otherwise prints the
    results, and writes them to ``results`` unless the trial failed. A trial fails by a UserError, by an error of the
    user's code, or when memory runs out. The returned trial then has the reason, and no exception is raised.

    Raises:
        UnreachableError, BusyError: Something cannot be reached, or another process trains the run.
        RankError: The machine failed, and a retry may succeed.
        UserError: The results cannot be read or written.
    """
    address, start = storage.join_address(results, f"{trial.run}/{trial.steps_divisor}.json"), time.monotonic()
    with suppress(MissingError):
        return replace(trial, **vars(parse_progress(access_storage(address, storage.read_file), address)))
    try:
        progress = train_to_rung(trial, train)
    except (UnreachableError, BusyError):
        raise
    except (UserError, RankError) as error:
        if isinstance(error, RankError) and error.recoverable and not isinstance(error, OutOfMemoryError):
            raise
        result = replace(trial, failed=error.message, seconds=time.monotonic() - start)
    else:
        progress = replace(progress, seconds=time.monotonic() - start)
        content = json.dumps(progress.to_json_value()).encode()
        access_storage(address, lambda to: storage.write_file(to, content))
        result = replace(trial, **vars(progress))
    measure = trial.hp.select_by
    outcome = result.failed or f"validation {name_measure(measure)} {format_measure(measure, result.value)}"
    text = f"trial {trial.trial}, {describe_share(trial.steps_divisor)} of its steps: {outcome}"
    print(text.replace("\N{NO-BREAK SPACE}", " "), flush=True)
    return result


def parse_progress(content: bytes, address: str) -> RungProgress:
    """Parse the content of a file with a rung's results. Raises UserError with the ``address`` if damaged."""
    where = f"{address} is damaged; delete the file to train this trial again"
    try:
        return RungProgress.from_json_value(parse_json(content), where)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def access_storage(address: str, action: Callable[[str], Any]) -> Any:
    """Return ``action(address)``, called up to 4 times with pauses of some seconds if the storage does not answer.

    Raises:
        MissingError: The file is missing.
        UserError: The address cannot be read or written.
    """
    try:
        return storage.call_with_retries(address, action)
    except MissingError:
        raise
    except UnavailableError as failure:
        raise failure.to_user_error(
            f"cannot access the sweep's results in {address}: {failure}; allow pods to read and write there"
        ) from None


def train_to_rung(trial: TrialResult, train: Callable[[Path], object]) -> RungProgress:
    """Train a trial up to the end of its rung, and return the results.

    ``train(folder)`` must stop at the end of the rung. If the run is already past the rung, the value at the rung is
    lost. The trial is then trained again in another folder, which is deleted afterwards.

    Raises:
        UserError: The value is not finite.
    """
    again = f"{trial.run}-{trial.steps_divisor}"
    for name in (trial.run, again):
        folder = resolve_folder(name)
        if not is_finished(folder):
            train(folder)
        progress = read_run_progress(folder, trial.hp)
        if progress.step <= -(-progress.steps // trial.steps_divisor):
            break
    shutil.rmtree(resolve_folder(again), ignore_errors=True)
    if math.isnan(progress.value):
        raise UserError(f"{trial.hp.select_by} is not a finite number on the validation split")
    return progress


def read_run_progress(folder: Path, hp: Hyperparameters) -> RungProgress:
    """Return the results of a run that has stopped at the end of a rung, or is finished.

    A value that is not finite becomes NaN. Raises UserError if a file of the run is damaged.
    """
    finished = is_finished(folder)
    run = Run(folder if finished else folder / UNFINISHED)
    curve = {each.step: each.validation.get(hp.select_by) for each in run.evaluations}
    step, value = run.steps, run.kept_evaluation.validation.get(hp.select_by) if run.kept_evaluation else None
    if not finished:
        path = folder / UNFINISHED / RUNG
        result = RungResult.from_json_value(parse_json(path.read_bytes()), f"{path} is damaged")
        step, value = result.step, result.value
        curve.setdefault(step, value)
    return RungProgress(
        step=step,
        steps=run.start.steps,
        value=math.nan if value is None else value,
        higher=run.measures.get(hp.select_by) == "higher",
        curve=[[at, each] for at, each in curve.items() if each is not None],
    )
