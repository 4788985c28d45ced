"""Judges a model: evaluates challenger and champion on the same test split, and returns the verdict."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.formatting import format_measure, name_measure
from flyte_ddp.datasets.prepared import open_prepared
from flyte_ddp.datasets.prepared_folder import read_description
from flyte_ddp.export.exporting import Comparison, export_onnx_if_equal
from flyte_ddp.export.graphs import NotExportedError
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.release import checks
from flyte_ddp.release.champion import RETRYABLE, describe_model_error
from flyte_ddp.release.comparison import compare_with_champion
from flyte_ddp.release.evaluation import evaluate_split
from flyte_ddp.release.judgement import (
    Challenge,
    Decision,
    Judgement,
    register_look_and_set_alpha,
    set_challenger_scores,
)
from flyte_ddp.release.policy import OFF, REQUIRED, Policy
from flyte_ddp.release.promotion import REFERENCE, read_stored_sidecar
from flyte_ddp.release.promotion_log import replay_promotions
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.task import has_same_preprocessing
from flyte_ddp.release.verdict import KEPT, NO_COMPARISON, PROMOTED, Verdict


def judge_challenger(
    weights: Path,
    sidecar: Path,
    data: Path,
    registry: Registry,
    policy: Policy,
    *,
    settings: Settings | None = None,
    may_promote: bool = True,
    exports: Path | None = None,
    changes: Sequence[str] = (),
) -> Judgement:
    """Compare a model with the champion, and return the judgement. Without a champion, judges the model alone.

    Promotes and stores nothing. If a check fails, including the check of the ONNX, the champion is kept. Runs the code
    that sidecars name. Prints notes, and tracebacks of errors in the comparison, to stderr.

    Args:
        weights: The challenger's ``model.pt``.
        sidecar: The challenger's ``model.json``.
        data: The folder of a prepared data set.
        registry: The registry of the champion.
        policy: The conditions for a promotion.
        settings: Settings for loading data, by default ``Settings()``.
        may_promote: Whether the verdict may lead to a promotion. If True, the registry counts the look at the test
            split, and an error of the comparison gives the decision NO_COMPARISON. If False, errors are raised.
        exports: The existing folder for an ONNX, or None for no export.
        changes: Notes on the data for the verdict.

    Raises:
        UserError: The challenger, the data or the registry cannot be opened.
        UnreachableError, MemoryError, OutOfMemoryError: The comparison failed, and another try may succeed.
    """
    entry, data_set = registry.read_champion(), open_prepared(data)
    model = SavedModel(weights, sidecar, settings or Settings())
    challenge = Challenge(registry, policy, entry, model, data_set, may_promote)
    verdict = Verdict(
        challenger=model.digest,
        champion=entry.version if entry else "",
        best=entry.best if entry else "",
        log_number=entry.number if entry else 0,
        test_digest=read_description(data).test_digest,
        measure=model.objective.main_measure,
        changes=[*changes],
        time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    )
    judgement = Judgement(model, data_set, verdict)
    try:
        decision = find_decision_of_log(challenge) if may_promote else None
        verdict.decision, verdict.reason = decision or evaluate_and_decide(challenge, judgement)
    except RETRYABLE:
        raise
    except Exception as error:
        if not may_promote:
            raise
        verdict.decision, verdict.reason = NO_COMPARISON, describe_model_error(error)
    if exports is not None:
        export_challenger(challenge, judgement, exports)
    failures = [check.reason for check in verdict.checks if not check.passed]
    if verdict.promotes and failures:
        verdict.decision, verdict.reason = KEPT, "; ".join(failures)
    return judgement


def find_decision_of_log(challenge: Challenge) -> Decision | None:
    """Return the decision if the log alone decides, or None if the models must be evaluated.

    The log decides about the champion's weights, and about versions that a person rolled back. Raises UserError if the
    registry cannot be read.
    """
    registry, entry, model = challenge.registry, challenge.entry, challenge.model
    if entry is None:
        return None
    if entry.version == model.digest:
        stored = read_stored_sidecar(registry, registry.read_version(entry.version, entry.manifest))
        if has_same_preprocessing(model.sidecar, stored):
            return KEPT, "this model has the champion's weights"
        fix = "train with another seed"
        return NO_COMPARISON, f"this model has the champion's weights and other preprocessing; {fix}"
    # Only a stored version can have been rolled back, so the whole log is read only for stored versions.
    if registry.find_version(model.digest):
        _, taken_back = replay_promotions(registry.read_log())
        if back := taken_back.get(model.digest):
            return KEPT, f"{back.by} rolled this version back ({back.reason}); only a person can promote it again"
    return None


def evaluate_and_decide(challenge: Challenge, judgement: Judgement) -> Decision:
    """Evaluate the challenger, and the champion if there is one, and return the decision.

    The decision ignores Checks, which may still turn PROMOTED into KEPT. Fills the judgement with evaluations, and the
    verdict with Checks, scores and the best version. May count a look at the test split. Prints the progress.
    """
    policy, entry, model, verdict = challenge.policy, challenge.entry, challenge.model, judgement.verdict
    challenge.print_note(f"evaluating version {model.digest[:12]} on the test split")
    ours = evaluate_split(model, challenge.data, for_monitoring=challenge.may_promote)
    judgement.full_evaluation = judgement.challenger = ours
    if ours.monitoring_error is not None:
        reason = describe_model_error(ours.monitoring_error)
        challenge.print_note(f"the version gets no {REFERENCE}, so monitor_wf cannot monitor the version: {reason}")
    set_challenger_scores(verdict, ours)
    finite = checks.judge_finite_outputs(ours)
    verdict.checks.append(finite)
    if not finite.passed:
        return KEPT, finite.reason
    if entry is None:
        above = checks.judge_above_constant(ours, register_look_and_set_alpha(challenge, verdict))
        verdict.checks += [checks.judge_min_score(ours, policy), above]
        verdict.best = model.digest
        return PROMOTED, f"there is no champion yet, and {above.reason or f'the model is {above.name}'}"
    if entry.version == model.digest:
        verdict.checks.append(checks.judge_min_score(ours, policy))
        measure = ours.objective.main_measure
        return KEPT, f"this model is the champion, with {name_measure(measure)} {format_measure(measure, ours.score)}"
    version = entry.version[:12]
    challenge.print_note(f"evaluating the champion, version {version}, and comparing {ours.samples:,} scores")
    return compare_with_champion(challenge, judgement, ours, entry)


def export_challenger(challenge: Challenge, judgement: Judgement, folder: Path) -> None:
    """Export the challenger as ONNX into an existing folder, and add the Check of the ONNX to the verdict.

    Does nothing if the policy turns exports off, or if the challenger was not evaluated or has outputs that are not
    finite. A failed export gives a Check, and no exception.

    Raises:
        UnreachableError: The storage of the test split does not answer.
    """
    policy, evaluated = challenge.policy, judgement.challenger
    if evaluated is None or not evaluated.finite.all() or policy.export == OFF:
        return
    challenge.print_note(f"exporting the challenger, and comparing ONNX with torch on {evaluated.samples:,} samples")
    try:
        found: Comparison | str = export_onnx_if_equal(challenge.model, challenge.data, folder)
    except NotExportedError as error:
        found = str(error)
    judgement.verdict.checks.append(checks.judge_export(found, required=policy.export == REQUIRED))
