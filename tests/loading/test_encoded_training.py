"""Training from shards and image folders: what one process would compute, from any place, through small caches."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from encoded_runs import BASE, SIDE, labelled, of, quiet, train
from file_server import file_server
from plain_loop import train_plainly
from torchvision.transforms import v2
from training_runs import cut_off, losses, weights

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.order.shard_order import ShardOrder, ShardSplits
from flyte_ddp.datasets import fingerprint
from flyte_ddp.datasets.packing import pack_image_folder, pack_source
from flyte_ddp.models import zoo
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.scanning import join_indexes

pytestmark = pytest.mark.usefixtures("user_models")


def plain_loop(hp: Hyperparameters, index: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process, Pillow and torchvision; of the library only the order of samples, the model, and what is read."""
    data = ShardDataset(str(index), index.parent / "no cache")
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    images, labels = [], []
    for sample in (data[number] for number in range(len(data))):
        pixels = torch.from_numpy(np.array(sample[".png"].convert("RGB"))).permute(2, 0, 1)
        side = round(8 * 7 / 8)
        middle = v2.functional.resized_crop(pixels, 0, 0, side, side, [SIDE, SIDE], antialias=True)
        images.append((middle.double() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None])
        labels.append(sample[".cls"])
    torch.manual_seed(hp.seed)
    model = zoo.build_model(hp.model, 10, InputSpec(3, SIDE, SIDE, mean, std)).double()
    counts = data.index.counts
    splits = ShardSplits(counts, hp.validation_fraction, 0.0 if hp.test_dataset else 0.1, hp.seed)
    order = ShardOrder(splits, "training", data.index.weights, hp.shuffle_shards)
    batches = [batch for epoch in range(hp.epochs) for batch in order.batches(epoch, hp.batch_size)]
    reported = train_plainly(hp, model, torch.stack(images).double(), torch.tensor(labels), batches)
    return model.state_dict(), reported


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_would(shards: Path, tmp_path: Path) -> None:
    """On data sets with weights, too: of one half in an epoch, and of the other all of it twice."""
    pack_source("digits", tmp_path / "more", split="test", samples_per_shard=60, progress="off")
    joined = tmp_path / "joined.json"
    join_indexes([str(shards / "train.json"), str(tmp_path / "more" / "train.json")], joined, weights=[0.5, 2.0])
    hp = of(joined, num_ranks=2, accumulation_steps=2, epochs=1)
    expected, reported = plain_loop(hp, joined)
    assert len(reported) == 17  # batches of 64 of 1,088 samples: 0.81 * (0.5 * 1500 + 2 * 297)
    result = train(hp, tmp_path)
    assert losses(result) == pytest.approx(reported, abs=1e-6)  # mean and deviation are held in fp32 by one side
    for name, value in weights(result).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_random_crops_do_not_depend_on_interruptions(shards: Path, tmp_path: Path) -> None:
    """Cut off in the second epoch, of five steps each."""
    hp = of(shards / "train.json", model="faults:model", batch_size=250, augment="resized_crop", image_size=8)
    one = train(hp, tmp_path / "one")
    cut_off(lambda: train(hp, tmp_path / "cut"), 7)
    resumed = train(hp, tmp_path / "cut")
    found = weights(resumed)
    assert all(torch.equal(value, found[name]) for name, value in weights(one).items())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_shards_far_away_go_through_a_cache_smaller_than_the_data(shards: Path, tmp_path: Path) -> None:
    """Of ten shards it holds eight: two ranks read from two at a time, and as many are on their way."""
    size = max(path.stat().st_size for path in shards.glob("*.tar"))
    with file_server() as server:
        server.files = {path.name: path.read_bytes() for path in shards.iterdir() if path.is_file()}
        server.faults = {"train-000004.tar": ["truncate"], "train-000002.tar": ["alter"]}
        hp = of(f"{server.url}/train.json", epochs=1, num_ranks=2, shuffle_shards=2)
        result = train(hp, tmp_path, quiet(tmp_path, cache_bytes=8 * size))
        fetched = {name: server.requests.count(name) for name in server.requests if name.endswith(".tar")}
    here = train(of(shards / "train.json", epochs=1, shuffle_shards=2), tmp_path / "here")
    assert losses(result) == pytest.approx(losses(here), abs=1e-9)
    assert len(fetched) == 10
    # Three times for training, validation and test, once more where a shard lies on two streams, and two faults; once
    # for the samples by which the saved model is checked and those of the report, and one before, for its first sample.
    assert 10 + 2 + 1 < sum(fetched.values()) <= 10 * 6 + 2 + 1
    held = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.tar"))
    assert 0 < held <= 8 * size


def test_an_image_folder_is_learnt(tmp_path: Path) -> None:
    folder = labelled(tmp_path / "images", 60)
    (folder / "notes.txt").write_text("not an image")
    hp = replace(BASE, dataset=f"image_folder:{folder}", batch_size=9, epochs=6, augment="resized_crop")
    result = train(hp, tmp_path / "out", quiet(tmp_path, wandb_table_rows=0))
    sidecar = json.loads(result.sidecar.read_text())
    assert sidecar["classes"] == ["blue", "green", "red"]
    assert [sidecar["input"][key] for key in ("crop_share", "upright", "mode")] == [7 / 8, True, "RGB"]
    assert result.test_accuracy == 1.0


def test_equal_data_at_two_addresses_is_prepared_twice(tmp_path: Path) -> None:
    """What is prepared says where the images are; the first place may be gone when the second is used."""
    folder = labelled(tmp_path / "images")
    pack_image_folder(str(folder), tmp_path / "packed", progress="off")
    shutil.copytree(tmp_path / "packed", tmp_path / "copied")
    shutil.copytree(folder, tmp_path / "images again", copy_function=shutil.copy2)
    places = ("shards", "packed/train.json", "copied/train.json"), ("image_folder", "images", "images again")
    for kind, *two in places:
        assert len({fingerprint(f"{kind}:{tmp_path / place}", "") for place in two}) == 2
