"""A challenge of the champion, and the judgement on the challenger, which is filled step by step."""

from dataclasses import dataclass, field
from functools import cached_property

from flyte_ddp.core.progress import Progress
from flyte_ddp.datasets.prepared_set import PreparedSet
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.release import checks, statistics
from flyte_ddp.release.evaluation import Evaluation
from flyte_ddp.release.policy import NOT_WORSE, Policy
from flyte_ddp.release.promotion_log import Entry
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.samples import Digests, JudgedSamples, rate_answers
from flyte_ddp.release.verdict import Check, Verdict

Decision = tuple[str, str]  # PROMOTED, KEPT or NO_COMPARISON, and the reason; a failed Check makes PROMOTED KEPT


@dataclass(frozen=True)
class Challenge:
    """A model that challenges the champion, and how the two models are compared."""

    registry: Registry
    policy: Policy
    entry: Entry | None  # the champion's entry in the log, the last; None if there is no champion
    model: SavedModel  # the challenger
    data: PreparedSet  # the data set whose test split decides
    may_promote: bool  # whether the verdict may lead to a promotion

    def print_note(self, text: str) -> None:
        Progress(self.model.settings.progress).print_note(f"judging: {text}")


@dataclass
class Judgement:
    """The verdict on a challenger, and the evaluations behind the verdict.

    The functions of judge.py and comparison.py fill the fields in order. If a step fails, the last fields stay empty.
    """

    model: SavedModel  # the challenger
    data: PreparedSet
    verdict: Verdict
    full_evaluation: Evaluation | None = None  # of the challenger on all test samples; None if not needed
    challenger: Evaluation | None = None  # the same, without samples that the champion was trained on
    champion: Evaluation | None = None  # on the same samples as ``challenger``; None if nothing was compared
    part_checks: dict[str, list[Check]] = field(default_factory=dict)  # by "class", "label" or "slice"

    @cached_property
    def test_digests(self) -> Digests:
        """An identifying number for each evaluated test sample. Empty if the samples are not identified."""
        assert self.full_evaluation is not None
        return self.data.identify_tested(self.full_evaluation.ids)

    def identify_samples(self) -> JudgedSamples:
        """Return identifying numbers of training and test samples, with the challenger's answers on the test samples.

        Call this after the challenger was evaluated.
        """
        assert self.full_evaluation is not None
        training = self.data.identify_samples("train")
        return JudgedSamples(training, self.test_digests, rate_answers(self.full_evaluation))


def register_look_and_set_alpha(challenge: Challenge, verdict: Verdict) -> float:
    """Set the verdict's significance level to a share of the policy's alpha, and return the level.

    If the verdict may promote, the registry counts a look at the test split, in up to 4 tries of each file, and the
    verdict gets the look's number. Otherwise the level is the first look's.
    """
    policy = challenge.policy
    if challenge.may_promote:
        margin = f" {policy.margin!r}" if policy.rule == NOT_WORSE else ""
        rule = f"{policy.rule}{margin} {policy.alpha!r}"
        champion = verdict.champion or "none"
        verdict.look = challenge.registry.register_look(verdict.test_digest, verdict.challenger, champion, rule)
    verdict.alpha = statistics.alpha_of_look(policy.alpha, max(1, verdict.look))
    return verdict.alpha


def set_challenger_scores(verdict: Verdict, ours: Evaluation) -> None:
    """Write number of samples, the challenger's score and the constant answer's score into the verdict."""
    verdict.samples, verdict.challenger_score = ours.samples, ours.score
    compared = checks.compare_with_best_constant(ours) if ours.finite.all() else None
    verdict.constant_score = compared[2] if compared else None
