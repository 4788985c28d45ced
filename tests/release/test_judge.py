"""Judgements of real models on real digits."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gate import Gate
from predictions import predict_rows
from training_runs import QUIET, train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UnreachableError, UserError, install_hint
from flyte_ddp.core.models.saving import save_model
from flyte_ddp.core.models.sidecar import Sidecar
from flyte_ddp.datasets import image_arrays, open_arrays
from flyte_ddp.datasets.prepared_set import PreparedSet, write_prepared_set
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.release import champion, judge
from flyte_ddp.release.evaluation import Evaluation, evaluate_split
from flyte_ddp.release.page import write_verdict_page
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.promotion import load_champion, promote_version, roll_back_champion, store_version
from flyte_ddp.release.promotion_log import Entry
from flyte_ddp.release.registry import Registry
from flyte_ddp.run import Result


class DigitsGate(Gate):
    """A gate that can also change the good model, and the digits."""

    def alter(self, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
        """Another model than the good one, of which weights or sidecar differ."""
        model, folder = self.runs["good"], self.folder / "altered"
        weights, sidecar = torch.load(model.model, weights_only=True), json.loads(model.sidecar.read_text())
        change(weights, sidecar)
        save_model(folder, weights, Sidecar.from_json_value(sidecar, "altered"))
        return folder

    def change_data(self, name: str, chosen: Any = slice(None), classes: Sequence[str] = ()) -> Path:
        """The digits with some of their test samples only, or with other names of classes."""
        found, folder = open_arrays(self.data), self.folder / name
        arrays = found.train_inputs, found.train_targets, found.test_inputs[chosen], found.test_targets[chosen]
        folder.mkdir()
        write_prepared_set(image_arrays(*arrays, classes or found.classes, name="digits"), folder, {})
        return folder


@pytest.fixture(scope="module")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """A weak one, a good one and another good one."""
    folder = tmp_path_factory.mktemp("models")
    settings = {"weak": {"epochs": 3}, "good": {"epochs": 10}, "other": {"epochs": 10, "seed": 1}}
    return {
        name: train_in(folder / name, Hyperparameters(num_ranks=1, **values), digits, QUIET)
        for name, values in settings.items()
    }


@pytest.fixture
def gate(runs: dict[str, Result], digits: Path, tmp_path: Path) -> DigitsGate:
    (tmp_path / "exports").mkdir()
    return DigitsGate(runs, Registry(str(tmp_path / "registry"), "digits"), digits, tmp_path)


def scale(weights: dict[str, Any], _: dict[str, Any]) -> None:
    for name in list(weights)[-2:]:
        weights[name] *= 2


def make_champion(registry: Registry, version: Entry, best: str = "") -> Entry:
    """Append an entry by which a version is champion again."""
    values = {"version": version.version, "manifest": version.manifest, "best": best or version.best}
    return registry.append_entry(registry.read_log()[-1], by="x", action="promote", reason="again", **values)


def test_a_promotion_and_what_follows_it(gate: DigitsGate) -> None:
    first = gate.release("weak").verdict
    assert first.promotes
    assert first.reason == "there is no champion yet, and the model is better than the best constant answer"
    assert first.challenger_score == pytest.approx(gate.runs["weak"].test_accuracy)
    verdict = gate.release("good").verdict
    page = (gate.folder / "page.html").read_text()
    assert verdict.promotes, verdict.reason
    assert (verdict.look, verdict.samples, verdict.champion) == (2, 297, first.challenger)
    assert verdict.best == verdict.challenger
    assert verdict.champion_score == pytest.approx(gate.runs["weak"].test_accuracy)
    tables = {}
    for name in ("weak", "good"):
        files = gate.runs[name].model, gate.runs[name].sidecar
        rows = predict_rows(*files, gate.folder / f"{name}.csv", dataset=gate.data, settings=QUIET)
        tables[name] = [row["prediction"] == row["truth"] for row in rows]
    pairs = [*zip(tables["good"], tables["weak"], strict=True)]
    gained, lost = pairs.count((True, False)), pairs.count((False, True))
    assert f"{gained} samples gained and {lost} lost of 297" in verdict.reason
    champion, sidecar = load_champion(gate.registry.address, "digits")
    assert sidecar.digests.weights == verdict.challenger
    weights = torch.load(gate.runs["good"].model, weights_only=True)
    assert all(torch.equal(tensor, weights[key]) for key, tensor in champion.state_dict().items())
    again = gate.release("good").verdict
    assert (again.decision, again.reason) == ("keep", "this model has the champion's weights")
    kept = gate.release("other").verdict
    assert (kept.decision, kept.look) == ("keep", 3)
    assert "samples gained" in kept.reason
    assert gate.release("other").verdict.look == 3, "the same two models"
    assert [entry.version for entry in gate.registry.read_log()] == [first.challenger, verdict.challenger]
    assert "Only the challenger is right" in page
    assert page.count("<svg") == 2
    assert "digits: Promote" in page


def test_a_look_at_the_champion_itself(gate: DigitsGate) -> None:
    """Which decides nothing, and so is none that counts."""
    gate.release("good")
    found = gate.judge("good", may_promote=False)
    assert found.verdict.reason.startswith(
        f"this model is the champion, with accuracy {100 * found.verdict.challenger_score:.2f}"
    )
    assert found.verdict.challenger_score == pytest.approx(gate.runs["good"].test_accuracy)
    assert write_verdict_page(found, "digits", gate.folder / "page.html").read_text().count("<svg") == 1
    verdict = gate.judge("weak", may_promote=False).verdict
    assert verdict.look == 0
    assert verdict.alpha == pytest.approx(0.05 * 6 / math.pi**2), "as of a first look"
    assert gate.release("weak").verdict.look == 2
    elsewhere = Registry(str(gate.folder / "elsewhere"), "digits")
    found = gate.judge("good", registry=elsewhere, may_promote=False)
    assert found.verdict.describe().startswith("would be promoted: there is no champion yet")
    assert "digits: Would be promoted" in write_verdict_page(found, "digits", gate.folder / "page.html").read_text()


def test_useless_weights_are_kept_back(gate: DigitsGate) -> None:
    verdict = gate.release(gate.alter(lambda weights, _: [tensor.zero_() for tensor in weights.values()])).verdict
    assert (verdict.decision, verdict.look) == ("keep", 1)
    assert verdict.reason.startswith(
        "the best constant answer has accuracy 11.11\N{NO-BREAK SPACE}%, and the model has"
    )


def test_a_first_model_whose_logits_are_no_numbers(gate: DigitsGate) -> None:
    """It is not exported, but its verdict says how many samples it was judged on."""
    model = gate.alter(lambda weights, _: [tensor.fill_(math.nan) for tensor in weights.values()])
    first = gate.judge(model, exports=gate.folder / "exports")
    page = write_verdict_page(first, "digits", gate.folder / "page.html").read_text()
    assert "<span>Challenger</span>" in page
    assert "<h1>digits: No champion yet</h1>" in page
    assert first.verdict.describe() == "there is no champion yet: sample 0 gives NaN or infinity"
    assert first.verdict.look == 0, "nothing is decided by the test split where a logit is no number"
    assert not [*(gate.folder / "exports").iterdir()]
    zeros = (open_arrays(gate.data).test_targets == 0).mean()  # class 0 is predicted for NaN
    assert (first.verdict.samples, first.verdict.challenger_score) == (297, pytest.approx(zeros))


@pytest.mark.parametrize("gone", ["model.pt", "its answers"])
def test_a_champion_that_cannot_be_evaluated(gate: DigitsGate, gone: str, monkeypatch, capfd) -> None:
    """Nobody takes its place without a person's word; the cause is in the verdict, and its traceback on stderr."""
    gate.release("weak")
    entry = gate.registry.read_champion()
    assert entry is not None
    if gone == "its answers":

        def failing(model: SavedModel, split: PreparedSet, **options: Any) -> Evaluation:
            return evaluate_split(model, split, **options) if model.digest != entry.version else 1 / 0  # type: ignore[return-value]

        monkeypatch.setattr(champion, "evaluate_split", failing)
    else:
        Path(gate.registry.address_of("versions", entry.version, gone)).unlink()
    # The export, which a person who promotes the model needs, is a matter of one kind of failure.
    exports = gate.folder / "exports" if gone == "model.pt" else None
    verdict = gate.judge("good", exports=exports).verdict
    assert verdict.decision == "no_comparison"
    said = (
        "ZeroDivisionError: division by zero"
        if gone == "its answers"
        else f"{gate.registry.address_of('versions', entry.version, 'model.pt')}: is missing"
    )
    assert verdict.reason.startswith(f"version {entry.version[:12]} cannot be evaluated: {said}")
    assert ("in failing" in capfd.readouterr().err) == (gone == "its answers")
    assert (verdict.look, verdict.challenger_score) == (0, pytest.approx(gate.runs["good"].test_accuracy))
    assert (gate.folder / "exports/model.onnx").exists() == (gone == "model.pt")
    assert gate.registry.read_champion() == entry
    with pytest.raises(UserError, match="cannot be evaluated"):
        gate.judge("good", may_promote=False)


