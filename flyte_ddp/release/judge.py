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
from flyte_ddp.export.exporting import Comparison, NotExportedError, export
from flyte_ddp.release import checks, looks, statistics, versions
from flyte_ddp.release.answers import Answers, Model
from flyte_ddp.release.checks import Pair
from flyte_ddp.release.policy import NOT_WORSE, OFF, REQUIRED, Policy
from flyte_ddp.release.registry import Entry, Registry
from flyte_ddp.release.slices import slice_members
from flyte_ddp.release.verdict import KEPT, NO_COMPARISON, PROMOTED, Check, Verdict
from flyte_ddp.settings import Settings

LATENCY_BATCH, LATENCY_ROUNDS = 64, 15
PASSING = (UnreachableError, MemoryError, torch.OutOfMemoryError)  # say nothing about a model; another try may do
NOBODY = "none"  # stands for the champion where there is none


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
        exports: a folder for what a model that is to be promoted becomes for programs without torch.

    Raises:
        UserError: the challenger, the data or the registry cannot be read, or the test split lacks a class.
    """
    settings = settings or Settings()
    before = registry.champion()
    challenger, split = Model(weights, sidecar, settings), open_prepared(data)
    files = weights, sidecar
    case = Case(registry, policy, before, challenger, split, test_digest_of(data), counts, exports, files)
    if before is None:
        return case.alone(challenger.answers(split))
    if before.version == challenger.digest and same_task(registry, before, challenger):
        return case.same_weights(None if counts else challenger.answers(split))
    try:
        with fetched(registry, before, settings) as champion:
            return compared(case, champion)
    except Incomparable as failure:
        return case.closed(NO_COMPARISON, str(failure))


def same_task(registry: Registry, before: Entry, challenger: Model) -> bool:
    """Whether the champion, which has the challenger's weights, also has its classes and input."""
    try:
        with fetched(registry, before, challenger.settings) as champion:
            return (champion.classes, champion.takes()) == (challenger.classes, challenger.takes())
    except Incomparable:
        return True


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
    files: tuple[Path, Path]  # the challenger's
    checks: list[Check] = field(default_factory=list)

    def passes(self, check: Check) -> bool:
        """Takes a check down, and says whether it holds."""
        self.checks.append(check)
        return check.passed

    def look(self) -> tuple[int, float]:
        """The number of this look at the test split, and its share of alpha; 0 and all of it if it does not count."""
        if not self.counts:
            return 0, self.policy.alpha
        champion = self.before.version if self.before else NOBODY
        rule = f"{self.policy.rule} {self.policy.margin:g} {self.policy.alpha:g}"
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
            passed = passed and self.exported(answers)
        return self.closed(
            PROMOTED if passed else KEPT,
            "there is no champion yet, and it is better than the most frequent class" if passed else self.why_not(),
            challenger=answers,
            best=self.model.digest,
            look=number,
            alpha=alpha,
        )

    def exported(self, answers: Answers) -> bool:
        """Writes the challenger for programs without torch; False if it is kept back for that."""
        if self.exports is None or self.policy.export == OFF:
            return True
        device, settings = self.model.device.type, self.model.settings
        try:
            found: Comparison | str = export(
                self.files, self.split, answers.logits, self.exports, device=device, settings=settings
            )
        except NotExportedError as error:
            found = str(error)
        return self.passes(checks.exported(found, required=self.policy.export == REQUIRED))

    def why_not(self) -> str:
        """The reasons of the checks that do not hold."""
        return "; ".join(check.reason for check in self.checks if not check.passed)

    def kept(self) -> Judgement:
        """The verdict without any comparison."""
        return self.closed(KEPT, self.why_not())

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


