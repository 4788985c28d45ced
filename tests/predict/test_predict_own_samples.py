"""Predictions of shards whose samples the user's own code decodes, as in the model's training."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli import HELPERS
from encoded_runs import BASE, quiet
from image_folders import stored
from PIL import Image
from predictions import predict_rows
from sklearn import metrics
from tars import shard_bytes

from flyte_ddp.datasets import fetch
from flyte_ddp.predict.predict import read_sample_setting
from flyte_ddp.run import run_training
from flyte_ddp.shards.scanning import create_index

pytestmark = pytest.mark.slow

LABELS = ["left", "bright", "dark"]


def write_shards(folder: Path, name: str, samples: int, *, damaged: int = -1) -> str:
    """Write a shard with an image and labels as JSON in each sample, and no class; return the data set's name."""
    random = np.random.default_rng(samples)
    members = {}
    for sample in range(samples):
        left, bright = random.integers(0, 2, 2).tolist()
        pixels = random.integers(0, 60, (12, 12, 3), dtype=np.uint8)
        pixels[:, :6] += np.uint8(60 * left)
        pixels += np.uint8(120 * bright)
        labels = json.dumps({"labels": [left, bright, 1 - bright]}).encode()
        members[f"{sample:03d}"] = {
            ".png": b"none" if sample == damaged else stored(Image.fromarray(pixels), "PNG"),
            ".json": labels,
        }
    (folder / f"{name}.tar").write_bytes(shard_bytes(members))
    create_index([f"{folder}/{name}.tar"], folder / f"{name}.json", classes=LABELS, progress="off")
    return f"shards:{folder}/{name}.json"


def test_the_test_split_is_decoded_by_the_users_code(tmp_path: Path, monkeypatch) -> None:
    """Its measures are those of the run's evaluation; of a sample that cannot be decoded nobody knows the truth."""
    monkeypatch.chdir(HELPERS)
    own = "own_loading:members"
    sets = {"dataset": write_shards(tmp_path, "train", 120), "test_dataset": write_shards(tmp_path, "test", 40)}
    hp = replace(BASE, **sets, objective="multilabel", sample=own, model="small_cnn", image_size=12, num_ranks=1)
    settings = quiet(tmp_path, loaders=1)
    data = fetch(hp.dataset, "", tmp_path / "data", test_dataset=hp.test_dataset, sample=own, progress="off")
    result = run_training(hp, data, tmp_path / "run", settings)
    assert read_sample_setting(result.sidecar) == own

    def predict(dataset: Path, bad_samples: int) -> list[dict[str, str]]:
        options = {"dataset": dataset, "batch_size": 7, "bad_samples": bad_samples, "settings": settings}
        return predict_rows(result.model, result.sidecar, tmp_path / "table.csv", **options)

    rows = predict(data, 0)
    assert [row["id"] for row in rows] == [f"{sample:03d}" for sample in range(40)]
    probabilities, truths = (
        np.array([[float(row[f"{kind}_{name}"]) for name in LABELS] for row in rows])
        for kind in ("probability", "truth")
    )
    f1 = metrics.f1_score(truths, probabilities >= 0.5, average="macro")
    assert f1 == pytest.approx(result.measures["f1"], abs=1e-6)
    assert 0 < truths.mean() < 1

    dataset = write_shards(tmp_path, "damaged", 30, damaged=11)
    damaged = fetch(dataset, "", tmp_path / "other", test_dataset=dataset, sample=own, progress="off")
    rows = predict(damaged, 1)
    [empty] = [row for row in rows if not row["prediction"]]
    assert empty["id"] == "011"
    assert all(value in ("", "unknown") for name, value in empty.items() if name != "id")
    assert all(row["truth"] for row in rows if row != empty)
