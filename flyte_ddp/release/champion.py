"""Evaluates stored versions like the challenger, and checks that the champion is the same as at its release."""

import tempfile
import traceback
from pathlib import Path

import torch

from flyte_ddp.core.errors import UnreachableError, UserError
from flyte_ddp.datasets.prepared_set import PreparedSet
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.release import checks
from flyte_ddp.release.evaluation import Evaluation, evaluate_split
from flyte_ddp.release.promotion import download_version
from flyte_ddp.release.registry import Registry, Version
from flyte_ddp.release.samples import SAMPLES, Digests, JudgedSamples, match_samples, rate_answers
from flyte_ddp.release.scores import is_higher_better
from flyte_ddp.release.task import Task
from flyte_ddp.release.verdict import Check, Verdict

RETRYABLE = (UnreachableError, MemoryError, torch.OutOfMemoryError)  # no fault of a model: another try may succeed


def evaluate_stored_version(
    registry: Registry, name: str, manifest: str, challenger: SavedModel, data: PreparedSet
) -> tuple[SavedModel, Evaluation | None]:
    """Download a version, run the version's code on the test split, and return the model and the evaluation.

    The challenger's objective scores the version, with the version's decision threshold. If the classes have another
    order than the challenger's, the outputs are reordered, and the threshold is mirrored. If the version's task differs
    from the challenger's, the evaluation is None. If the version's code raises another error than UserError, prints the
    traceback to stderr.

    Args:
        registry: The registry with the version.
        name: The version's name.
        manifest: The SHA-256 of a revision's manifest, or "" for the newest revision.
        challenger: The model with which the version is compared.
        data: The data set with the test split.

    Raises:
        UserError: The version cannot be evaluated, or an output is not finite.
        UnreachableError, MemoryError, OutOfMemoryError: Another try may succeed.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = download_version(registry, name, Path(folder), manifest)
            model = SavedModel(*files, challenger.settings, challenger.bad_samples)
        if not checks.judge_same_task(Task.from_sidecar(challenger.sidecar), Task.from_sidecar(model.sidecar)).passed:
            return model, None
        threshold = model.objective.facts.threshold
        if model.classes != challenger.classes:
            model.set_class_order(challenger.classes)
            threshold = None if threshold is None else 1 - threshold  # of the other class's probability
        model.objective = challenger.objective.with_threshold(threshold)
        found = evaluate_split(model, data)
        found.scores  # noqa: B018  (computed here, where errors of user-defined code are caught)
    except RETRYABLE:
        raise
    except Exception as error:
        raise UserError(f"version {name[:12]} cannot be evaluated: {describe_model_error(error)}") from error
    if not found.finite.all():
        raise UserError(f"version {name[:12]} cannot be evaluated: its outputs contain NaN or infinity")
    return model, found


def describe_model_error(error: Exception) -> str:
    """Return an error as text. Prints the traceback to stderr unless the error is a UserError."""
    if isinstance(error, UserError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def read_judged_samples(registry: Registry, version: Version) -> JudgedSamples | None:
    """Return the samples that a version was trained and judged on, or None if the version does not store samples.

    Raises UserError if the file is missing or was altered.
    """
    if SAMPLES not in version.files:
        return None
    return JudgedSamples.read(registry.read_version_file(version, SAMPLES))


def judge_champion_unchanged(
    today: Evaluation, released: Verdict, judged: JudgedSamples | None, digests: Digests
) -> list[Check]:
    """Return the Checks that the champion still answers as at its release.

    The first Check compares the answers on samples that both test splits have. The second Check compares the champion
    with the best constant answer. A Check is omitted if the answers at the release, or a constant answer, are unknown.

    Args:
        today: The evaluation of the champion today.
        released: The verdict of the champion's release, or an empty Verdict.
        judged: The samples of the release with the champion's answers, or None if unknown.
        digests: The identifying numbers of today's test samples.
    """
    found = []
    if judged is not None:
        then, now = match_samples(judged.tested, digests)
        answers = judged.answers[then], rate_answers(today)[now]
        found.append(checks.judge_repeated_answers(*answers, classifies=today.classifies))
    sign = 1 if is_higher_better(today.objective) else -1
    was_above = any(check.passed for check in released.checks if check.name == checks.ABOVE_CONSTANT)
    if released.has_score_of(today.objective.main_measure) and released.constant_score is not None:
        was_above = sign * released.challenger_score > sign * released.constant_score
    if (above := checks.judge_champion_above_constant(today, was_above=was_above)) is not None:
        found.append(above)
    return found