def compared(case: Case, champion: Model) -> Judgement:
    """The verdict on a challenger beside the champion, by all checks."""
    policy, model, split = case.policy, case.model, case.split
    if not case.passes(checks.same_task(model.classes, champion.classes, (model.takes(), champion.takes()))):
        return case.kept()
    answers = model.answers(split)
    members = {"class": checks.class_members(answers, model.classes)}
    if policy.slices:
        members["slice"] = slice_members(policy.slices, answers.ids, answers.undecoded)
    if not case.passes(checks.finite(answers)):
        return case.kept()
    theirs = answers_of(champion, split)
    anchors = {"champion": theirs}
    if case.before and case.before.best not in (champion.digest, model.digest):
        try:
            anchors["best version ever"] = answers_of_best(case)
        except Incomparable:  # which counts for nothing where a challenger must only be better than the champion
            if policy.rule == NOT_WORSE:
                raise
    case.passes(checks.ratio("size", model.bytes / champion.bytes, policy.size_ratio))
    case.passes(checks.ratio("latency", latency_ratio(model, champion, split), policy.latency_ratio))
    case.passes(checks.floor(answers, policy))
    pair = Pair.of(answers, theirs)
    number, alpha = case.look() if pair.gained + pair.lost else (0, policy.alpha)
    if policy.rule == NOT_WORSE:
        decisive, *others = (
            checks.not_worse(name, Pair.of(answers, other), policy.margin, alpha) for name, other in anchors.items()
        )
    else:
        decisive, *others = [checks.superior(pair, alpha)]
    case.checks += [decisive, *others]
    parts: dict[str, list[Check]] = {}
    for kind, of_kind in members.items():
        check, parts[kind] = checks.parts(kind, of_kind, answers, theirs, policy)
        case.passes(check)
    case.passes(checks.not_risen("negative log-likelihood", answers.nll, theirs.nll, policy.nll_rise, policy.alpha))
    case.passes(checks.not_risen("Brier score", answers.brier, theirs.brier, policy.brier_rise, policy.alpha))
    case.passes(checks.calibration(answers, theirs))
    passed = all(check.passed for check in case.checks) and case.exported(answers)
    best = answers.accuracy > max(other.accuracy for other in anchors.values())
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


def power(pair: Pair, policy: Policy, alpha: float) -> str:
    """What the rule can find on so many samples."""
    discordant = (pair.gained + pair.lost) / pair.samples
    if policy.rule == NOT_WORSE:
        share = statistics.passing(pair.samples, discordant, policy.margin, alpha)
        return f"on {pair.samples:,} samples a model of the same accuracy passes in {share:.0%} of cases"
    found = statistics.detectable(pair.samples, discordant, alpha)
    return f"on {pair.samples:,} samples {100 * found:.2f} points are found in {statistics.POWER:.0%} of cases"


@contextmanager
def fetched(registry: Registry, entry: Entry, settings: Settings, version: str = "") -> Iterator[Model]:
    """The champion of an entry, or another version, out of the registry.

    Raises:
        Incomparable: it cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = versions.read(registry, version or entry.version, "" if version else entry.manifest)
            versions.fetch(registry, found, Path(folder))
            model = Model(Path(folder, versions.WEIGHTS), Path(folder, versions.SIDECAR), settings)
        except PASSING:
            raise
        except Exception as error:  # also of code that builds the user's own model
            raise Incomparable(f"version {(version or entry.version)[:12]} cannot be loaded: {error}") from error
        yield model


def answers_of(model: Model, split: PreparedSet) -> Answers:
    """What a version of the registry answers.

    Raises:
        Incomparable: it cannot be evaluated any more.
    """
    try:
        answers = model.answers(split)
    except PASSING:
        raise
    except Exception as error:  # of any kind, as the model may be the user's own
        raise Incomparable(f"version {model.digest[:12]} cannot be evaluated: {error}") from error
    if not checks.finite(answers).passed:
        raise Incomparable(f"version {model.digest[:12]} answers with NaN or infinity")
    return answers


def answers_of_best(case: Case) -> Answers:
    """What the best version ever answers."""
    assert case.before is not None
    with fetched(case.registry, case.before, case.model.settings, case.before.best) as best:
        return answers_of(best, case.split)


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
