"""Judges a model: evaluates challenger and champion on the same test split, and returns a verdict."""

import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.core.errors import UnreachableError, UserError
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.formatting import format_count, format_measure, name_measure
from flyte_ddp.datasets.prepared import open_prepared
from flyte_ddp.datasets.prepared_folder import TEST_DIGEST, read_description
from flyte_ddp.datasets.prepared_set import PreparedSet
from flyte_ddp.export.exporting import Comparison, export_model
from flyte_ddp.export.graphs import NotExportedError
from flyte_ddp.objectives import Multilabel
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.release import checks, statistics
from flyte_ddp.release.evaluation import Evaluation, evaluate_split
from flyte_ddp.release.policy import LEAVE_OUT, NOT_WORSE, OFF, REQUIRED, Policy
from flyte_ddp.release.promotion import REFERENCE, download_version, read_stored_sidecar, read_verdict
from flyte_ddp.release.registry import Entry, Registry, replay_promotions
from flyte_ddp.release.samples import (
    SAMPLES,
    Digests,
    JudgedSamples,
    answer_qualities,
    match_once,
)
from flyte_ddp.release.scores import is_higher_better
from flyte_ddp.release.slices import group_by_slice
from flyte_ddp.release.task import Task, has_same_fit
from flyte_ddp.release.verdict import KEPT, NO_COMPARISON, PROMOTED, Check, Verdict

NOT_THE_MODELS = (UnreachableError, MemoryError, torch.OutOfMemoryError)  # another try may succeed

BEST = "best version ever"

Decision = tuple[str, str]  # PROMOTED, KEPT or NO_COMPARISON, and the reason; a failed Check makes PROMOTED KEPT


@dataclass
class Judgement:
    """The models and data of a judgement, the evaluations so far, and the verdict."""

    registry: Registry
    policy: Policy
    before: Entry | None  # the registry's last entry; None if there is no champion
    model: SavedModel  # the challenger
    split: PreparedSet
    may_promote: bool  # whether the verdict may lead to a promotion
    verdict: Verdict
    whole: Evaluation | None = None  # the challenger on all test samples; None if the verdict did not need it
    challenger: Evaluation | None = None  # the same, without samples that the champion was trained on
    champion: Evaluation | None = None  # None if nothing was compared
    parts: dict[str, list[Check]] = field(default_factory=dict)  # by "class", "label" or "slice": a Check for each part

    @cached_property
    def tested(self) -> Digests:
        """An identifying number for each evaluated test sample. Empty if the samples are not identified."""
        assert self.whole is not None
        return self.split.identify_tested(self.whole.ids)

    def identify_samples(self) -> JudgedSamples:
        """Return identifying numbers of training and test samples, with the challenger's answers on the test samples.

        Call this after the challenger was evaluated.
        """
        assert self.whole is not None
        return JudgedSamples(self.split.identify_samples("train"), self.tested, answer_qualities(self.whole))

    def tell(self, text: str) -> None:
        Progress(self.model.settings.progress).print_note(f"judging: {text}")

    def claim_alpha(self) -> float:
        """Return this judgement's significance level, a share of the policy's alpha, and add the level to the verdict.

        If the judgement may promote, the registry counts the judgement as a look at the test split. Then the number of
        the look is also added to the verdict. Otherwise the level is the first look's.
        """
        verdict, policy = self.verdict, self.policy
        if self.may_promote:
            margin = f" {policy.margin!r}" if policy.rule == NOT_WORSE else ""
            rule = f"{policy.rule}{margin} {policy.alpha!r}"
            champion = verdict.champion or "none"
            verdict.look = self.registry.claim_look(verdict.test_digest, verdict.challenger, champion, rule)
        verdict.alpha = statistics.alpha_of_look(policy.alpha, max(1, verdict.look))
        return verdict.alpha

    def export(self, folder: Path) -> None:
        """Export the challenger into an existing folder, and add the Check of the ONNX to the verdict.

        Does nothing if the policy turns exports off, or if the challenger was not evaluated or has outputs that are not
        finite. A failed export gives a Check, but raises UnreachableError if the storage of the test split does not
        answer.
        """
        if self.challenger is None or not self.challenger.finite.all() or self.policy.export == OFF:
            return
        self.tell(f"exporting the challenger, and comparing ONNX with torch on {self.challenger.samples:,} samples")
        try:
            found: Comparison | str = export_model(self.model, self.split, folder)
        except NotExportedError as error:
            found = str(error)
        self.verdict.checks.append(checks.check_export(found, required=self.policy.export == REQUIRED))


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
    before, split = registry.read_champion(), open_prepared(data)
    model = SavedModel(weights, sidecar, settings or Settings())
    verdict = Verdict(
        challenger=model.digest,
        champion=before.version if before else "",
        best=before.best if before else "",
        log_number=before.number if before else 0,
        test_digest=str(read_description(data)[TEST_DIGEST]),
        measure=model.objective.main_measure,
        changes=[*changes],
        time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    )
    judgement = Judgement(registry, policy, before, model, split, may_promote, verdict)
    try:
        verdict.decision, verdict.reason = decide_promotion(judgement)
    except NOT_THE_MODELS:
        raise
    except Exception as error:
        if not may_promote:
            raise
        verdict.decision, verdict.reason = NO_COMPARISON, describe_model_error(error)
    if exports is not None:
        judgement.export(exports)
    failures = [check.reason for check in verdict.checks if not check.passed]
    if verdict.promotes and failures:
        verdict.decision, verdict.reason = KEPT, "; ".join(failures)
    return judgement


