"""The card of a version: its numbers are the verdict's."""

import json
import re
from pathlib import Path

import pytest
from gate import Gate
from training_runs import train_in

from flyte_ddp import storage
from flyte_ddp.config import Hyperparameters
from flyte_ddp.release.documents import render_model_card
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.verdict import Verdict
from flyte_ddp.release.versions import read_version
from flyte_ddp.text.formatting import name_measure

HP = Hyperparameters(num_ranks=1, epochs=4, deterministic=True)


@pytest.fixture(scope="module")
def version(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a second champion, as texts."""
    folder = tmp_path_factory.mktemp("releases")
    runs = {
        str(hp.epochs): train_in(folder / str(hp.epochs), hp, digits)
        for hp in (Hyperparameters(num_ranks=1, epochs=2), HP)
    }
    gate = Gate(runs, Registry(str(folder / "registry"), "my-digits"), digits, folder)
    digests = [gate.release(name).model.digest for name in runs]
    registry, stored = gate.registry, read_version(gate.registry, digests[1])
    names = [name for name in stored.files if name != "model.pt"]
    return {name: storage.read_file(registry.at("versions", stored.name, name)).decode() for name in names}


def test_the_cards_numbers_are_the_sidecars_and_the_verdicts(version: dict[str, str]) -> None:
    sidecar, verdict = json.loads(version["model.json"]), Verdict.from_json(version["verdict.json"])
    body = version["README.md"]
    assert body.startswith("# my-digits\n")
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]*) \|$", body, re.MULTILINE))
    for name in ("accuracy", "balanced_accuracy", "f1", "loss"):
        assert float(rows[f"Test {name_measure(name)}"]) == sidecar["metrics"][f"test_{name}"]
    assert rows["Version (SHA-256 of the weights)"] == sidecar["digests"]["weights"] == verdict.challenger
    assert rows["License"] == rows["Limitations"] == "not stated"
    assert {name: rows[name] for name in sidecar["hyperparameters"]} == {
        name: str(value) for name, value in sidecar["hyperparameters"].items()
    }
    for check in verdict.checks:
        cells = check.name, check.shown, check.rule, "yes" if check.passed else "no"
        assert f"| {' | '.join(' '.join(cell.split()) for cell in cells)} |" in body
    assert f"{verdict.decision}: {verdict.reason}. Judged {verdict.time} on {verdict.samples} test samples." in body


def test_what_is_tested_on_another_set_says_so(version: dict[str, str]) -> None:
    sidecar, verdict = json.loads(version["model.json"]), Verdict.from_json(version["verdict.json"])
    sidecar["hyperparameters"] |= {"test_dataset": "shards:s3://bucket/test.json", "init_from": "s3://bucket/w.pt"}
    card = render_model_card("x", sidecar, verdict, ()).decode()
    assert "| Data set | digits |" in card
    assert "| Test set | shards:s3://bucket/test.json |" in card
    assert "| Started from | s3://bucket/w.pt |" in card


def test_the_card_of_a_table_speaks_of_no_images(version: dict[str, str]) -> None:
    sidecar, verdict = json.loads(version["model.json"]), Verdict.from_json(version["verdict.json"])
    use = {}
    for kind in ("images", "table"):
        if kind == "table":
            sidecar["input"] = {"form": "leaf", "leaves": {"": {"shape": [4], "dtype": "float"}}}
        card = render_model_card("x", sidecar, verdict, ["model.onnx"]).decode()
        use[kind] = card.partition("`model.onnx` is the same for ONNX")[2]
    assert (
        "it takes `images`, uint8 [N, height, width, channels] of any size, upright, and gives `logits`"
        in use["images"]
    )
    assert "it takes its inputs by name (float32, int64 or bool), and gives its outputs by name. On all" in use["table"]
    assert not re.search("image|uint8|logits", use["table"])
