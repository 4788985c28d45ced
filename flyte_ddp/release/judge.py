"""The judgement: challenger and champion are evaluated on the same test split, and a verdict compares them."""

import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

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
NOT_THE_MODELS = (UnreachableError, MemoryError, torch.OutOfMemoryError)  # errors that another try may not meet
NO_CHAMPION = "none"  # in the look of a first model


@dataclass
class Judgement:
    """A verdict, and what its page shows."""

    verdict: Verdict
    model: Model  # the challenger
    split: PreparedSet
    challenger: Answers | None = None  # None where the verdict did not need them
    champion: Answers | None = None
    parts: dict[str, list[Check]] = field(default_factory=dict)  # one check for each class and each slice


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
    """Judge a model against the champion, or, where there is none, on its own.

    A champion that cannot be loaded or evaluated makes a verdict that compares nothing, with the error as its reason;
    the traceback of an error that is no UserError goes to stderr.

    Args:
        weights: ``model.pt`` of the challenger's run.
        sidecar: ``model.json`` of the same run.
        data: a prepared data set's folder, whose test split decides.
        registry: where the champion is.
        policy: what the challenger must show.
        settings: for shards: where they are cached, and how many threads decode.
        counts: whether the judgement may lead to a promotion, and so is one of the looks at the test split.
        exports: a folder for the ONNX and other exports; None: none are made.

    Raises:
        UserError: the challenger, the data or the registry cannot be read, or the test split lacks a class.
    """
    before, test_digest = registry.champion(), read_description(data).get(TEST_DIGEST)
    if test_digest is None:
        raise UserError(f"{data}: was prepared by an older version, without {TEST_DIGEST}; fetch it again")
    challenger, split = Model(weights, sidecar, settings or Settings()), open_prepared(data)
    case = Case(registry, policy, before, challenger, split, str(test_digest), counts, exports)
    if before is None:
        return case.judge_alone(challenger.answers(split))
    if before.version == challenger.digest:
        return case.judge_champion(None if counts else challenger.answers(split))
    # Only a version that is in the registry already may have been rolled back, which the whole log tells.
    if counts and versions.find_version(registry, challenger.digest):
        back = promotions(registry.history()).taken_back.get(challenger.digest)
        if back is not None:
            return case.close(KEPT, f"{back.by} took it back ({back.reason}); only a person can promote it again")
    answers = challenger.answers(split)
    if not case.passes(checks.finite(answers)):
        return case.close(KEPT, case.failures())
    try:
        with stored_model(registry, before.version, before.manifest, challenger) as champion:
            return compare(case, answers, champion)
    except IncomparableError as failure:
        case.export(answers)
        return case.close(NO_COMPARISON, str(failure), challenger=answers)