def decide_promotion(judgement: Judgement) -> Decision:
    """Evaluate the models as far as needed, add Checks and scores to the verdict, and return the decision.

    The decision ignores Checks, which may still turn PROMOTED into KEPT. Sets the evaluations of the judgement, and the
    best version of the verdict. May count a look at the test split.
    """
    registry, policy, before, model = judgement.registry, judgement.policy, judgement.before, judgement.model
    verdict, unchanged = judgement.verdict, (KEPT, "this model has the champion's weights")
    is_champion = verdict.champion == model.digest
    if judgement.may_promote and is_champion and before is not None:
        same = has_same_fit(
            model.sidecar, read_stored_sidecar(registry, registry.read_version(before.version, before.manifest))
        )
        other = (
            NO_COMPARISON,
            "this model has the champion's weights and other preprocessing; train with another seed",
        )
        return unchanged if same else other
    # Only a stored version can have been rolled back, so the whole log is read only for stored versions.
    if judgement.may_promote and before is not None and registry.find_version(model.digest):
        _, taken_back = replay_promotions(registry.read_log())
        if back := taken_back.get(model.digest):
            return KEPT, f"{back.by} rolled this version back ({back.reason}); only a person can promote it again"
    judgement.tell(f"evaluating version {model.digest[:12]} on the test split")
    ours = judgement.whole = judgement.challenger = evaluate_split(
        model, judgement.split, describe=judgement.may_promote
    )
    if ours.undescribed is not None:
        reason = describe_model_error(ours.undescribed)
        judgement.tell(f"the version gets no {REFERENCE}, so monitor_wf cannot monitor the version: {reason}")
    note_scores(verdict, ours)
    finite = checks.check_finite_outputs(ours)
    verdict.checks.append(finite)
    if not finite.passed:
        return KEPT, finite.reason
    if before is None:
        above = checks.check_above_constant(ours, judgement.claim_alpha())
        verdict.checks += [checks.check_score(ours, policy), above]
        verdict.best = model.digest
        return PROMOTED, f"there is no champion yet, and {above.reason or f'the model is {above.name}'}"
    if is_champion:
        verdict.checks.append(checks.check_score(ours, policy))
        measure = ours.objective.main_measure
        return KEPT, f"this model is the champion, with {name_measure(measure)} {format_measure(measure, ours.score)}"
    judgement.tell(f"evaluating the champion, version {before.version[:12]}, and comparing {ours.samples:,} scores")
    return compare_with_champion(judgement, ours, before)


