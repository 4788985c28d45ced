"""Pictures that the user's own code reads on demand: batches, trainings, and what is made of their models."""

import importlib
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import picture_sets
import pytest
import torch
from cli import ROOT
from encoded_runs import quiet
from picture_sets import SIDE
from predictions import predict_rows
from s3_server import s3_server
from surroundings import set_variables
from tars import npy_bytes, shard_bytes
from training_runs import losses, train_in, weights

from flyte_ddp import arrays
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.datasets import fetch, open_prepared
from flyte_ddp.plans.opened_data import OpenedData
from flyte_ddp.plans.resolve import detect_hardware
from flyte_ddp.shards.scanning import create_index
from flyte_ddp.validation.profiling import compute_profile

pytestmark = pytest.mark.usefixtures("user_models")

HP = Hyperparameters(
    dataset="picture_sets:on_demand_classes", model="picture_sets:Model", epochs=2, batch_size=8, num_ranks=1,
    precision="fp64", log_interval=1, learning_rate=0.05, schedule="constant", validation_fraction=0.2,
)  # fmt: skip
OBJECTIVES = {"classes": "classification", "labels": "multilabel", "masks": "segmentation"}


def import_printed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Write a module that the document prints into the folder, which becomes the working directory; import it."""
    printed = (ROOT / "docs/own-data.md").read_text().partition(f"# {name}.py")[2]
    (folder / f"{name}.py").write_text(printed.partition("\n")[2].partition("```")[0].replace("/tmp", str(folder)))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def prepare(name: str, folder: Path, source: str = "") -> Path:
    return fetch(f"picture_sets:{name}", source, folder / name, progress="off")


def load_all(name: str, hp: Hyperparameters, folder: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of two epochs, of the validation and of the test split."""
    data = open_prepared(prepare(name, folder))
    splits = OpenedData(hp, data).open_splits(detect_hardware(hp), torch.device("cpu"), quiet(folder, loaders=2))
    with closing(splits):
        training = [
            splits.training.load_batch(samples, epoch)
            for epoch in range(2)
            for samples in splits.training.order.batches(epoch, 8)
        ]
        others = [
            batch for split in (splits.validation, splits.test) for _, batch in split.load_evaluation_batches(5, 0, 1)
        ]
        return [(batch.inputs, batch.targets) for batch in training + others]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "augment"), [("classes", "crop_flip"), ("labels", "none"), ("masks", "crop")])
def test_batches_are_those_of_the_same_pictures_in_arrays(kind: str, augment: str, tmp_path: Path) -> None:
    hp = replace(HP, augment=augment, objective=OBJECTIVES[kind])
    read = load_all(f"on_demand_{kind}", hp, tmp_path)
    stored = load_all(f"in_arrays_{kind}", hp, tmp_path)
    assert len(read) == len(stored) == 2 * 3 + 2 + 3
    for (images, targets), (expected, their_targets) in zip(read, stored, strict=True):
        assert images.dtype == torch.uint8
        assert torch.equal(images, expected)
        assert targets.dtype == their_targets.dtype
        assert torch.equal(targets.nan_to_num(-1.0), their_targets.nan_to_num(-1.0))


@pytest.mark.slow
def test_photos_with_several_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's, trained, predicted and looked through."""
    photos, source = import_printed("photos", tmp_path, monkeypatch), tmp_path / "files"
    source.mkdir()
    picture_sets.write_photos(source)
    hp = replace(
        HP, dataset="photos:photos", data_source=str(source), objective="multilabel", image_size=32,
        augment="crop_flip", epochs=1,
    )  # fmt: skip
    data = fetch(hp.dataset, str(source), tmp_path / "data", progress="off")
    one = train_in(tmp_path / "one", hp, data)
    files = one.model, one.sidecar
    rows = predict_rows(*files, tmp_path / "table.csv", dataset=data, settings=quiet(tmp_path))
    assert [row["id"] for row in rows] == [*map(str, range(20))]
    tests = photos.Photos(source, "test")
    truths = np.stack([tests[number][1] for number in range(20)])

    assert np.array_equal([[float(row[f"truth_{label}"]) for label in picture_sets.LABELS] for row in rows], truths)

    profile = compute_profile(data, quiet(tmp_path, loaders=2))
    assert profile.targets == "labels"
    assert profile.test.labels == {str(place): int(total) for place, total in enumerate(truths.sum(0))}
    assert profile.training.statistics["types of inputs"] == {"uint8 [? x 224 x 3]": 40}


