"""A table from its arrays to a champion and its predictions, by the workflows as users call them."""

import csv
import json
import re
from pathlib import Path

import plain_sets
import pytest
import torch
from cli import HELPERS, ROOT, Ended, pyflyte
from image_folders import image_files, write_files

from flyte_ddp import load_champion

HP = {"dataset": "plain_sets:table", "model": "plain_sets:linear", "num_ranks": 1, "batch_size": 20}


def names_images(text: str) -> bool:
    return bool(re.search("image|picture|pixel", re.sub("<[^>]*>", " ", text), re.IGNORECASE))


@pytest.mark.slow
def test_champion_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first champion, a better one that replaces it, its predictions; nothing speaks of images."""

    def run(module: str, workflow: str, *arguments: str) -> Ended:
        named = (workflow, "--model_name", "rows", *arguments)
        return pyflyte("run", str(ROOT / f"workflows/{module}.py"), *named, home=tmp_path, directory=HELPERS)

    for values, outcome in (
        ({"epochs": 1, "learning_rate": 0.001}, "promoted: there is no champion yet"),
        ({"epochs": 30, "learning_rate": 0.05}, r"promoted: \+\S+ points: \d+ samples gained"),
    ):
        policy = json.dumps({"latency_ratio": 1000, "alpha": 0.4})
        released = run("release", "release_wf", "--hp", json.dumps({**HP, **values}), "--policy", policy)
        assert released.exit_code == 0, released.output
        assert re.search(outcome, released.output), released.output
        assert not names_images(released.output)
    monkeypatch.chdir(HELPERS)
    model, sidecar = load_champion(str(tmp_path / "runs/registry"), "rows")
    predicted = run("prediction", "predict_wf", "--dataset", "plain_sets:table")
    assert predicted.exit_code == 0, predicted.output
    [table] = (tmp_path / "runs").glob("predictions-*/predictions.csv")
    logits = model(torch.from_numpy(plain_sets.table("").test_inputs))
    found = [row["prediction"] for row in csv.DictReader(table.read_text().splitlines())]
    assert found == [sidecar["classes"][place] for place in logits.argmax(1).tolist()]
    pages = [*(tmp_path / "runs").glob("verdicts-*/verdict.html"), table.with_suffix(".html")]
    shown = [page.read_text().partition("<body")[2] for page in pages]
    assert any("Only the challenger is right" in text for text in shown)
    assert not any(map(names_images, shown))
    card = (tmp_path / "runs/registry/rows/versions" / sidecar["digests"]["weights"] / "README.md").read_text()
    assert "| Input | float [4] |" in card
    assert "image-classification" not in card
    images = write_files(tmp_path / "images", image_files("a.png"))
    refused = run("prediction", "predict_wf", "--images", str(images))
    assert refused.panel == "the model takes float [4], no images; give a data set of such samples"


OWN_NET = """
import math
from torch import nn

def net(num_classes, input_shape):
    return nn.Sequential(nn.Linear(math.prod(input_shape), 32), nn.{name}(), nn.Linear(32, num_classes))
"""


@pytest.mark.slow
def test_a_champion_keeps_its_score_when_its_code_has_changed(tmp_path: Path) -> None:
    (tmp_path / "plain_sets.py").write_text((HELPERS / "plain_sets.py").read_text())
    hp = {**HP, "model": "own_net:net", "epochs": 20, "learning_rate": 0.05}
    verdicts = []
    for seed, name in enumerate(("ReLU", "Sigmoid")):
        (tmp_path / "own_net.py").write_text(OWN_NET.format(name=name))
        given = ("--hp", json.dumps({**hp, "seed": seed}), "--policy", '{"latency_ratio": 1000, "export": "off"}')
        command = ("run", str(ROOT / "workflows/release.py"), "release_wf", "--model_name", "rows", *given)
        ended = pyflyte(*command, home=tmp_path, directory=tmp_path)
        assert ended.exit_code == 0, ended.output
        [file] = (tmp_path / "runs/registry/rows").glob(f"judgements/*/verdicts/{seed + 1:08}-*.json")
        verdicts.append(json.loads(file.read_text()))
    assert verdicts[1]["champion"] == verdicts[0]["challenger"]
    assert verdicts[1]["champion_score"] == verdicts[0]["challenger_score"]
