"""Predictions for encoded images by a model that was trained on such: those of the run's own evaluation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from encoded_runs import BASE, labelled, of, quiet, train
from predictions import predict_rows

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.packing import pack_image_folder
from flyte_ddp.run import Result
from flyte_ddp.shards.dataset import ShardDataset

Rows = list[dict[str, str]]


def predict(result: Result, folder: Path, dataset: str = "", tests: str = "", **options) -> Rows:
    """Predict with a run's model, and return the rows of the table."""
    data = fetch(dataset, "", folder / "predicted", test_dataset=tests, progress="off") if dataset else None
    given = {"dataset": data, "settings": quiet(folder), **options}
    return predict_rows(result.model, result.sidecar, folder / "table.csv", **given)


def accuracy(rows: Rows) -> float:
    return sum(row["prediction"] == row["truth"] for row in rows) / len(rows)


@pytest.mark.slow
def test_predictions_of_held_out_samples(shards: Path, tmp_path: Path) -> None:
    """Whatever the seed, and the share for validation, were."""
    result = train(of(shards / "train.json", epochs=1, seed=7, validation_fraction=0.3), tmp_path)
    rows = predict(result, tmp_path, f"shards:{shards}/train.json", batch_size=50)
    assert 0.3 < result.test_accuracy < 1
    assert accuracy(rows) == pytest.approx(result.test_accuracy, abs=1e-9)
    keys = {sample["__key__"] for sample in ShardDataset(str(shards / "train.json"), tmp_path / "cache")}
    ids = [row["id"] for row in rows]
    assert set(ids) < keys
    assert len(set(ids)) == 150
    with np.load(result.run_folder / "predictions.npz") as kept:
        assert [ids[place] for place in kept["index"]] == kept["names"].tolist()
        first, worst = int(kept["table_rows"]), kept["names"].tolist()
    assert all(
        f"<span>{'sample ' if name.isdecimal() else ''}{name}</span>" in result.report.read_text()
        for name in worst[first:]
    )


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hyperparameters, Result]:
    """A run on images of three colours with a test set of its own."""
    place = tmp_path_factory.mktemp("learnt")
    folder, tests = labelled(place / "images"), labelled(place / "tests", 12)
    hp = replace(BASE, dataset=f"image_folder:{folder}", test_dataset=f"image_folder:{tests}", batch_size=9, epochs=6)
    return hp, train(hp, place)


def test_predictions_of_a_test_set_and_of_its_files(learnt: tuple[Hyperparameters, Result], tmp_path: Path) -> None:
    hp, result = learnt
    tests = Path(hp.test_dataset.partition(":")[2])
    rows = predict(result, tmp_path, hp.dataset, hp.test_dataset)
    assert accuracy(rows) == pytest.approx(result.test_accuracy, abs=1e-9)
    assert [row["id"] for row in rows] == sorted(path.relative_to(tests).as_posix() for path in tests.rglob("*.jpg"))
    of_files = predict(result, tmp_path, images=tests)
    assert [row["score_red"] for row in of_files] == [row["score_red"] for row in rows]


@pytest.mark.parametrize("kind", ["image_folder", "shards"])
def test_predictions_of_images_that_cannot_be_decoded(kind: str, learnt, tmp_path: Path) -> None:
    """They have their names, and their own truth, and not those, or the prediction, of what stands in elsewhere."""
    folder, tests = labelled(tmp_path / "images"), labelled(tmp_path / "tests", 12)
    for name in ("red/6.jpg", "green/10.jpg"):
        (tests / name).write_bytes(b"no image")
    if kind == "shards":
        for source in (folder, tests):
            pack_image_folder(str(source), tmp_path / "packed", name=source.name, samples_per_shard=5, progress="off")
        folder, tests = tmp_path / "packed" / "images.json", tmp_path / "packed" / "tests.json"
    sets = f"{kind}:{folder}", f"{kind}:{tests}"
    with pytest.raises(UserError, match="2 samples cannot be decoded, more than bad_samples=1"):
        predict(learnt[1], tmp_path, *sets, batch_size=5, bad_samples=1)
    rows = predict(learnt[1], tmp_path, *sets, batch_size=5, bad_samples=2)
    assert len(rows) == 12
    assert all(row["id"].startswith(f"{row['truth']}/") for row in rows)
    empty = {row["id"] for row in rows if not (row["prediction"] or row["score"] or row["score_red"])}
    assert {name.removesuffix(".jpg") for name in empty} == {"red/6", "green/10"}
