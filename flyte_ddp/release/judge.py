"""The judgement: challenger and champion answer the same test split, and a verdict says what that shows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from flyte_ddp.datasets.arrays import TEST_DIGEST, read_description
from flyte_ddp.datasets.prepared import PreparedSet, open_prepared
from flyte_ddp.errors import UnreachableError, UserError
from flyte_ddp.export.exporting import Comparison, Logits, NotExportedError, export
from flyte_ddp.formatting import counted
from flyte_ddp.release import checks, looks, statistics, versions
from flyte_ddp.release.answers import Answers, Model
from flyte_ddp.release.checks import Pair
from flyte_ddp.release.policy import NOT_WORSE, OFF, REQUIRED, Policy
from flyte_ddp.release.registry import Entry, Registry, promotions
from flyte_ddp.release.slices import slice_members
from flyte_ddp.release.verdict import KEPT, NO_COMPARISON, PROMOTED, Check, Verdict
from flyte_ddp.settings import Settings

LATENCY_BATCH, LATENCY_ROUNDS = 64, 15
NOT_THE_MODELS = (UnreachableError, MemoryError, torch.OutOfMemoryError)  # these say nothing about a model
NO_CHAMPION = "none"  # stands for the champion where there is none


@dataclass
class Judgement:
    """A verdict, and what it was found from, for the page."""

    verdict: Verdict
    model: Model  # the challenger
    split: PreparedSet
    challenger: Answers | None = None  # None where the verdict did not need them
    champion: Answers | None = None
    parts: dict[str, list[Check]] = field(default_factory=dict)  # classes and slices, each with its check


def judge(
    weights: Path,
    sidecar: Path,
    data: Path,
    registry: Registry,
    policy: Policy,
    *,
    settings: Settings | None = None,
    counts: bool = True,
    exports: Path | None = None,
) -> Judgement:
    """Judges a model against the champion, or, where there is none, on its own.

    Args:
        weights: ``model.pt`` of the challenger's run.
        sidecar: ``model.json`` of the same run.
        data: a prepared data set's folder, whose test split decides.
        registry: where the champion is.
        policy: what the challenger must show.
        settings: for shards: where they are cached, and how many threads decode.
        counts: whether the judgement may lead to a promotion, and so is one of the looks at the test split.
        exports: a folder for what the model becomes for programs without torch.

    Raises:
        UserError: the challenger, the data or the registry cannot be read, or the test split lacks a class.
    """
    before = registry.champion()
    challenger, split = Model(weights, sidecar, settings or Settings()), open_prepared(data)
    case = Case(registry, policy, before, challenger, split, test_digest_of(data), counts, exports)
    if before is None:
        return case.alone(challenger.answers(split))
    if before.version == challenger.digest:
        return case.same_weights(None if counts else challenger.answers(split))
    # Only a version that is in the registry already may have been rolled back, which the whole log tells.
    if counts and versions.find_version(registry, challenger.digest):
        back = promotions(registry.history()).taken_back.get(challenger.digest)
        if back is not None:
            return case.closed(KEPT, f"{back.by} took it back ({back.reason}); only a person can promote it again")
    answers = challenger.answers(split)
    if not case.passes(checks.finite(answers)):
        return case.closed(KEPT, case.why_not())
    try:
        with fetched(registry, before.version, before.manifest, challenger) as champion:
            return compared(case, answers, champion)
    except Incomparable as failure:
        case.exported(answers)
        return case.closed(NO_COMPARISON, str(failure), challenger=answers)


def test_digest_of(data: Path) -> str:
    """The digest of the test split alone.

    Raises:
        UserError: the data set was prepared by a version of this library that did not write it.
    """
    found = read_description(data).get(TEST_DIGEST)
    if found is None:
        raise UserError(f"{data}: was prepared by an older version, without {TEST_DIGEST}; fetch it again")
    return str(found)


class Incomparable(Exception):  # noqa: N818  # never shown to anybody
    """The champion, or the best version ever, cannot be loaded or evaluated."""


@dataclass
class Case:
    """What is known of a judgement before anything is compared, and the verdicts that it can end with."""

    registry: Registry
    policy: Policy
    before: Entry | None  # the registry's last entry
    model: Model  # the challenger
    split: PreparedSet
    test_digest: str
    counts: bool
    exports: Path | None
    checks: list[Check] = field(default_factory=list)

    def passes(self, check: Check) -> bool:
        """Takes a check down, and says whether it holds."""
        self.checks.append(check)
        return check.passed

    def look(self) -> tuple[int, float]:
        """The number of this look at the test split, and its share of alpha; 0 and the first one's if none counts."""
        if not self.counts:
            return 0, statistics.spent(self.policy.alpha, 1)
        champion = self.before.version if self.before else NO_CHAMPION
        rule = f"{self.policy.rule} {self.policy.margin!r} {self.policy.alpha!r}"
        number = looks.claim(self.registry, self.test_digest, self.model.digest, champion, rule)
        return number, statistics.spent(self.policy.alpha, number)

    def alone(self, answers: Answers) -> Judgement:
        """The verdict on what would be the first champion."""
        checks.class_members(answers, self.model.classes)
        passed = self.passes(checks.finite(answers))
        number, alpha = 0, self.policy.alpha
        if passed:
            number, alpha = self.look()
            passed = self.passes(checks.floor(answers, self.policy))
            passed = self.passes(checks.above_majority(answers, alpha)) and passed
            self.passes(checks.calibration(answers, None))
            passed = self.exported(answers) and passed
        return self.closed(
            PROMOTED if passed else KEPT,
            "there is no champion yet, and it is better than the most frequent class" if passed else self.why_not(),
            challenger=answers,
            best=self.model.digest,
            look=number,
            alpha=alpha,
        )

    def exported(self, answers: Answers) -> bool:
        """Writes the challenger for programs without torch, also if only a person may promote it.

        Returns:
            False if it is kept back for there being no such file.
        """
        if self.exports is None or self.policy.export == OFF:
            return True
        device, settings = self.model.device.type, self.model.settings
        logits = Logits(self.model.rows(self.split), len(answers.labels), answers.spread)
        try:
            found: Comparison | str = export(
                self.model.files, self.split, logits, self.exports, device=device, settings=settings
            )
        except NotExportedError as error:
            found = str(error)
        return self.passes(checks.exported(found, required=self.policy.export == REQUIRED))

    def why_not(self) -> str:
        """The reasons of the checks that do not hold."""
        return "; ".join(check.reason for check in self.checks if not check.passed)

    def same_weights(self, answers: Answers | None) -> Judgement:
        """The verdict on the champion itself, with its answers if somebody wants to see them."""
        if answers is not None and self.passes(checks.finite(answers)):
            self.passes(checks.floor(answers, self.policy))
            self.passes(checks.calibration(answers, None))
        return self.closed(KEPT, "it has the champion's weights", challenger=answers)

    def closed(
        self,
        decision: str,
        reason: str,
        *,
        challenger: Answers | None = None,
        champion: Answers | None = None,
        best: str = "",
        look: int = 0,
        alpha: float = 0.0,
        power: str = "",
        parts: dict[str, list[Check]] | None = None,
    ) -> Judgement:
        """The judgement with its verdict."""
        verdict = Verdict(
            decision=decision,
            reason=reason,
            challenger=self.model.digest,
            champion=self.before.version if self.before else "",
            best=best or (self.before.best if self.before else ""),
            log_number=self.before.number if self.before else 0,
            test_digest=self.test_digest,
            samples=len(challenger.labels) if challenger else 0,
            challenger_accuracy=challenger.accuracy if challenger else 0.0,
            champion_accuracy=champion.accuracy if champion else 0.0,
            look=look,
            alpha=alpha,
            power=power,
            time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            checks=self.checks,
        )
        return Judgement(verdict, self.model, self.split, challenger, champion, parts or {})