class IncomparableError(Exception):
    """The champion, or the best version ever, cannot be loaded or evaluated. Never leaves this file."""


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
        """Add a check to the verdict, and return whether it holds."""
        self.checks.append(check)
        return check.passed

    def failures(self) -> str:
        """Return the reasons of the checks that do not hold."""
        return "; ".join(check.reason for check in self.checks if not check.passed)

    def claim_look(self) -> tuple[int, float]:
        """Claim the next look at the test split; return its number and its share of alpha.

        A judgement that does not count claims none: number 0, and the first look's share.
        """
        if not self.counts:
            return 0, statistics.spent(self.policy.alpha, 1)
        champion = self.before.version if self.before else NO_CHAMPION
        rule = f"{self.policy.rule} {self.policy.margin!r} {self.policy.alpha!r}"
        number = looks.claim_look(self.registry, self.test_digest, self.model.digest, champion, rule)
        return number, statistics.spent(self.policy.alpha, number)

    def judge_alone(self, answers: Answers) -> Judgement:
        """Return the judgement on what would be the first champion."""
        checks.class_members(answers, self.model.classes)
        if not self.passes(checks.finite(answers)):
            return self.close(
                KEPT, self.failures(), challenger=answers, best=self.model.digest, alpha=self.policy.alpha
            )
        number, alpha = self.claim_look()
        self.passes(checks.floor(answers, self.policy))
        self.passes(checks.above_majority(answers, alpha))
        self.passes(checks.calibration(answers, None))
        self.export(answers)
        passed = all(check.passed for check in self.checks)
        return self.close(
            PROMOTED if passed else KEPT,
            "there is no champion yet, and it is better than the most frequent class" if passed else self.failures(),
            challenger=answers,
            best=self.model.digest,
            look=number,
            alpha=alpha,
        )

    def judge_champion(self, answers: Answers | None) -> Judgement:
        """Return the judgement on the champion's own weights, with its answers where they are given."""
        if answers is not None and self.passes(checks.finite(answers)):
            self.passes(checks.floor(answers, self.policy))
            self.passes(checks.calibration(answers, None))
        return self.close(KEPT, "it has the champion's weights", challenger=answers)

    def export(self, answers: Answers) -> None:
        """Export the challenger and add the check of it, also if only a person may promote it; nothing if it is off."""
        if self.exports is None or self.policy.export == OFF:
            return
        device, settings = self.model.device.type, self.model.settings
        logits = Logits(self.model.rows(self.split), len(answers.labels), answers.spread)
        try:
            found: Comparison | str = export(
                self.model.files, self.split, logits, self.exports, device=device, settings=settings
            )
        except NotExportedError as error:
            found = str(error)
        self.passes(checks.exported(found, required=self.policy.export == REQUIRED))

    def close(
        self,
        decision: str,
        reason: str,
        *,
        challenger: Answers | None = None,
        champion: Answers | None = None,
        parts: dict[str, list[Check]] | None = None,
        **values: Any,
    ) -> Judgement:
        """Return the judgement with its verdict; ``values`` are the verdict's best, look, alpha and power."""
        best = self.before.best if self.before else ""
        verdict = Verdict(
            decision=decision,
            reason=reason,
            challenger=self.model.digest,
            champion=self.before.version if self.before else "",
            log_number=self.before.number if self.before else 0,
            test_digest=self.test_digest,
            samples=len(challenger.labels) if challenger else 0,
            challenger_accuracy=challenger.accuracy if challenger else 0.0,
            champion_accuracy=champion.accuracy if champion else 0.0,
            time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            checks=self.checks,
            **{"look": 0, "alpha": 0.0, "power": "", "best": best, **values},
        )
        return Judgement(verdict, self.model, self.split, challenger, champion, parts or {})


def compare(case: Case, answers: Answers, champion: Model) -> Judgement:
    """Return the judgement on a challenger beside the champion, by all checks."""
    policy, model, split = case.policy, case.model, case.split
    members = {"class": checks.class_members(answers, model.classes)}
    if policy.slices:
        members["slice"] = slice_members(policy.slices, answers.ids, answers.undecoded)
    if not case.passes(checks.same_task(model.classes, champion.classes, (model.takes(), champion.takes()))):
        case.export(answers)
        return case.close(KEPT, case.failures(), challenger=answers)
    theirs = evaluate(champion, split)
    others = {"champion": theirs, **evaluate_best(case, champion)}
    case.passes(checks.ratio("size", model.bytes / champion.bytes, policy.size_ratio))
    case.passes(checks.ratio("latency", latency_ratio(model, champion, split), policy.latency_ratio))
    case.passes(checks.floor(answers, policy))
    pair = Pair.of(answers.correct, theirs.correct)
    if not pair.discordant:
        case.export(answers)
        return case.close(KEPT, "both models get the same samples right", challenger=answers, champion=theirs)
    number, alpha = case.claim_look()
    if policy.rule == NOT_WORSE:
        decisive, *more = (
            checks.not_worse(name, Pair.of(answers.correct, other.correct), policy.margin, alpha)
            for name, other in others.items()
        )
    else:
        decisive, more = checks.superior(pair, alpha), []
    case.checks += [decisive, *more]
    parts: dict[str, list[Check]] = {}
    for kind, of_kind in members.items():
        check, parts[kind] = checks.parts(kind, of_kind, answers, theirs, policy)
        case.passes(check)
    ours, champions = answers.scores, theirs.scores
    case.passes(checks.not_risen("negative log-likelihood", ours.nll, champions.nll, policy.nll_rise, policy.alpha))
    case.passes(checks.not_risen("Brier score", ours.brier, champions.brier, policy.brier_rise, policy.alpha))
    case.passes(checks.calibration(answers, theirs))
    case.export(answers)
    passed = all(check.passed for check in case.checks)
    best = {"best": model.digest} if answers.accuracy > max(other.accuracy for other in others.values()) else {}
    return case.close(
        PROMOTED if passed else KEPT,
        decisive.reason if passed else case.failures(),
        challenger=answers,
        champion=theirs,
        parts=parts,
        look=number,
        alpha=alpha,
        power=power_text(pair, policy, alpha),
        **best,
    )


