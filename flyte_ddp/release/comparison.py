"""Compares a challenger with the champion on the same test samples, by the rule of the policy."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.text.formatting import format_count
from flyte_ddp.release import checks
from flyte_ddp.release.champion import evaluate_stored_version, judge_champion_unchanged, read_judged_samples
from flyte_ddp.release.evaluation import Evaluation
from flyte_ddp.release.judgement import (
    Challenge,
    Decision,
    Judgement,
    register_look_and_set_alpha,
    set_challenger_scores,
)
from flyte_ddp.release.policy import LEAVE_OUT, NOT_WORSE
from flyte_ddp.release.promotion import read_verdict
from flyte_ddp.release.promotion_log import Entry
from flyte_ddp.release.samples import make_seen_sample_mask
from flyte_ddp.release.scores import is_higher_better
from flyte_ddp.release.slices import group_by_slice
from flyte_ddp.release.task import Task
from flyte_ddp.release.verdict import KEPT, NO_COMPARISON, PROMOTED, Check, Verdict
from flyte_ddp.release.vetoes import LEAST_SAMPLES, judge_vetoes

BEST = "best version ever"


def compare_with_champion(challenge: Challenge, judgement: Judgement, ours: Evaluation, entry: Entry) -> Decision:
    """Evaluate the champion, compare the challenger with the champion, and return the decision.

    Under the rule NOT_WORSE, also compares the challenger with the best version. May remove test samples that the
    champion was trained on. Fills judgement and verdict. May count a look at the test split in the registry.

    Args:
        challenge: The challenger and the rules.
        judgement: The judgement to fill.
        ours: The challenger's evaluation.
        entry: The log's entry of the champion.

    Raises:
        UserError: A stored version cannot be evaluated or has other targets, or too few samples are left.
    """
    registry, policy, model = challenge.registry, challenge.policy, challenge.model
    data, verdict = challenge.data, judgement.verdict
    champion, theirs = evaluate_stored_version(registry, entry.version, entry.manifest, model, data)
    same = checks.judge_same_task(Task.from_sidecar(model.sidecar), Task.from_sidecar(champion.sidecar))
    verdict.checks.append(same)
    if theirs is None:
        return KEPT, same.reason
    our_truth, their_truth = (found.columns.get("truth") for found in (ours, theirs))
    if our_truth is not None and their_truth is not None and not np.array_equal(our_truth, their_truth, equal_nan=True):
        raise UserError("`sample` or `collate` of the champion and of the challenger return different targets")
    judgement.champion = theirs
    version = registry.read_version(entry.version, entry.manifest)
    judged, released = read_judged_samples(registry, version), read_verdict(registry, version) or Verdict()
    verdict.champion_score = theirs.score
    if released.has_score_of(verdict.measure):
        verdict.champion_at_release = released.challenger_score
    # The answers of an objective without classes are losses, which depend on the weights of classes.
    is_comparable = theirs.classifies or champion.sidecar.class_weights == model.sidecar.class_weights
    answers = judged if is_comparable else None
    unchanged = judge_champion_unchanged(theirs, released, answers, judgement.test_digests)
    if not challenge.may_promote:  # other data may have the same ids by chance
        unchanged = [replace(check, passed=True, rule="") for check in unchanged]
    verdict.checks += unchanged
    if problems := [check.reason for check in unchanged if not check.passed]:
        fix = "find out what changed (the id of a sample must stay the same), or promote by hand"
        return NO_COMPARISON, "; ".join([*problems, fix])
    others: Mapping[str, Evaluation] = {"champion": theirs}
    known = [judged]
    if policy.rule == NOT_WORSE and verdict.best not in (champion.digest, model.digest):
        _, best = evaluate_stored_version(registry, verdict.best, "", model, data)
        assert best is not None  # a person who promotes a model of another task makes it the best
        others = {**others, BEST: best}
        known.append(read_judged_samples(registry, registry.read_version(verdict.best)))
    slices = group_by_slice(policy.slices, ours.ids, ours.undecoded) if policy.slices else {}
    seen = make_seen_sample_mask(judgement.test_digests, filter(None, known))
    ours, others = exclude_seen_samples(challenge, judgement, seen, ours, others)
    slices = {name: np.flatnonzero(np.isin(ours.places, places)) for name, places in slices.items()}
    return add_test_checks_and_decide(challenge, judgement, ours, others, slices)


def exclude_seen_samples(
    challenge: Challenge,
    judgement: Judgement,
    seen: NDArray[np.bool_],
    ours: Evaluation,
    others: Mapping[str, Evaluation],
) -> tuple[Evaluation, Mapping[str, Evaluation]]:
    """Return the evaluations without the ``seen`` test samples, which another model was trained on.

    Adds a Check with the share of seen samples to the verdict. If samples are removed, also updates the scores of the
    verdict and the evaluations of the judgement. If the policy's ``seen_samples`` is ``compare``, or the verdict may
    not promote, keeps all samples. Without seen samples does nothing.

    Args:
        challenge: The policy, and whether the verdict may promote.
        judgement: The judgement to update.
        seen: Whether another model was trained on a sample, [N].
        ours: The challenger's evaluation.
        others: The evaluations of the champion and perhaps of the best version, by name.

    Raises:
        UserError: Fewer than LEAST_SAMPLES (30) samples are left.
    """
    verdict, count = judgement.verdict, int(seen.sum())
    if not count:
        return ours, others
    left_out = challenge.policy.seen_samples == LEAVE_OUT and challenge.may_promote
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
    if ours.samples - count < LEAST_SAMPLES:
        raise UserError(f"fewer than {LEAST_SAMPLES} test samples are left: {reason}")
    ours, others = ours.select_samples(~seen), {name: found.select_samples(~seen) for name, found in others.items()}
    verdict.seen, verdict.champion_score = count, others["champion"].score
    set_challenger_scores(verdict, ours)
    judgement.challenger, judgement.champion = ours, others["champion"]
    return ours, others


def add_test_checks_and_decide(
    challenge: Challenge,
    judgement: Judgement,
    ours: Evaluation,
    others: Mapping[str, Evaluation],
    slices: Mapping[str, NDArray[np.int64]],
) -> Decision:
    """Test the differences of scores by the policy's rule, and return the decision.

    If every score equals the champion's, returns KEPT. Otherwise returns PROMOTED, also if a Check fails, because a
    failed Check later turns PROMOTED into KEPT.

    Adds the Checks and vetoes to the verdict, and the Checks of each class, label or slice to the judgement. Unless
    every score equals the champion's, sets the verdict's significance level. If the verdict may also promote, counts a
    look at the test split. If the challenger is better than all other models, sets ``verdict.best`` to the challenger.

    Args:
        challenge: The challenger and the rules.
        judgement: The judgement to fill.
        ours: The challenger's evaluation.
        others: The evaluations of the champion and perhaps of the best version, by name.
        slices: The positions of each slice's samples in the evaluations, by name.
    """
    policy, model, verdict = challenge.policy, challenge.model, judgement.verdict
    comparisons = {name: checks.compare_evaluations(ours, other) for name, other in others.items()}
    verdict.checks.append(checks.judge_min_score(ours, policy))
    if not np.any(comparisons["champion"].values):
        return KEPT, "both models have the same score on each sample"
    alpha = register_look_and_set_alpha(challenge, verdict)
    if policy.rule == NOT_WORSE:
        decisive = [checks.judge_not_worse(name, comparisons[name], policy.margin, alpha) for name in comparisons]
    else:
        decisive = [checks.judge_superior(comparisons["champion"], alpha)]
    verdict.checks += decisive
    vetoes, judgement.part_checks = judge_vetoes(ours, others["champion"], model.classes, slices, policy)
    verdict.checks += vetoes
    sign = 1 if is_higher_better(model.objective) else -1
    # A best version that was not evaluated stays the best, because otherwise small losses would add up.
    compared = policy.rule == NOT_WORSE or verdict.best in (verdict.champion, model.digest)
    if compared and all(sign * ours.score > sign * other.score for other in others.values()):
        verdict.best = model.digest
    return PROMOTED, decisive[0].reason