def compared(case: Case, answers: Answers, champion: Model) -> Judgement:
    """The verdict on a challenger beside the champion, by all checks."""
    policy, model, split = case.policy, case.model, case.split
    members = {"class": checks.class_members(answers, model.classes)}
    if policy.slices:
        members["slice"] = slice_members(policy.slices, answers.ids, answers.undecoded)
    if not case.passes(checks.same_task(model.classes, champion.classes, (model.takes(), champion.takes()))):
        case.exported(answers)
        return case.closed(KEPT, case.why_not(), challenger=answers)
    theirs = answers_of(champion, split)
    others = {} if case.before is None else answers_of_best(case, case.before, champion)
    case.passes(checks.ratio("size", model.bytes / champion.bytes, policy.size_ratio))
    case.passes(checks.ratio("latency", latency_ratio(model, champion, split), policy.latency_ratio))
    case.passes(checks.floor(answers, policy))
    pair = Pair.of(answers.correct, theirs.correct)
    if not pair.discordant:
        case.exported(answers)
        same = "both models get the same samples right"
        return case.closed(KEPT, same, challenger=answers, champion=theirs)
    number, alpha = case.look()
    decisive = rule(policy, "champion", pair, alpha)
    case.passes(decisive)
    if policy.rule == NOT_WORSE:
        for name, other in others.items():
            case.passes(rule(policy, name, Pair.of(answers.correct, other.correct), alpha))
    parts: dict[str, list[Check]] = {}
    for kind, of_kind in members.items():
        check, parts[kind] = checks.parts(kind, of_kind, answers, theirs, policy)
        case.passes(check)
    ours, champions = answers.scores, theirs.scores
    case.passes(checks.not_risen("negative log-likelihood", ours.nll, champions.nll, policy.nll_rise, policy.alpha))
    case.passes(checks.not_risen("Brier score", ours.brier, champions.brier, policy.brier_rise, policy.alpha))
    case.passes(checks.calibration(answers, theirs))
    case.exported(answers)
    passed = all(check.passed for check in case.checks)
    best = answers.accuracy > max(other.accuracy for other in (theirs, *others.values()))
    return case.closed(
        PROMOTED if passed else KEPT,
        decisive.reason if passed else case.why_not(),
        challenger=answers,
        champion=theirs,
        best=model.digest if best else "",
        look=number,
        alpha=alpha,
        power=power(pair, policy, alpha),
        parts=parts,
    )