def evaluate_best(case: Case, champion: Model) -> dict[str, Answers]:
    """Return the answers of the best version ever by its name; empty if that is one of the two models.

    Also empty if it cannot be loaded or evaluated; with ``not_worse`` that is an IncomparableError.
    """
    assert case.before is not None
    if case.before.best in (champion.digest, case.model.digest):
        return {}
    try:
        with stored_model(case.registry, case.before.best, "", case.model) as best:
            return {"best version ever": evaluate(best, case.split)}
    except IncomparableError:
        if case.policy.rule == NOT_WORSE:
            raise
        return {}


def power_text(pair: Pair, policy: Policy, alpha: float) -> str:
    """Return a sentence on which difference the rule can find on so many samples."""
    samples = counted(pair.samples, "sample")
    discordant = pair.discordant / pair.samples
    if policy.rule == NOT_WORSE:
        share = statistics.passing(pair.samples, discordant, policy.margin, alpha)
        return f"on {samples} a model of the same accuracy passes a comparison in {share:.0%} of cases"
    found = statistics.detectable(pair.samples, discordant, alpha)
    difference = "no difference is" if found is None else f"{100 * found:.2f} points are"
    return f"on {samples} {difference} found in {statistics.POWER:.0%} of cases"


@contextmanager
def stored_model(registry: Registry, name: str, manifest: str, challenger: Model) -> Iterator[Model]:
    """Load a version, which may meet as many undecodable images as the challenger; may raise an IncomparableError."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, versions.WEIGHTS), Path(folder, versions.SIDECAR)
        with incomparable(name, "loaded"):
            versions.fetch_files(registry, versions.read_version(registry, name, manifest), Path(folder))
            model = Model(*files, challenger.settings, challenger.bad_samples)
        yield model


def evaluate(model: Model, split: PreparedSet) -> Answers:
    """Return the finite answers of a version; may raise an IncomparableError."""
    with incomparable(model.digest, "evaluated"):
        answers = model.answers(split)
    if not checks.finite(answers).passed:
        raise IncomparableError(f"version {model.digest[:12]} answers with NaN or infinity")
    return answers


@contextmanager
def incomparable(version: str, action: str) -> Iterator[None]:
    """Turn errors into an IncomparableError: of any class, as the model may be the user's own code.

    Prints the traceback of an error that is no UserError to stderr, as the verdict has only its message.
    """
    try:
        yield
    except NOT_THE_MODELS:
        raise
    except Exception as error:
        said = str(error)
        if not isinstance(error, UserError):
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
        raise IncomparableError(f"version {version[:12]} cannot be {action}: {said}") from error


def latency_ratio(challenger: Model, champion: Model, split: PreparedSet) -> float:
    """Return the challenger's time for a batch as a multiple of the champion's: the median of several, in turns."""
    inputs: dict[Model, Tensor] = {}
    for model in (challenger, champion):
        with closing(model.batches(split, LATENCY_BATCH)) as batches:
            inputs[model] = next(batch.inputs for batch in batches if len(batch.inputs))

    def seconds(model: Model) -> float:
        began = time.perf_counter()
        model.logits(inputs[model])
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter() - began

    ratios = []
    for number in range(LATENCY_ROUNDS + 1):
        order = (challenger, champion) if number % 2 else (champion, challenger)
        taken = {model: seconds(model) for model in order}
        ratios.append(taken[challenger] / taken[champion])
    return median(ratios[1:])  # the first round warms up