def note_scores(verdict: Verdict, ours: Evaluation) -> None:
    """Write number of samples, the challenger's score and the constant answer's score into the verdict."""
    verdict.samples, verdict.challenger_score = ours.samples, ours.score
    compared = checks.compare_with_constant(ours) if ours.finite.all() else None
    verdict.constant_score = compared[2] if compared else None


def compare_with_champion(judgement: Judgement, ours: Evaluation, before: Entry) -> Decision:
    """Compare the challenger with the champion, add the Checks to the verdict, and return the decision.

    Under NOT_WORSE the challenger is also compared with the best version. Test samples that the champion was trained on
    may be removed. Counts a look at the test split, and sets the best version of the verdict.

    Args:
        judgement: The judgement, whose evaluations are replaced if samples are removed.
        ours: The challenger's evaluation.
        before: The log's entry of the champion.

    Raises:
        UserError: A stored version cannot be evaluated or has other targets, or too few samples are left.
    """
    policy, model, verdict = judgement.policy, judgement.model, judgement.verdict
    champion, theirs = evaluate_stored(judgement, before.version, before.manifest)
    same = checks.check_same_task(Task.from_sidecar(model.sidecar), Task.from_sidecar(champion.sidecar))
    verdict.checks.append(same)
    if theirs is None:
        return KEPT, same.reason
    mine, own = (found.columns.get("truth") for found in (ours, theirs))
    if mine is not None and own is not None and not np.array_equal(mine, own, equal_nan=True):
        raise UserError("`sample` or `collate` of the champion and of the challenger return different targets")
    judgement.champion = theirs
    judged = read_judged(registry := judgement.registry, before.version, before.manifest)
    if problem := question_champion(judgement, champion, theirs, before, judged):
        return NO_COMPARISON, problem
    others: Mapping[str, Evaluation] = {"champion": theirs}
    known = [judged]
    if policy.rule == NOT_WORSE and verdict.best not in (champion.digest, model.digest):
        _, best = evaluate_stored(judgement, verdict.best)
        assert best is not None  # a person who promotes a model of another task makes it the best
        others, known = {**others, BEST: best}, [judged, read_judged(registry, verdict.best)]
    slices = group_by_slice(policy.slices, ours.ids, ours.undecoded) if policy.slices else {}
    ours, others = remove_seen_samples(judgement, ours, others, [each for each in known if each is not None])
    slices = {name: np.flatnonzero(np.isin(ours.places, places)) for name, places in slices.items()}
    theirs = others["champion"]
    comparisons = {name: checks.compare_evaluations(ours, other) for name, other in others.items()}
    verdict.checks.append(checks.check_score(ours, policy))
    differences = comparisons["champion"]
    if not np.any(differences.values):
        return KEPT, "both models have the same score on each sample"
    alpha = judgement.claim_alpha()
    if policy.rule == NOT_WORSE:
        decisive = [checks.check_not_worse(name, comparisons[name], policy.margin, alpha) for name in comparisons]
    else:
        decisive = [checks.check_superior(differences, alpha)]
    verdict.checks += decisive
    add_vetoes(judgement, ours, theirs, slices)
    sign = 1 if is_higher_better(model.objective) else -1
    # A best version that was not evaluated stays the best, because otherwise small losses would add up.
    compared = policy.rule == NOT_WORSE or verdict.best in (champion.digest, model.digest)
    if compared and all(sign * ours.score > sign * other.score for other in others.values()):
        verdict.best = model.digest
    return PROMOTED, decisive[0].reason


def read_judged(registry: Registry, name: str, manifest: str = "") -> JudgedSamples | None:
    """Return the samples that a version was trained and judged on, or None if the version does not store samples.

    ``name`` is the version's name. ``manifest`` selects a revision by the SHA-256 of its manifest, by default the
    newest. Raises UserError if the version is missing or was altered.
    """
    version = registry.read_version(name, manifest)
    kept = SAMPLES in version.files
    return JudgedSamples.read(registry.read_version_file(version, SAMPLES)) if kept else None


