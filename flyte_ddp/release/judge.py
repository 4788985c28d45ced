"""Judges a model: evaluates challenger and champion on the same test split, and returns a verdict."""

import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor

from flyte_ddp.datasets.arrays import TEST_DIGEST, read_description
from flyte_ddp.datasets.prepared import PreparedSet, open_prepared
from flyte_ddp.errors import UnreachableError, UserError
from flyte_ddp.export.exporting import Comparison, NotExportedError, TorchLogits, export_model
from flyte_ddp.formatting import format_count
from flyte_ddp.predict.prediction_batches import read_test_split
from flyte_ddp.predict.saved_model import SavedModel
from flyte_ddp.release import checks, looks, statistics, versions
from flyte_ddp.release.checks import PairedCounts
from flyte_ddp.release.evaluation import Evaluation, compute_logits_of_split, evaluate_split
from flyte_ddp.release.policy import NOT_WORSE, OFF, REQUIRED, Policy
from flyte_ddp.release.promotion import download_version
from flyte_ddp.release.registry import Entry, Registry, replay_promotions
from flyte_ddp.release.slices import group_by_slice
from flyte_ddp.release.verdict import KEPT, NO_COMPARISON, PROMOTED, Check, Verdict
from flyte_ddp.settings import Settings

LATENCY_BATCH, LATENCY_ROUNDS = 64, 15  # images of a batch, and how often both models compute one
NOT_THE_MODELS = (UnreachableError, MemoryError, torch.OutOfMemoryError)  # errors that another try may not meet
NO_CHAMPION = "none"  # stands for the champion in the look of a first model


class IncomparableError(Exception):
    """The champion, or the best version ever, cannot be loaded or evaluated. Never leaves this file."""


@dataclass
class Judgement:
    """What is judged, what has been found so far, and at the end the verdict."""

    registry: Registry
    policy: Policy
    before: Entry | None  # the registry's last entry; None if there is no champion
    model: SavedModel  # the challenger
    split: PreparedSet
    test_digest: str
    counts: bool  # whether the verdict may lead to a promotion
    exports: Path | None  # the folder for the challenger's ONNX; None: no export
    challenger: Evaluation | None = None  # None where the verdict did not need it
    champion: Evaluation | None = None  # None where nothing was compared
    checks: list[Check] = field(default_factory=list)
    parts: dict[str, list[Check]] = field(default_factory=dict)  # for "class" and "slice": a check for each of them
    verdict: Verdict = field(init=False)  # missing until it is set

    def add_check(self, check: Check) -> bool:
        """Add a check to the verdict, and return whether it passed."""
        self.checks.append(check)
        return check.passed

    def claim_look(self) -> tuple[int, float]:
        """Return the number of this look at the test split, and its share of alpha; writes the look to the registry.

        A judgement that does not count writes nothing: number 0, and the first look's share.
        """
        if not self.counts:
            return 0, statistics.alpha_of_look(self.policy.alpha, 1)
        champion = self.before.version if self.before else NO_CHAMPION
        rule = f"{self.policy.rule} {self.policy.margin!r} {self.policy.alpha!r}"
        number = looks.claim_look(self.registry, self.test_digest, self.model.digest, champion, rule)
        return number, statistics.alpha_of_look(self.policy.alpha, number)

    def export_challenger(self, evaluation: Evaluation) -> None:
        """Write the challenger's exports to the folder for them, and add the check of its ONNX.

        Does nothing without such a folder, or if the policy says off. Also runs where the verdict is to keep the
        champion, as a person may promote the model later.
        """
        if self.exports is None or self.policy.export == OFF:
            return
        device, settings = self.model.device.type, self.model.settings
        rows = compute_logits_of_split(self.model, self.split)
        logits = TorchLogits(rows, len(evaluation.labels), evaluation.spread)
        found: Comparison | str
        try:
            found = export_model(self.model.files, self.split, logits, self.exports, device=device, settings=settings)
        except NotExportedError as error:
            found = str(error)
        self.add_check(checks.check_export(found, required=self.policy.export == REQUIRED))

    def set_verdict_by_checks(self, reason: str = "", **values: Any) -> Self:
        """Set the verdict and return this judgement: promote if all checks passed, else keep, with their reasons.

        Args:
            reason: of a promotion.
            values: further fields of the verdict: ``best``, ``look``, ``alpha`` and ``power``.
        """
        failures = [check.reason for check in self.checks if not check.passed]
        return self.set_verdict(KEPT if failures else PROMOTED, "; ".join(failures) or reason, **values)

    def set_verdict(self, decision: str, reason: str, **values: Any) -> Self:
        """Set the verdict, and return this judgement.

        Args:
            decision: PROMOTED, KEPT or NO_COMPARISON.
            reason: of the decision.
            values: further fields of the verdict: ``best`` (by default the best version so far), and after a look
                ``look``, ``alpha`` and ``power``.
        """
        challenger, champion, before = self.challenger, self.champion, self.before
        self.verdict = Verdict(
            decision=decision,
            reason=reason,
            challenger=self.model.digest,
            champion=before.version if before else "",
            log_number=before.number if before else 0,
            test_digest=self.test_digest,
            samples=len(challenger.labels) if challenger else 0,
            challenger_accuracy=challenger.accuracy if challenger else 0.0,
            champion_accuracy=champion.accuracy if champion else 0.0,
            time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            checks=self.checks,
            **{"look": 0, "alpha": 0.0, "power": "", "best": before.best if before else "", **values},
        )
        return self