def rule(policy: Policy, name: str, pair: Pair, alpha: float) -> Check:
    """The check that decides, against the champion or the best version ever."""
    if policy.rule == NOT_WORSE:
        return checks.not_worse(name, pair, policy.margin, alpha)
    return checks.superior(pair, alpha)


def answers_of_best(case: Case, before: Entry, champion: Model) -> dict[str, Answers]:
    """What the best version ever answers, if that is neither of the two.

    Raises:
        Incomparable: it cannot be loaded or evaluated, and the challenger must not be worse.
    """
    if before.best in (champion.digest, case.model.digest):
        return {}
    try:
        with fetched(case.registry, before.best, "", case.model) as best:
            return {"best version ever": answers_of(best, case.split)}
    except Incomparable:
        if case.policy.rule == NOT_WORSE:
            raise
        return {}


def power(pair: Pair, policy: Policy, alpha: float) -> str:
    """What the rule can find on so many samples."""
    samples = counted(pair.samples, "sample")
    discordant = pair.discordant / pair.samples
    if policy.rule == NOT_WORSE:
        share = statistics.passing(pair.samples, discordant, policy.margin, alpha)
        return f"on {samples} a model of the same accuracy passes a comparison in {share:.0%} of cases"
    found = statistics.detectable(pair.samples, discordant, alpha)
    if found is None:
        return f"on {samples} no difference is found in {statistics.POWER:.0%} of cases"
    return f"on {samples} {100 * found:.2f} points are found in {statistics.POWER:.0%} of cases"


@contextmanager
def fetched(registry: Registry, name: str, manifest: str, challenger: Model) -> Iterator[Model]:
    """A version out of the registry, which may meet as many images that cannot be decoded as the challenger.

    Raises:
        Incomparable: it cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, versions.WEIGHTS), Path(folder, versions.SIDECAR)
        try:
            versions.fetch_files(registry, versions.read_version(registry, name, manifest), Path(folder))
            model = Model(*files, challenger.settings, challenger.bad_samples)
        except NOT_THE_MODELS:
            raise
        except Exception as error:  # also of code that builds the user's own model
            raise Incomparable(f"version {name[:12]} cannot be loaded: {error}") from error
        yield model


def answers_of(model: Model, split: PreparedSet) -> Answers:
    """What a version of the registry answers.

    Raises:
        Incomparable: it cannot be evaluated any more.
    """
    try:
        answers = model.answers(split)
    except NOT_THE_MODELS:
        raise
    except Exception as error:  # of any kind, as the model may be the user's own
        raise Incomparable(f"version {model.digest[:12]} cannot be evaluated: {error}") from error
    if not checks.finite(answers).passed:
        raise Incomparable(f"version {model.digest[:12]} answers with NaN or infinity")
    return answers


def latency_ratio(challenger: Model, champion: Model, split: PreparedSet) -> float:
    """The challenger's time for a batch as a multiple of the champion's: the median of several, each in turn."""
    inputs = {model: first_inputs(model, split) for model in (challenger, champion)}
    ratios = []
    for number in range(LATENCY_ROUNDS + 1):
        order = (challenger, champion) if number % 2 else (champion, challenger)
        seconds = {model: timed(model, inputs[model]) for model in order}
        ratios.append(seconds[challenger] / seconds[champion])
    return median(ratios[1:])  # the first round warms up


def first_inputs(model: Model, split: PreparedSet) -> Tensor:
    """A batch with an image in it."""
    with closing(model.batches(split, LATENCY_BATCH)) as batches:
        return next(batch.inputs for batch in batches if len(batch.inputs))


def timed(model: Model, inputs: Tensor) -> float:
    """Seconds for a batch."""
    began = time.perf_counter()
    model.logits(inputs)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - began