def question_champion(
    judgement: Judgement, champion: SavedModel, theirs: Evaluation, before: Entry, judged: JudgedSamples | None
) -> str:
    """Return why the champion's answers today cannot be the released model's, or "" if nothing is wrong.

    Adds the Checks, and the champion's scores today and at the release, to the verdict. If the judgement may not
    promote, the Checks always pass.

    Args:
        judgement: The judgement, with the challenger.
        theirs: The champion's evaluation today.
        before: The log's entry of the champion.
        judged: The samples and answers of the champion's release, or None if unknown.
    """
    registry, verdict = judgement.registry, judgement.verdict
    version = registry.read_version(before.version, before.manifest)
    released = read_verdict(registry, version) or Verdict()
    verdict.champion_score, known = theirs.score, released.measure == verdict.measure and released.samples > 0
    if known:
        verdict.champion_at_release = released.challenger_score
    added, weights = list[Check | None](), [model.sidecar.class_weights for model in (champion, judgement.model)]
    if judged is not None and (theirs.classifies or weights[0] == weights[1]):
        then, now = match_once(judged.tested, judgement.tested)
        answers = judged.answers[then], answer_qualities(theirs)[now]
        added.append(checks.check_repeated_answers(*answers, classifies=theirs.classifies))
    sign = 1 if is_higher_better(theirs.objective) else -1
    constant = released.constant_score if known else None
    above = [check.passed for check in released.checks if check.name == checks.ABOVE_CONSTANT]
    was_above = any(above) if constant is None else sign * released.challenger_score > sign * constant
    added.append(checks.check_champion_above_constant(theirs, was_above=was_above))
    shown = [check for check in added if check is not None]
    if not judgement.may_promote:  # other data may have the same ids by chance
        shown = [replace(check, passed=True, rule="") for check in shown]
    verdict.checks += shown
    reasons = [check.reason for check in shown if not check.passed]
    fix = ["find out what changed (the id of a sample must stay the same), or promote by hand"]
    return "; ".join(reasons + fix) if reasons else ""


def remove_seen_samples(
    judgement: Judgement, ours: Evaluation, others: Mapping[str, Evaluation], judged: Sequence[JudgedSamples]
) -> tuple[Evaluation, Mapping[str, Evaluation]]:
    """Return the evaluations without the test samples that another model was trained on.

    If the other models were trained on test samples, adds a Check with the share to the verdict. If samples are
    removed, also updates the scores of the verdict and the evaluations of the judgement. If the policy's
    ``seen_samples`` is ``compare``, or the judgement may not promote, all samples are kept.

    Args:
        judgement: The judgement, with verdict and policy.
        ours: The challenger's evaluation.
        others: The evaluations of the champion and perhaps of the best version, by name.
        judged: The samples that the other models were trained and judged on. Numbers on both sides are ignored.

    Raises:
        UserError: Fewer than LEAST_SAMPLES (30) samples are left.
    """
    verdict, tested, seen = judgement.verdict, judgement.tested, np.zeros(ours.samples, dtype=np.bool_)
    for each in judged if len(tested) else ():
        # A number on both sides identifies no sample, such as a customer whose last month is in the test.
        seen |= np.isin(tested, np.setdiff1d(each.trained, each.tested))
    count = int(seen.sum())
    if not count:
        return ours, others
    left_out = judgement.policy.seen_samples == LEAVE_OUT and judgement.may_promote
    what = f"{count:,} of {format_count(ours.samples, 'test sample')} ({count / ours.samples:.1%})"
    fix = "split by id (flyte_ddp.split_by_id or Table), which keeps each sample in its split"
    reason = (
        f"the champion was trained on {what}, {'excluded from the comparison' if left_out else 'compared, too'}; {fix}"
    )
    verdict.checks.append(
        Check("training samples of the champion", True, count / ours.samples, shown=what, reason=reason)
    )
    if not left_out:
        return ours, others
    if ours.samples - count < checks.LEAST_SAMPLES:
        raise UserError(f"fewer than {checks.LEAST_SAMPLES} test samples are left: {reason}")
    ours, others = ours.select(~seen), {name: found.select(~seen) for name, found in others.items()}
    verdict.seen, verdict.champion_score = count, others["champion"].score
    note_scores(verdict, ours)
    judgement.challenger, judgement.champion = ours, others["champion"]
    return ours, others