@pytest.mark.slow
def test_the_network_gets_normalised_pictures(tmp_path: Path) -> None:
    """Logits of the saved model, given each test picture by Pillow, NumPy and ImageNet's mean and deviation."""
    data = prepare("on_demand_classes", tmp_path)
    result = train_in(tmp_path / "run", HP, data)
    model = picture_sets.Model(3, (3, SIDE, SIDE + 2))
    model.load_state_dict(weights(result))
    pixels = np.stack([picture_sets.draw_pixels(number) for number in range(30, 41)]) / 255
    normal = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    logits = model.float()(torch.tensor(normal.transpose(0, 3, 1, 2), dtype=torch.float32))
    files = result.model, result.sidecar
    rows = predict_rows(*files, tmp_path / "table.csv", dataset=data, settings=quiet(tmp_path))
    assert [row["prediction"] for row in rows] == ["abc"[label] for label in logits.argmax(1)]
    assert [row["truth"] for row in rows] == ["abc"[number % 3] for number in range(30, 41)]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another_size": (
        {},
        r"dataset='.*:another_size': train returned \[15, 18, 3\] as the image of sample \d+: must be",
    ),
    "no_number": ({}, r"train sample \d+: its label is a str; must be a number or numbers"),
    "on_demand_classes": ({"collate": "padded"}, "collate='padded': dataset=.* has images, which all have one size"),
    "on_demand_masks": ({"bad_samples": 1}, "bad_samples=1: dataset=.* reads its samples itself; set bad_samples=0"),
    "on_demand_labels": ({}, r"must be a class number for each sample .*, or choose another objective"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_pictures_and_settings_are_told(name: str, tmp_path: Path) -> None:
    changes, words = WRONG[name]
    with pytest.raises((UserError, RankError), match=words):
        train_in(tmp_path / "run", replace(HP, **changes, seed=1), prepare(name, tmp_path))


@pytest.mark.slow
def test_signals_in_shards_of_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's samples that are no images, beside the same ones in arrays."""
    signals = import_printed("signals", tmp_path, monkeypatch)
    values, labels = np.random.default_rng(0).normal(size=(40, 6)), np.arange(40) % 2
    samples = {f"{number}": {".npy": npy_bytes(values[number]), ".cls": b"%d" % labels[number]} for number in range(40)}
    rows = [*samples.items()]
    bucket = tmp_path / "served/bucket"
    bucket.mkdir(parents=True)
    for name, parts in (("train", (rows[:12], rows[12:30])), ("test", (rows[30:],))):
        paths = [bucket / f"{name}-{number}.tar" for number in range(len(parts))]
        for path, part in zip(paths, parts, strict=True):
            path.write_bytes(shard_bytes(dict(part)))
        create_index([*map(str, paths)], bucket / f"{name}.json", progress="off")
    (tmp_path / "in_memory.py").write_text("data = None\n")
    stored = importlib.import_module("in_memory")
    stored.data = lambda _: arrays((values[:30], labels[:30]), (values[30:], labels[30:]), classes=["quiet", "loud"])
    hp = replace(HP, model="picture_sets:Linear")
    with s3_server(tmp_path / "served") as server:
        set_variables(server.aws_environment(), monkeypatch)
        read = replace(hp, dataset="signals:signals", data_source="s3://bucket")
        ours = train_in(tmp_path / "read", read, fetch(read.dataset, read.data_source, tmp_path / "1", progress="off"))
    hp = replace(hp, dataset="in_memory:data")
    expected = train_in(tmp_path / "one", hp, fetch(hp.dataset, "", tmp_path / "2", progress="off"))
    assert losses(ours) == pytest.approx(losses(expected), abs=1e-9)
    assert [*(tmp_path / "signals").glob("**/*.tar")], "the printed folder of the cache"
    assert signals.signals
