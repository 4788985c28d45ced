"""Judges a model: evaluates challenger and champion on the same test split, and returns a verdict."""

import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.datasets.prepared import PreparedSet, open_prepared
from flyte_ddp.datasets.prepared_folder import TEST_DIGEST, read_description
from flyte_ddp.errors import UnreachableError, UserError
from flyte_ddp.export.exporting import Comparison, export_model
from flyte_ddp.export.graphs import NotExportedError
from flyte_ddp.objectives import Multilabel
from flyte_ddp.predict.prediction_batches import SavedModel, read_test_split
from flyte_ddp.progress import Progress
from flyte_ddp.release import checks, statistics, versions
from flyte_ddp.release.evaluation import Evaluation, evaluate_split
from flyte_ddp.release.policy import NOT_WORSE, OFF, REQUIRED, Policy
from flyte_ddp.release.promotion import download_version
from flyte_ddp.release.registry import Entry, Registry, replay_promotions
from flyte_ddp.release.slices import group_by_slice
from flyte_ddp.release.verdict import KEPT, NO_COMPARISON, PROMOTED, Check, Verdict
from flyte_ddp.samples.leaves import Leaves
from flyte_ddp.settings import Settings

LATENCY_BATCH, LATENCY_ROUNDS = 64, 15  # samples of a batch, and how often both models compute one
NOT_THE_MODELS = (UnreachableError, MemoryError, torch.OutOfMemoryError)  # errors that another try may not meet


