"""Successive halving: each rung trains trials for a part of their steps, and the best third enters the next rung.

A trial is an ordinary run, which stops at each rung, and resumes from a checkpoint.
"""

# No "from __future__ import annotations" here: flytekit derives the types of tasks from real types.
import json
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
from flyte_ddp.errors import BusyError, OutOfMemoryError, RankError, UnreachableError, UserError
from flyte_ddp.pods.paths import resolve_folder
from flyte_ddp.report.report import Run
from flyte_ddp.runs.identity import run_name
from flyte_ddp.runs.run_folder import RUNG, UNFINISHED, is_finished
from flyte_ddp.storage import MissingError, UnavailableError
from flyte_ddp.sweep.space import ETA, Sweep, draw_trials
from flyte_ddp.text.formatting import format_measure, name_measure


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

    A sampler that learns from results (tpe) gives the first rung in waves of up to nine trials. If the sweep draws
    fewer trials than requested, prints the reason.

    Args:
        base: The hyperparameters that are not varied.
        data_version: The version of the data, as check_and_identify_run returns it.
        done: The results of all trials of all earlier calls, in the same order, with failed trials.

    Raises:
        UserError: All trials of a rung have failed, or the hyperparameters' rules reject all trials.
    """
    parts, fingerprint = sweep.list_parts(), data_version.partition("@")[0].removeprefix("datasets/")
    first = [rung for rung in done if rung.steps_divisor == parts[0]]
    drawn = draw_trials(sweep, base, {rung.hp: rung.loss for rung in first})
    if new := drawn[len(first) :]:
        if not sweep.is_adaptive() and (missing := sweep.describe_missing_trials(len(drawn))):
            print(missing, flush=True)
        return [
            TrialResult(number, hp, run_name(hp, fingerprint), parts[0]) for number, hp in enumerate(new, len(first))
        ]
    for steps_divisor, following in pairwise(parts):
        rungs = [rung for rung in done if rung.steps_divisor == steps_divisor]
        if not any(rung.steps_divisor == following for rung in done):
            best = rank_trials(rungs)[: max(1, len(rungs) // ETA)]
            return [TrialResult(rung.trial, rung.hp, rung.run, following) for rung in best]
    return []


def rank_trials(rungs: Sequence[TrialResult]) -> list[TrialResult]:
    """Return a rung's trials without failed trials, best first. Raises UserError if all trials have failed.

    Equal values are ordered by the number of the trial. ``rungs`` are the results of a rung, at least one.
    """
    ranked = sorted((rung for rung in rungs if rung.value is not None), key=lambda rung: (rung.loss, rung.trial))
    if not ranked:
        [(reason, count)] = Counter(rung.failed for rung in rungs).most_common(1)
        share = name_part(rungs[0].steps_divisor)
        raise UserError(f"no trial has reached {share} of its steps: {count} of {len(rungs)} failed with: {reason}")
    return ranked


def name_part(steps_divisor: int) -> str:
    return f"1/{steps_divisor}" if steps_divisor > 1 else "all"


def pick_winner(done: Sequence[TrialResult]) -> TrialResult:
    return rank_trials([rung for rung in done if rung.steps_divisor == 1])[0]


def run_rung(rung: TrialResult, results: str, train: Callable[[Path], object]) -> TrialResult:
    """Train a trial up to the end of its rung by ``train(folder)``, and return the trial with results.

    If the folder or address ``results`` has the trial's results, nothing is trained. Otherwise the results are printed,
    and stored there unless the trial failed. A trial fails by an error of the user or of the user's code, or when
    memory runs out. Then the result has the reason, and no exception is raised.

    Raises:
        UnreachableError, BusyError: Something cannot be reached, or another process trains the run.
        RankError: The machine failed, and a retry may succeed.
        UserError: The results cannot be read or written.
    """
    address, start = storage.join(results, f"{rung.run}/{rung.steps_divisor}.json"), time.monotonic()
    with suppress(MissingError):
        return replace(rung, **json.loads(access_result(address, storage.read_file)))
    try:
        found = reach_rung(rung, train)
    except (UnreachableError, BusyError):
        raise
    except (UserError, RankError) as error:
        if isinstance(error, RankError) and error.recoverable and not isinstance(error, OutOfMemoryError):
            raise
        found = {"failed": error.message}
    found["seconds"] = time.monotonic() - start
    if not (outcome := found.get("failed")):
        access_result(address, lambda to: storage.write_file(to, json.dumps(found).encode()))
        measure = rung.hp.select_by
        outcome = f"validation {name_measure(measure)} {format_measure(measure, found['value'])}"
    said = f"trial {rung.trial}, {name_part(rung.steps_divisor)} of its steps: {outcome}"
    print(said.replace("\N{NO-BREAK SPACE}", " "), flush=True)
    return replace(rung, **found)


def access_result(address: str, action: Callable[[str], Any]) -> Any:
    """Return ``action(address)``, called up to 4 times with pauses of some seconds.

    Raises:
        MissingError: The file is missing.
        UserError: The address cannot be read or written.
    """
    try:
        return storage.retry(address, action)
    except MissingError:
        raise
    except UnavailableError as failure:
        raise failure.to_user_error(
            f"cannot access the sweep's results in {address}: {failure}; allow pods to read and write there"
        ) from None


def reach_rung(rung: TrialResult, train: Callable[[Path], object]) -> dict[str, Any]:
    """Train a trial up to the end of its rung, and return the results by names of TrialResult's fields.

    ``train(folder)`` must stop at the end of the rung. If the run has already passed the rung, trains once more
    under the name ``<run>-<steps_divisor>``. The value at the rung is needed, not a later value. Afterwards the folder
    of this second run is deleted. Raises UserError if the value is not finite.
    """
    again = f"{rung.run}-{rung.steps_divisor}"
    for name in (rung.run, again):
        folder = resolve_folder(name)
        if not is_finished(folder):
            train(folder)
        found = read_rung(folder, rung.hp)
        if found["step"] <= -(-found["steps"] // rung.steps_divisor):
            break
    shutil.rmtree(resolve_folder(again), ignore_errors=True)
    if found["value"] is None:
        raise UserError(f"{rung.hp.select_by} is not a finite number on the validation split")
    return found


def read_rung(folder: Path, hp: Hyperparameters) -> dict[str, Any]:
    """Return a TrialResult's fields from the folder of a run that is at the end of a rung, or finished.

    The fields are step, steps, value, higher and curve. The value is None if it is not finite. Raises UserError if a
    file of the run is damaged.
    """
    name, finished = f"validation_{hp.select_by}", is_finished(folder)
    run = Run(folder if finished else folder / UNFINISHED)
    curve = {each["step"]: each.get(name) for each in run.evaluations}
    step, value = run.steps, run.kept_evaluation.get(name)
    if not finished:
        step, value = json.loads((folder / UNFINISHED / RUNG).read_bytes()).values()
        curve.setdefault(step, value)
    return {
        "step": step,
        "steps": run.start["steps"],
        "value": value,
        "higher": run.measures.get(hp.select_by) == "higher",
        "curve": [[at, each] for at, each in curve.items() if each is not None],
    }
