"""What is said of image folders, bad samples and wrong names, and what a store that fails does to training."""

import html
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from encoded_runs import BASE, labelled, of, quiet, train
from image_folders import write_files
from tars import write_shards
from training_runs import losses, notes

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.runs.run_folder import OUTPUTS
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.encoded.image_list import list_images
from flyte_ddp.datasets.packing import pack_image_folder
from flyte_ddp.run import run_training


def no_launch(*_: object, **__: object) -> None:
    raise AssertionError("ranks were started")


def train_here(hp: Hyperparameters, folder: Path) -> None:
    """Train in one process at most: what is wrong is said before."""
    data = fetch(hp.dataset, hp.data_source, folder / "data", test_dataset=hp.test_dataset, progress="off")
    run_training(hp, data, folder / "run", quiet(folder), launch=no_launch)


def test_classes_that_are_named_like_splits_are_a_warning(tmp_path: Path) -> None:
    for number, (names, warned) in enumerate([(("Train", "val"), True), (("train", "bus"), False)]):
        folder = write_files(tmp_path / f"{number}", {f"{name}/1.jpg": b"" for name in names})
        assert any("look like splits" in line for line in list_images(str(folder)).describe_images()) == warned


@pytest.mark.slow
def test_bad_samples_are_replaced_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    folder = labelled(tmp_path / "images")
    for name in ("red/9", "green/10", "blue/11"):
        (folder / f"{name}.jpg").write_bytes(b"no image")
    pack_image_folder(str(folder), tmp_path / "packed", progress="off", seed=None)
    hp = of(tmp_path / "packed" / "train.json", batch_size=8, bad_samples=3, validation_fraction=0.0, epochs=1)
    one, two = (train(replace(hp, num_ranks=ranks), tmp_path / f"{ranks}") for ranks in (1, 2))
    assert losses(one) == pytest.approx(losses(two), abs=1e-9)
    bad = "3 samples could not be decoded and were replaced by other samples: sample 'blue/11' in shard "
    for result in (one, two):
        assert [note.startswith(bad) for note in notes(result)].count(True) == 1
        assert all(note in html.unescape(result.report.read_text()) for note in notes(result))
    with pytest.raises(UserError, match="3 samples cannot be decoded, more than bad_samples=2"):
        train(replace(hp, bad_samples=2, num_ranks=2), tmp_path / "too many")  # none of two ranks has met three
    with pytest.raises(UserError, match=r"sample '.*' in shard .*-000000.tar cannot be decoded.*bad_samples"):
        train(replace(hp, bad_samples=0), tmp_path / "none")
    assert not [name for name in OUTPUTS if (tmp_path / "none" / "run" / name).exists()]


@pytest.mark.parametrize("label", [7, -1])
def test_a_sample_without_a_valid_label_is_an_error(tmp_path: Path, label: int) -> None:
    """In shards whose index was made by hand, as the commands here would have found it."""
    write_shards(tmp_path, {f"{number}": {".jpg": b"x", ".cls": b"%d" % label} for number in range(12)})
    (tmp_path / "one.json").write_text('{"wids_version": 1, "shardlist": [{"url": "0.tar", "nsamples": 12}]}')
    with pytest.raises(UserError, match=rf"label {label}: must be 0..2 with 3 classes"):
        train(of(tmp_path / "one.json", num_classes=3, batch_size=4), tmp_path / "out")


def test_an_index_that_does_not_say_how_many_classes(shards: Path, tmp_path: Path) -> None:
    content = json.loads((shards / "train.json").read_text())
    del content["flyte_ddp"]
    for entry in content["shardlist"]:
        entry["url"] = str(shards / entry["url"])
    (tmp_path / "plain.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="unknown number of classes; set num_classes"):
        train_here(of(tmp_path / "plain.json"), tmp_path / "out")
    with pytest.raises(AssertionError, match="ranks were started"):
        train_here(of(tmp_path / "plain.json", num_classes=10, num_ranks=2), tmp_path / "named")


ALL_HELD_OUT = r"validation_fraction=0.9999: holds out all [\d,]+ training samples .* lower it"
MOST = {"validation_fraction": 0.9999}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (MOST, ALL_HELD_OUT),
        (MOST | {"dataset": "image_folder:{images}", "test_dataset": "image_folder:{images}"}, ALL_HELD_OUT),
        (MOST | {"dataset": "stream:{shards}", "test_dataset": "shards:{shards}"}, ALL_HELD_OUT),
        ({"augment": "crop"}, "augment='crop': not supported for dataset='shards:.*; choose none or resized_crop"),
        ({"num_classes": 3}, "num_classes=3: the data set has 10 classes"),
        ({"test_dataset": "shards:{packed}"}, "test_dataset=.*classes differ"),
        ({"dataset": "image_folder:{images}", "batch_size": 2}, "has no samples for testing; add samples"),
    ],
)
def test_wrong_hyperparameters_are_explained(shards: Path, tmp_path: Path, change: dict[str, Any], word: str) -> None:
    images, packed = labelled(tmp_path / "images", 4), tmp_path / "packed" / "train.json"
    pack_image_folder(str(images), packed.parent, progress="off")
    places = {"images": images, "packed": packed, "shards": f"{shards}/train.json"}
    change = {"dataset": "shards:{shards}", "test_dataset": "", **change}
    change |= {name: change[name].format(**places) for name in ("dataset", "test_dataset")}
    with pytest.raises(UserError, match=word):
        train_here(replace(BASE, **change), tmp_path / "out")
