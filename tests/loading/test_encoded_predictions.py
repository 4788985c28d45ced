"""Predictions for encoded images by a model that was trained on such."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from encoded_runs import BASE, labelled, of, quiet, train

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.packing import pack_image_folder
from flyte_ddp.errors import UserError
from flyte_ddp.predict.predict import write_prediction_table
from flyte_ddp.run import run_training
from flyte_ddp.shards.dataset import ShardDataset


class TestPredictions:
    """They are those of the run's own evaluation, whatever the images come from."""

    @staticmethod
    def rows(table: Path) -> list[dict[str, str]]:
        with table.open(newline="") as file:
            return list(csv.DictReader(file))

    def accuracy(self, table: Path) -> float:
        rows = self.rows(table)
        return sum(row["prediction"] == row["truth"] for row in rows) / len(rows)

    @pytest.mark.slow
    def test_predictions_of_held_out_samples(self, shards: Path, tmp_path: Path) -> None:
        """Whatever the seed, and the share for validation, were."""
        result = train(of(shards / "train.json", epochs=1, seed=7, validation_fraction=0.3), tmp_path)
        data = fetch(f"shards:{shards}/train.json", "", tmp_path / "data", progress="off")
        inputs = {"images": None, "dataset": data, "output": tmp_path / "table.csv", "settings": quiet(tmp_path)}
        table = write_prediction_table(result.model, result.sidecar, **inputs, batch_size=50)
        assert 0.3 < result.test_accuracy < 1
        assert self.accuracy(table) == pytest.approx(result.test_accuracy, abs=1e-9)
        keys = {sample["__key__"] for sample in ShardDataset(str(shards / "train.json"), tmp_path / "cache")}
        ids = [row["id"] for row in self.rows(table)]
        assert set(ids) < keys
        assert len(set(ids)) == 150
        with np.load(result.run_folder / "predictions.npz") as kept:
            assert [ids[place] for place in kept["index"]] == kept["names"].tolist()
            first, worst = int(kept["table_rows"]), kept["names"].tolist()
        assert all(f"<span>{name}</span>" in result.report.read_text() for name in worst[first:])

    def test_predictions_of_a_test_set_and_of_its_files(self, tmp_path: Path) -> None:
        folder, tests = labelled(tmp_path / "images"), labelled(tmp_path / "tests", 12)
        hp = replace(
            BASE, dataset=f"image_folder:{folder}", test_dataset=f"image_folder:{tests}", batch_size=9, epochs=6
        )
        result = train(hp, tmp_path)
        data = fetch(hp.dataset, "", tmp_path / "data", test_dataset=hp.test_dataset, progress="off")
        table = write_prediction_table(
            result.model, result.sidecar, images=None, dataset=data, output=tmp_path / "table.csv"
        )
        assert self.accuracy(table) == pytest.approx(result.test_accuracy, abs=1e-9)
        names = sorted(path.relative_to(tests).as_posix() for path in tests.rglob("*.jpg"))
        assert [row["id"] for row in self.rows(table)] == names
        files = write_prediction_table(
            result.model, result.sidecar, images=tests, dataset=None, output=tmp_path / "files.csv"
        )
        expected, found = ([row["score_red"] for row in self.rows(path)] for path in (table, files))
        assert found == expected

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["image_folder", "shards"])
    def test_predictions_of_images_that_cannot_be_decoded(self, kind: str, tmp_path: Path) -> None:
        """They have their names, and their own truth, and not those, or the prediction, of what stands in elsewhere."""
        folder, tests = labelled(tmp_path / "images"), labelled(tmp_path / "tests", 12)
        result = train(replace(BASE, dataset=f"image_folder:{folder}", batch_size=9, epochs=1), tmp_path)
        for name in ("red/6.jpg", "green/10.jpg"):
            (tests / name).write_bytes(b"no image")
        tested = f"image_folder:{tests}"
        if kind == "shards":
            for source in (folder, tests):
                pack_image_folder(str(source), tmp_path / "packed", name=source.name, per_shard=5, progress="off")
            folder, tested = tmp_path / "packed" / "images.json", f"shards:{tmp_path}/packed/tests.json"
        data = fetch(f"{kind}:{folder}", "", tmp_path / "data", test_dataset=tested, progress="off")

        def rows(bad_samples: int) -> dict[str, dict[str, str]]:
            inputs = {"images": None, "dataset": data, "output": tmp_path / "table.csv", "settings": quiet(tmp_path)}
            table = write_prediction_table(
                result.model, result.sidecar, **inputs, batch_size=5, bad_samples=bad_samples
            )
            return {row["id"].removesuffix(".jpg"): row for row in self.rows(table)}

        with pytest.raises(UserError, match="2 such samples, more than bad_samples=1"):
            rows(1)
        found = rows(2)
        assert {name: row["truth"] for name, row in found.items()} == {name: name.partition("/")[0] for name in found}
        assert len(found) == 12
        empty = {
            name for name, row in found.items() if not row["prediction"] and not row["score"] and not row["score_red"]
        }
        assert empty == {"red/6", "green/10"}

    def test_a_model_for_other_images_is_refused(self, shards: Path, digits: Path, tmp_path: Path) -> None:
        hp = Hyperparameters(epochs=1, max_steps=1, num_ranks=1)
        result = run_training(hp, digits, tmp_path / "run", quiet(tmp_path))
        data = fetch(f"shards:{shards}/train.json", "", tmp_path / "data", progress="off")
        with pytest.raises(UserError, match="the model takes 1 x 8 x 8; predict with a model that was trained on such"):
            write_prediction_table(
                result.model, result.sidecar, images=None, dataset=data, output=tmp_path / "table.csv"
            )
        assert not (tmp_path / "table.csv").exists()