def test_an_outage_is_no_verdict(gate: DigitsGate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which another try may have; nothing is known of the champion."""
    gate.release("weak")

    def failing(*_: object) -> None:
        raise UnreachableError("HTTP 503")

    monkeypatch.setattr(champion, "download_version", failing)
    with pytest.raises(UnreachableError, match="HTTP 503"):
        gate.release("good")


def test_both_models_may_meet_as_many_undecodable_images(gate: DigitsGate, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the challenger's training: one that came later must not keep the champion for ever."""
    gate.release("weak")
    allowed: list[int] = []

    def counting(model: SavedModel, split: PreparedSet, **options: Any) -> Evaluation:
        allowed.append(model.bad_samples)
        return evaluate_split(model, split, **options)

    for module in (judge, champion):
        monkeypatch.setattr(module, "evaluate_split", counting)
    gate.judge(gate.alter(lambda _, sidecar: sidecar["hyperparameters"].update(bad_samples=3)))
    assert allowed == [3, 3]


def test_a_model_that_answers_as_the_champion_is_kept(gate: DigitsGate) -> None:
    """Other weights, and the same samples right: that is no look at the test split."""
    gate.release("good")
    twin = gate.alter(scale)
    verdict = gate.release(twin).verdict
    assert (verdict.decision, verdict.reason) == ("keep", "both models have the same score on each sample")
    assert (verdict.look, verdict.champion_score) == (0, pytest.approx(gate.runs["good"].test_accuracy))


@pytest.mark.parametrize("export", ["if_possible", "required", "off"])
def test_a_model_without_an_export(gate: DigitsGate, export: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    verdict = gate.judge("good", policy=Policy(export=export), exports=gate.folder / "exports").verdict
    said = f"not exported: onnxscript is not installed: {install_hint('export')}"
    assert [check.reason for check in verdict.checks if check.name == "export"] == [said] * (export != "off")
    assert verdict.decision == ("keep" if export == "required" else "promote")
    assert not [*(gate.folder / "exports").iterdir()]


def test_what_a_person_took_back_only_a_person_promotes_again(gate: DigitsGate) -> None:
    """Though tonight's training gives the same bits, and they are still better than the champion."""
    weak = gate.release("weak").verdict.challenger
    good = gate.release("good").verdict.challenger
    back = roll_back_champion(gate.registry, "it hallucinates", by="ann")
    assert (back.version, back.best) == (weak, weak), "the best version is taken back, too"
    verdict = gate.release("good").verdict
    assert (verdict.decision, verdict.look) == ("keep", 0)
    assert verdict.reason.startswith("ann rolled this version back (it hallucinates)")
    assert promote_version(gate.registry, good, "it does not", by="bob").version == good
    assert gate.release("good").verdict.reason == "this model has the champion's weights"
    roll_back_champion(gate.registry, "it does", by="ann")
    assert "rolled this version back (it does)" in gate.release("good").verdict.reason
    other = gate.release("other").verdict
    assert (other.promotes, other.best) == (True, other.challenger)


def test_other_classes_are_for_a_person(gate: DigitsGate) -> None:
    names = [f"digit {number}" for number in range(10)]
    gate.release("weak")
    renamed = gate.alter(lambda _, sidecar: sidecar.update(classes=names))
    data = gate.change_data("data", classes=names)
    verdict = gate.judge(renamed, data).verdict
    assert (verdict.decision, verdict.look) == ("keep", 0)
    assert verdict.reason.startswith("the classes changed from 0, 1, 2, 3, 4, ... to digit 0, digit 1,")
    assert verdict.reason.endswith("promote it by hand")


def test_another_test_split_judges_anew(gate: DigitsGate) -> None:
    gate.release("good")
    other = gate.change_data("other", slice(200))
    first, second = gate.release("other").verdict, gate.release("other", other).verdict
    assert first.test_digest != second.test_digest
    assert (first.look, second.look, second.samples) == (2, 1, 200)
    lacking = gate.change_data("lacking", open_arrays(gate.data).test_targets != 4)
    found = gate.judge("weak", lacking)
    assert {row.name for row in found.part_checks["class"]} == {*"012356789"}


def test_a_slice_that_loses(gate: DigitsGate) -> None:
    """Of the samples that the good model loses against the other one, made many by being of one slice."""
    gate.release("good")
    found = gate.release("weak")
    assert found.challenger is not None
    assert found.champion is not None
    lost = np.flatnonzero(found.champion.correct & ~found.challenger.correct)[:30]
    table = gate.folder / "slices.csv"
    table.write_text("id,slice\n999,hard\n")
    wrong = gate.judge("weak", policy=Policy(slices=str(table))).verdict
    assert wrong.decision == "no_comparison"
    assert wrong.reason.endswith("id '999' in line 2 is not in the test split; correct it")
    assert store_version(gate.registry, *found.model.files, wrong, {}).name == wrong.challenger
    table.write_text("id,slice\n" + "".join(f"{number},hard\n" for number in lost))
    reason = gate.release("weak", policy=Policy(slices=str(table))).verdict.reason
    assert "slice 'hard' loses: -100.00 points: 0 samples gained and 30 lost of 30" in reason


def test_not_worse_looks_at_the_best_version_ever(gate: DigitsGate) -> None:
    """The champion is a weak one by a person's word; what is better than that is still worse than the best."""
    lenient = Policy(rule="not_worse", margin=0.02)
    gate.release("weak")
    gate.release("good")
    weak, good = gate.registry.read_log()
    make_champion(gate.registry, weak, best=good.version)
    checks = {check.name: check.passed for check in gate.judge("other", policy=lenient).verdict.checks}
    assert checks["not worse than the champion"]
    assert "not worse than the best version ever" in checks
    equal = Policy(rule="not_worse", margin=0.05, nll_rise=10.0)
    verdict = gate.judge(gate.alter(scale), policy=equal).verdict
    assert (verdict.promotes, verdict.best) == (True, good.version), verdict.reason
    verdict = gate.judge("other").verdict
    assert (verdict.promotes, verdict.best) == (True, good.version), "one night under superior resets no anchor"
    shutil.rmtree(gate.registry.address_of("versions", good.version))
    verdict = gate.judge("other", policy=lenient).verdict
    assert verdict.decision == "no_comparison"
    assert verdict.reason.startswith(f"version {good.version[:12]} cannot be evaluated")