def judge_challenger(
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
    """Compare a model with the champion, or judge it alone if there is no champion; return the judgement.

    Evaluates both models on the whole test split. Writes the look at the test split to the registry if it counts.
    A champion that cannot be loaded or evaluated gives a verdict that compares nothing, with the error as its reason;
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
    model, split = SavedModel(weights, sidecar, settings or Settings()), open_prepared(data)
    judgement = Judgement(registry, policy, before, model, split, str(test_digest), counts, exports)
    if before is None:
        return judge_first_model(judgement)
    if before.version == model.digest:
        if not counts:
            found = judgement.challenger = evaluate_split(model, split)
            if judgement.add_check(checks.check_finite_logits(found)):
                judgement.checks += [checks.check_accuracy(found, policy), checks.show_calibration(found, None)]
        return judgement.set_verdict(KEPT, "it has the champion's weights")
    # Only a version that is in the registry already may have been rolled back, which the whole log tells.
    if counts and versions.find_version(registry, model.digest):
        back = replay_promotions(registry.history()).taken_back.get(model.digest)
        if back is not None:
            return judgement.set_verdict(
                KEPT, f"{back.by} took it back ({back.reason}); only a person can promote it again"
            )
    ours = evaluate_split(model, split)
    if not judgement.add_check(checks.check_finite_logits(ours)):
        return judgement.set_verdict_by_checks()
    judgement.challenger = ours
    try:
        champion = load_stored_model(registry, before.version, before.manifest, model)
        return compare_with_champion(judgement, ours, champion, before.best)
    except IncomparableError as failure:
        judgement.export_challenger(ours)
        return judgement.set_verdict(NO_COMPARISON, str(failure))


def judge_first_model(judgement: Judgement) -> Judgement:
    """Evaluate a model where there is no champion, run the checks of it alone, and return the finished judgement."""
    model, policy = judgement.model, judgement.policy
    found = judgement.challenger = evaluate_split(model, judgement.split)
    checks.group_by_class(found, model.classes)
    if not judgement.add_check(checks.check_finite_logits(found)):
        return judgement.set_verdict_by_checks(best=model.digest, alpha=policy.alpha)
    number, alpha = judgement.claim_look()
    judgement.checks += [
        checks.check_accuracy(found, policy),
        checks.check_above_majority(found, alpha),
        checks.show_calibration(found, None),
    ]
    judgement.export_challenger(found)
    reason = "there is no champion yet, and it is better than the most frequent class"
    return judgement.set_verdict_by_checks(reason, best=model.digest, look=number, alpha=alpha)


def compare_with_champion(judgement: Judgement, ours: Evaluation, champion: SavedModel, best: str) -> Judgement:
    """Evaluate the champion, run all checks of the challenger beside it, and return the finished judgement.

    Raises an IncomparableError if the champion, or with ``not_worse`` the best version, cannot be evaluated.

    Args:
        judgement: to be finished.
        ours: the challenger's evaluation.
        champion: the champion's model.
        best: the version with the best accuracy so far.
    """
    policy, model, split = judgement.policy, judgement.model, judgement.split
    groups = {"class": checks.group_by_class(ours, model.classes)}
    if policy.slices:
        groups["slice"] = group_by_slice(policy.slices, ours.ids, ours.undecoded)
    inputs = model.describe_input(), champion.describe_input()
    if not judgement.add_check(checks.check_same_task(model.classes, champion.classes, inputs)):
        judgement.export_challenger(ours)
        return judgement.set_verdict_by_checks()
    theirs = evaluate_stored_model(champion, split)
    others = {"champion": theirs}
    if best not in (champion.digest, model.digest):
        try:
            best_model = load_stored_model(judgement.registry, best, "", model)
            others["best version ever"] = evaluate_stored_model(best_model, split)
        except IncomparableError:
            if policy.rule == NOT_WORSE:
                raise
    judgement.champion = theirs
    judgement.checks += [
        checks.check_ratio("size", model.bytes / champion.bytes, policy.size_ratio),
        checks.check_ratio("latency", measure_latency_ratio(model, champion, split), policy.latency_ratio),
        checks.check_accuracy(ours, policy),
    ]
    pair = PairedCounts.count(ours.correct, theirs.correct)
    if not pair.discordant:
        judgement.export_challenger(ours)
        return judgement.set_verdict(KEPT, "both models get the same samples right")
    number, alpha = judgement.claim_look()
    if policy.rule == NOT_WORSE:
        decisive = [
            checks.check_not_worse(name, PairedCounts.count(ours.correct, other.correct), policy.margin, alpha)
            for name, other in others.items()
        ]
    else:
        decisive = [checks.check_superior(pair, alpha)]
    judgement.checks += decisive
    for kind, members in groups.items():
        check, judgement.parts[kind] = checks.check_parts(kind, members, ours, theirs, policy)
        judgement.add_check(check)
    mine, before = ours.scores, theirs.scores
    judgement.checks += [
        checks.check_loss_rise("negative log-likelihood", mine.nll, before.nll, policy.nll_rise, policy.alpha),
        checks.check_loss_rise("Brier score", mine.brier, before.brier, policy.brier_rise, policy.alpha),
        checks.show_calibration(ours, theirs),
    ]
    judgement.export_challenger(ours)
    values = {"best": model.digest if ours.accuracy > max(other.accuracy for other in others.values()) else best}
    power = describe_power(pair, policy, alpha)
    return judgement.set_verdict_by_checks(decisive[0].reason, look=number, alpha=alpha, power=power, **values)


def describe_power(pair: PairedCounts, policy: Policy, alpha: float) -> str:
    """Return the clause that says how large a difference the policy's rule finds on so many samples, or how often."""
    samples = format_count(pair.samples, "sample")
    discordant = pair.discordant / pair.samples
    if policy.rule == NOT_WORSE:
        share = statistics.pass_probability(pair.samples, discordant, policy.margin, alpha)
        return f"on {samples} a model of the same accuracy passes a comparison in {share:.0%} of cases"
    found = statistics.detectable_difference(pair.samples, discordant, alpha)
    difference = "no difference is" if found is None else f"{100 * found:.2f} points are"
    return f"on {samples} {difference} found in {statistics.POWER:.0%} of cases"


def load_stored_model(registry: Registry, name: str, manifest: str, challenger: SavedModel) -> SavedModel:
    """Download a version's files, and return its model; the files are removed again.

    The model may meet as many undecodable images as the challenger. Raises an IncomparableError if the version cannot
    be downloaded or loaded.
    """
    with translate_model_errors(name, "loaded"), tempfile.TemporaryDirectory() as folder:
        files = download_version(registry, name, Path(folder), manifest)
        return SavedModel(*files, challenger.settings, challenger.bad_samples)


def evaluate_stored_model(model: SavedModel, split: PreparedSet) -> Evaluation:
    """Evaluate a version on the whole test split; raise an IncomparableError if that fails or a logit is not finite."""
    with translate_model_errors(model.digest, "evaluated"):
        found = evaluate_split(model, split)
    if not checks.check_finite_logits(found).passed:
        raise IncomparableError(f"version {model.digest[:12]} answers with NaN or infinity")
    return found


@contextmanager
def translate_model_errors(version: str, action: str) -> Iterator[None]:
    """Turn each error in the block, but NOT_THE_MODELS, into an IncomparableError.

    The model may be the user's own code, so that errors of any class are the model's. The traceback of an error that is
    no UserError goes to stderr, as the verdict holds only its message.

    Args:
        version: the SHA-256 of its weights.
        action: what the block does with it, as a participle for the message.
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


def measure_latency_ratio(challenger: SavedModel, champion: SavedModel, split: PreparedSet) -> float:
    """Return the challenger's time for a batch as a multiple of the champion's.

    Both compute a batch of LATENCY_BATCH test images by turns; the result is the median of LATENCY_ROUNDS ratios.
    """
    inputs: dict[SavedModel, Tensor] = {}
    for model in (challenger, champion):
        with closing(read_test_split(model, split, LATENCY_BATCH)) as batches:
            inputs[model] = next(batch.inputs for batch in batches if len(batch.inputs))

    def measure_seconds(model: SavedModel) -> float:
        """Return the seconds that a model takes for its batch."""
        began = time.perf_counter()
        model.compute_logits(inputs[model])
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter() - began

    ratios = []
    for number in range(LATENCY_ROUNDS + 1):
        order = (challenger, champion) if number % 2 else (champion, challenger)
        taken = {model: measure_seconds(model) for model in order}
        ratios.append(taken[challenger] / taken[champion])
    return median(ratios[1:])  # the first round warms up