BY_CHECKS = "by the checks"  # a decision that failed Checks, also that of an export, may still change
Decision = tuple[str, str]  # PROMOTED, KEPT, NO_COMPARISON or BY_CHECKS, and the reason


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
    challenger: Evaluation | None = None  # None where the verdict did not need it
    champion: Evaluation | None = None  # None where nothing was compared
    checks: list[Check] = field(default_factory=list)
    parts: dict[str, list[Check]] = field(default_factory=dict)  # for "class", "label", "slice": a check for each
    best: str = ""  # the version with the best measure so far, the challenger among them
    look: int = 0  # number of this judgement among those on the test split; 0: it is not counted
    alpha: float = 0.0  # this judgement's share of the policy's alpha; 0: nothing was decided by it
    verdict: Verdict = field(init=False)  # missing until it is set

    def add_check(self, check: Check) -> bool:
        self.checks.append(check)
        return check.passed

    def tell(self, text: str) -> None:
        Progress(self.model.settings.progress).print_note(f"judging: {text}")

    def claim_alpha(self) -> float:
        """Count this judgement in the registry if it counts; set ``look``, its number, and ``alpha``; return alpha."""
        if self.counts:
            champion = self.before.version if self.before else "none"
            margin = f" {self.policy.margin!r}" if self.policy.rule == NOT_WORSE else ""
            rule = f"{self.policy.rule}{margin} {self.policy.alpha!r}"
            self.look = self.registry.claim_look(self.test_digest, self.model.digest, champion, rule)
        self.alpha = statistics.alpha_of_look(self.policy.alpha, max(1, self.look))
        return self.alpha

    def export(self, folder: Path) -> None:
        """Export the challenger into a folder, and add the Check of its ONNX; do nothing if the policy wants none."""
        if self.challenger is None or not self.challenger.finite.all() or self.policy.export == OFF:
            return
        self.tell(f"exports it, and compares the ONNX with torch on {self.challenger.samples:,} samples")
        found: Comparison | str
        try:
            found = export_model(self.model, self.split, folder)
        except NotExportedError as error:
            found = str(error)
        self.checks.append(checks.check_export(found, required=self.policy.export == REQUIRED))

    def make_verdict(self, decision: Decision) -> Verdict:
        """Return the verdict; of BY_CHECKS it is KEPT for the reasons of failed Checks, or PROMOTED."""
        kind, reason = decision
        if kind == BY_CHECKS:
            failures = [check.reason for check in self.checks if not check.passed]
            kind, reason = (KEPT, "; ".join(failures)) if failures else (PROMOTED, reason)
        challenger, champion, before = self.challenger, self.champion, self.before
        return Verdict(
            decision=kind,
            reason=reason,
            challenger=self.model.digest,
            champion=before.version if before else "",
            best=self.best,
            log_number=before.number if before else 0,
            test_digest=self.test_digest,
            samples=challenger.samples if challenger else 0,
            measure=self.model.objective.main_measure,
            challenger_score=challenger.score if challenger else 0.0,
            champion_score=champion.score if champion else 0.0,
            look=self.look,
            alpha=self.alpha,
            time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            checks=self.checks,
        )


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

    ``weights`` and ``sidecar`` are the challenger's ``model.pt`` and ``model.json``, ``data`` is a prepared data set's
    folder, and ``exports`` the folder for an ONNX (None: none). ``counts`` says whether the verdict may promote: then
    the registry counts the look at the test split. Runs the code that the sidecars name. An export silences this
    process's stderr. Errors other than NOT_THE_MODELS give a verdict that compares nothing, so that the model can be
    stored; without ``counts`` only errors of the champion do. Raises a UserError if challenger, data or registry cannot
    be read.
    """
    before, test_digest = registry.read_champion(), read_description(data).get(TEST_DIGEST)
    if test_digest is None:
        raise UserError(f"{data}: was prepared by an older version, without {TEST_DIGEST}; fetch it again")
    model, split = SavedModel(weights, sidecar, settings or Settings()), open_prepared(data)
    best = before.best if before else ""
    judgement = Judgement(registry, policy, before, model, split, str(test_digest), counts, best=best)
    try:
        decision = decide(judgement)
    except NOT_THE_MODELS:
        raise
    except Exception as error:
        if not counts and not isinstance(error, IncomparableError):
            raise
        decision = NO_COMPARISON, str(error) if isinstance(error, IncomparableError) else describe_model_error(error)
    if exports is not None:
        judgement.export(exports)
    judgement.verdict = judgement.make_verdict(decision)
    return judgement


def decide(judgement: Judgement) -> Decision:
    """Evaluate the challenger, and the champion where there is another; return the decision."""
    registry, policy, before, model = judgement.registry, judgement.policy, judgement.before, judgement.model
    is_champion = before is not None and before.version == model.digest
    unchanged = KEPT, "it has the champion's weights"
    if judgement.counts and is_champion:
        return unchanged
    # Only a version that is in the registry already may have been rolled back, which the whole log tells.
    if judgement.counts and before is not None and versions.find_version(registry, model.digest):
        _, taken_back = replay_promotions(registry.read_log())
        if back := taken_back.get(model.digest):
            return KEPT, f"{back.by} took it back ({back.reason}); only a person can promote it again"
    judgement.tell(f"evaluates version {model.digest[:12]} on the test split")
    ours = judgement.challenger = evaluate_split(model, judgement.split)
    if not judgement.add_check(checks.check_finite_outputs(ours)):
        return BY_CHECKS, ""
    if before is None:
        above = checks.check_above_constant(ours, judgement.claim_alpha())
        judgement.checks += [checks.check_score(ours, policy), above]
        judgement.best = model.digest
        return BY_CHECKS, f"there is no champion yet, and {above.reason or f'it is {above.name}'}"
    if is_champion:
        judgement.checks.append(checks.check_score(ours, policy))
        return unchanged
    judgement.tell(f"evaluates the champion, version {before.version[:12]}, and compares {ours.samples:,} scores")
    champion = load_stored_model(registry, before.version, before.manifest, model)
    return compare_with_champion(judgement, ours, champion)


def compare_with_champion(judgement: Judgement, ours: Evaluation, champion: SavedModel) -> Decision:
    """Compare the challenger with the champion and with the best version so far; return the decision."""
    policy, model, best = judgement.policy, judgement.model, judgement.best
    slices = group_by_slice(policy.slices, ours.ids, ours.undecoded) if policy.slices else {}
    if not judgement.add_check(
        checks.check_same_task(versions.read_task(model.sidecar), versions.read_task(champion.sidecar))
    ):
        return BY_CHECKS, ""
    theirs = evaluate_stored_model(judgement, champion)
    mine, own = (found.columns.get("truth") for found in (ours, theirs))
    if mine is not None and own is not None and not np.array_equal(mine, own, equal_nan=True):
        raise IncomparableError("the champion's own `sample` or `collate` makes other targets than the model's")
    others = {"champion": theirs}
    if best not in (champion.digest, model.digest):
        try:
            best_model = load_stored_model(judgement.registry, best, "", model)
            others["best version ever"] = evaluate_stored_model(judgement, best_model)
        except IncomparableError:
            if policy.rule == NOT_WORSE:
                raise
    judgement.champion = theirs
    judgement.checks += [
        checks.check_ratio("size", model.bytes / champion.bytes, policy.size_ratio),
        checks.check_ratio("latency", measure_latency_ratio(model, champion, judgement.split), policy.latency_ratio),
        checks.check_score(ours, policy),
    ]
    pairs = {name: checks.compare_evaluations(ours, other) for name, other in others.items()}
    pair = pairs["champion"]
    if not np.any(pair.differences):
        return KEPT, pair.equal
    alpha = judgement.claim_alpha()
    if policy.rule == NOT_WORSE:
        decisive = [checks.check_not_worse(name, pairs[name], policy.margin, alpha) for name in pairs]
    else:
        decisive = [checks.check_superior(pair, alpha)]
    judgement.checks += decisive
    add_vetoes(judgement, ours, theirs, slices)
    sign = 1 if ours.higher_is_better else -1
    if all(sign * ours.score > sign * other.score for other in others.values()):
        judgement.best = model.digest
    return BY_CHECKS, decisive[0].reason


def add_vetoes(
    judgement: Judgement, ours: Evaluation, theirs: Evaluation, slices: Mapping[str, NDArray[np.int64]]
) -> None:
    """Add the Checks of classes, ``slices`` (positions of their samples), labels and likelihoods."""
    model, policy = judgement.model, judgement.policy
    classes = checks.group_by_class(ours, model.classes) if ours.classifies else {}
    pairs = {
        kind: {name: checks.compare_evaluations(ours, theirs, part) for name, part in parts.items()}
        for kind, parts in (("class", classes), ("slice", slices))
        if parts
    }
    if labels := checks.compare_labels(model.classes, ours, theirs):
        pairs["label" if isinstance(model.objective, Multilabel) else "class"] = labels
    for kind, of_kind in pairs.items():
        check, judgement.parts[kind] = checks.check_losses(kind, of_kind, policy)
        judgement.add_check(check)
    if ours.classifies and theirs.classifies:
        judgement.checks += checks.check_likelihoods(ours, theirs, policy)


def load_stored_model(registry: Registry, name: str, manifest: str, challenger: SavedModel) -> SavedModel:
    """Load a version, which runs its code; give it the challenger's objective and limit; else IncomparableError."""
    with translate_model_errors(name, "loaded"), tempfile.TemporaryDirectory() as folder:
        files = download_version(registry, name, Path(folder), manifest)
        model = SavedModel(*files, challenger.settings, challenger.bad_samples)
    if versions.read_task(model.sidecar) == versions.read_task(challenger.sidecar):
        model.objective = challenger.objective
    return model