def add_vetoes(
    judgement: Judgement, ours: Evaluation, theirs: Evaluation, slices: Mapping[str, NDArray[np.int64]]
) -> None:
    """Add the Checks of classes, slices, labels and likelihoods to the verdict, and of each part to the judgement.

    ``ours`` and ``theirs`` are the evaluations of challenger and champion. ``slices`` are the positions of each slice's
    samples in both evaluations.
    """
    model, policy = judgement.model, judgement.policy
    kinds = {"slice": slices}
    if ours.classifies and not checks.is_decision(ours.objective):
        reason = "the measure is of a ranking, and the model has no threshold"
        judgement.verdict.checks.append(Check("no classes lost", True, shown="not tested", reason=reason))
    elif ours.classifies:
        truth = ours.columns["truth"].numpy()
        kinds = {"class": {name: np.flatnonzero(truth == place) for place, name in enumerate(model.classes)}, **kinds}
    comparisons = {
        kind: {name: checks.compare_part(ours, theirs, part) for name, part in parts.items() if len(part)}
        for kind, parts in kinds.items()
        if parts
    }
    if labels := checks.compare_labels(model.classes, ours, theirs):
        comparisons["label" if isinstance(model.objective, Multilabel) else "class"] = labels
    for kind, of_kind in comparisons.items():
        check, judgement.parts[kind] = checks.check_parts_not_worse(kind, of_kind, policy)
        judgement.verdict.checks.append(check)
    if ours.classifies and theirs.classifies:
        judgement.verdict.checks.append(checks.check_likelihood(ours, theirs, policy))


def evaluate_stored(judgement: Judgement, version: str, manifest: str = "") -> tuple[SavedModel, Evaluation | None]:
    """Download a version, run the version's code, and return model and evaluation by the challenger's objective.

    The version keeps its threshold. Its outputs are reordered if the classes have another order. If the version's task
    differs from the challenger's, the evaluation is None. ``manifest`` selects a revision by the SHA-256 of its
    manifest, by default the newest.

    Raises:
        UserError: The version cannot be evaluated, or an output is not finite.
        UnreachableError, MemoryError, OutOfMemoryError: Another try may succeed.
    """
    challenger = judgement.model
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = download_version(judgement.registry, version, Path(folder), manifest)
            model = SavedModel(*files, challenger.settings, challenger.bad_samples)
        if not checks.check_same_task(Task.from_sidecar(challenger.sidecar), Task.from_sidecar(model.sidecar)).passed:
            return model, None
        threshold = model.objective.facts.threshold
        if model.classes != challenger.classes:
            model.set_class_order(challenger.classes)
            threshold = None if threshold is None else 1 - threshold  # of the other class's probability
        model.objective = challenger.objective.with_threshold(threshold)
        found = evaluate_split(model, judgement.split)
        found.scores  # noqa: B018  (computed here, where errors of user-defined code are caught)
    except NOT_THE_MODELS:
        raise
    except Exception as error:
        raise UserError(f"version {version[:12]} cannot be evaluated: {describe_model_error(error)}") from error
    if not found.finite.all():
        raise UserError(f"version {version[:12]} cannot be evaluated: its outputs contain NaN or infinity")
    return model, found


def describe_model_error(error: Exception) -> str:
    """Return an error as text. Prints the traceback to stderr unless the error is a UserError."""
    if isinstance(error, UserError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"