def evaluate_stored_model(judgement: Judgement, model: SavedModel) -> Evaluation:
    """Return a version's evaluation; IncomparableError if that fails or an output is not finite."""
    with translate_model_errors(model.digest, "evaluated"):
        found = evaluate_split(model, judgement.split)
        found.scores  # noqa: B018  (computed here, where an error of the model's own code is caught)
    if not checks.check_finite_outputs(found).passed:
        raise IncomparableError(f"version {model.digest[:12]} answers with NaN or infinity")
    return found


@contextmanager
def translate_model_errors(version: str, action: str) -> Iterator[None]:
    """Turn exceptions of the block, but NOT_THE_MODELS, into an IncomparableError: the version cannot be ``action``."""
    try:
        yield
    except NOT_THE_MODELS:
        raise
    except Exception as error:
        raise IncomparableError(f"version {version[:12]} cannot be {action}: {describe_model_error(error)}") from error


def describe_model_error(error: Exception) -> str:
    """Return an error as text; print the traceback to stderr unless it is a UserError."""
    if isinstance(error, UserError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def measure_latency_ratio(challenger: SavedModel, champion: SavedModel, split: PreparedSet) -> float:
    """Run both models on one batch by turns; return the challenger's median time as a multiple of the champion's."""
    inputs: dict[SavedModel, Leaves] = {}
    for model in (challenger, champion):
        with closing(read_test_split(model, split, LATENCY_BATCH)) as batches:
            inputs[model] = next(batch.inputs for batch in batches if any(batch.decoded))
    ratios = []
    for number in range(LATENCY_ROUNDS + 1):
        seconds = {}
        for model in (challenger, champion) if number % 2 else (champion, challenger):
            began = time.perf_counter()
            model.compute_outputs(inputs[model])
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            seconds[model] = time.perf_counter() - began
        ratios.append(seconds[challenger] / seconds[champion])
    return median(ratios[1:])  # the first round warms up
