"""Training from shards and image folders: what one process would compute, from any place, through small caches."""

from __future__ import annotations

import csv
import hashlib
import html
import io
import itertools
import json
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import faults
import numpy as np
import pytest
import torch
from faulty_proxy import Proxy, faulty_proxy
from file_server import FileServer, file_server
from PIL import Image
from plain_loop import train_plainly
from s3_server import s3_server
from surroundings import s3_environment
from torchvision.transforms import v2

from flyte_ddp import models
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, fingerprint
from flyte_ddp.datasets.prepared import check_prepared
from flyte_ddp.errors import RankError, UnreachableError, UserError
from flyte_ddp.images import InputSpec
from flyte_ddp.predict import predict
from flyte_ddp.run import OUTPUTS, Result, run_training
from flyte_ddp.settings import Settings
from flyte_ddp.shard_order import ShardOrder, ShardSplits
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.joining import join_indexes
from flyte_ddp.shards.packing import pack_image_folder, pack_source
from flyte_ddp.storage import retries
from flyte_ddp.tracking import read_metrics

SIDE = 16
BASE = Hyperparameters(
    dataset="shards:to be replaced",
    epochs=2,
    batch_size=64,
    image_size=SIDE,
    shuffle_shards=3,
    precision="fp64",
    channels_last="off",
    num_ranks=1,
    log_interval=1,
    learning_rate=0.05,
)


@pytest.fixture(autouse=True)
def _user_models_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the digits in ten shards, the last of which is smaller; nobody changes it."""
    folder = tmp_path_factory.mktemp("shards")
    pack_source("digits", folder, per_shard=160, progress="off")
    return folder


def quiet(folder: Path, **settings) -> Settings:
    return Settings(progress="off", wandb_mode="disabled", cache_folder=folder / "cache", **settings)


def train(hp: Hyperparameters, folder: Path, settings: Settings | None = None) -> Result:
    """Fetches what is to be fetched, and trains."""
    name = fingerprint(hp.dataset, hp.data_source, hp.test_dataset)
    data = fetch(hp.dataset, hp.data_source, folder / name, test_dataset=hp.test_dataset, progress="off")
    return run_training(hp, data, folder / "run", settings or quiet(folder))


def of(index: Path, **changes) -> Hyperparameters:
    return replace(BASE, dataset=f"shards:{index}", **changes)


def weights(result: Result) -> dict[str, torch.Tensor]:
    return torch.load(result.model, weights_only=True)


def notes(result: Result) -> list[str]:
    return read_metrics(result.metrics)[-1]["notes"]


def losses(result: Result) -> list[float]:
    return [record["loss"] for record in read_metrics(result.metrics) if record["kind"] == "train"]


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
    model = models.build(hp.model, 10, InputSpec(3, SIDE, SIDE, mean, std)).double()
    counts = data.index.counts
    splits = ShardSplits(counts, hp.validation_fraction, 0.0 if hp.test_dataset else 0.1, hp.seed)
    order = ShardOrder(splits, "training", data.index.weights, hp.seed, hp.shuffle_shards)
    batches = [batch for epoch in range(hp.epochs) for batch in order.batches(epoch, hp.batch_size)]
    reported = train_plainly(hp, model, torch.stack(images).double(), torch.tensor(labels), batches)
    return model.state_dict(), reported


@pytest.mark.slow
def test_any_number_of_ranks_computes_what_one_process_would(shards: Path, tmp_path: Path) -> None:
    expected, reported = plain_loop(of(shards / "train.json"), shards / "train.json")
    for ranks, parts in ((2, 2), (3, 1)):
        hp = of(shards / "train.json", num_ranks=ranks, accumulation_steps=parts)
        result = train(hp, tmp_path / f"{ranks}")
        assert losses(result) == pytest.approx(reported, abs=1e-6)  # mean and deviation are held in fp32 by one side
        for name, value in weights(result).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_data_sets_with_weights(shards: Path, tmp_path: Path) -> None:
    """Of one half in an epoch, and of the other all of it twice."""
    more = pack_source("digits", tmp_path / "more", per_shard=300, seed=5, progress="off")
    joined = tmp_path / "joined.json"
    join_indexes([str(shards / "train.json"), str(tmp_path / "more" / "train.json")], joined, weights=[0.5, 2.0])
    hp = of(joined, num_ranks=2)
    expected, reported = plain_loop(hp, joined)
    assert len(reported) == hp.epochs * -(-round(2.5 * 0.81 * len(more)) // hp.batch_size)
    result = train(hp, tmp_path)
    assert losses(result) == pytest.approx(reported, abs=1e-6)
    for name, value in weights(result).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_random_crops_are_the_same_on_any_number_of_ranks(shards: Path, tmp_path: Path) -> None:
    hp = of(shards / "train.json", augment="resized_crop")
    one, two = (train(replace(hp, num_ranks=ranks), tmp_path / f"{ranks}") for ranks in (1, 2))
    plain = train(of(shards / "train.json"), tmp_path / "plain")
    assert losses(one) == pytest.approx(losses(two), abs=1e-9)
    assert losses(one) != pytest.approx(losses(plain), abs=1e-3)
    for name, value in weights(one).items():
        torch.testing.assert_close(value, weights(two)[name], rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_run_cut_off_in_the_middle_goes_on_to_the_same_weights(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hp = of(shards / "train.json", model="faults:model", augment="resized_crop", num_ranks=2, image_size=8)
    undisturbed = train(hp, tmp_path / "undisturbed")
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="SIGKILL", **{"pass": 27})
    with pytest.raises(RankError, match="killed"):
        train(hp, tmp_path / "cut")
    gone_on = train(hp, tmp_path / "cut")
    resumed = [record["resumed_after_step"] for record in read_metrics(gone_on.metrics) if record["kind"] == "start"]
    assert resumed == [0, 27]
    for name, value in weights(undisturbed).items():
        assert torch.equal(value, weights(gone_on)[name])


@pytest.mark.slow
def test_a_test_set_of_its_own_is_all_evaluated(shards: Path, tmp_path: Path) -> None:
    pack_source("digits", tmp_path / "test", split="test", name="test", per_shard=100, progress="off")
    hp = of(shards / "train.json", test_dataset=f"shards:{tmp_path}/test/test.json", epochs=1, precision="fp32")
    result = train(hp, tmp_path / "out")
    with np.load(result.run_folder / "predictions.npz") as kept:
        assert kept["confusion"].sum() == 297
        assert (
            kept["confusion"].sum(1).tolist()
            == np.bincount(
                [sample[".cls"] for sample in ShardDataset(str(tmp_path / "test/test.json"), tmp_path)]
            ).tolist()
        )
    held_out = train(of(shards / "train.json", epochs=1, precision="fp32"), tmp_path / "held out")
    with np.load(held_out.run_folder / "predictions.npz") as kept:
        assert kept["confusion"].sum() == 150


@pytest.mark.slow
def test_shards_far_away_go_through_a_cache_smaller_than_the_data(tmp_path: Path) -> None:
    """Of 20 shards it holds eight: two ranks read from two at a time, and as many are on their way."""
    shards = tmp_path / "shards"
    pack_source("digits", shards, per_shard=75, progress="off")
    size = max(path.stat().st_size for path in shards.glob("*.tar"))
    with file_server() as server:
        server.files = {path.name: path.read_bytes() for path in shards.iterdir()}
        server.faults = {"train-000004.tar": ["truncate", 503], "train-000002.tar": ["alter"]}
        hp = of(Path("nowhere"), epochs=1, num_ranks=2, shuffle_shards=2)
        hp = replace(hp, dataset=f"shards:{server.url}/train.json")
        settings = quiet(tmp_path, cache_bytes=8 * size)
        result = train(hp, tmp_path, settings)
        fetched = {name: server.requests.count(name) for name in server.requests if name.endswith(".tar")}
    here = train(of(shards / "train.json", epochs=1, shuffle_shards=2), tmp_path / "here")
    assert losses(result) == pytest.approx(losses(here), abs=1e-9)
    assert len(fetched) == 20
    # Three times for training, validation and test, once more where a shard lies on two lanes, and three faults.
    assert sum(fetched.values()) <= 20 * 5 + 3
    held = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.tar"))
    assert 0 < held <= 8 * size
    [decoder, note] = notes(result)
    assert decoder == "Images were decoded by torchcodec."
    found = re.fullmatch(r"20 shards were fetched, (\d+) of them more than once; the cache has no room .*", note)
    assert found
    assert 0 < int(found[1]) <= sum(1 for times in fetched.values() if times > 1)


@pytest.mark.parametrize("scheme", ["file", "http", "s3", "gs"])
def test_shards_of_any_storage_give_the_same_model(
    scheme: str, shards: Path, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_environment(server.url, monkeypatch)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    server.files = {f"bucket/{path.name}": path.read_bytes() for path in shards.iterdir() if path.is_file()}
    start = {"file": f"file://{shards}", "http": f"{server.url}/bucket"}.get(scheme, f"{scheme}://bucket")
    hp = of(shards / "train.json", epochs=1)
    expected = weights(train(hp, tmp_path / "near"))
    found = weights(train(replace(hp, dataset=f"shards:{start}/train.json"), tmp_path / "far"))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.slow
def test_training_alone_fetches_shards_of_s3_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cache that the planner says is enough; only a shard that ends one lane and begins the next comes twice."""
    folder = tmp_path / "served" / "bucket" / "shards"
    pack_source("digits", folder, per_shard=75, progress="off")
    pack_source("digits", tmp_path / "test", split="test", per_shard=150, progress="off")
    hp = of(tmp_path / "test" / "train.json", epochs=1, num_ranks=2, shuffle_shards=2, validation_fraction=0.0)
    hp = replace(hp, test_dataset=hp.dataset, dataset="shards:s3://bucket/shards/train.json")
    with s3_server(folder.parent.parent) as server, faulty_proxy(server.endpoint) as proxy:
        for name, value in {**server.aws_environment(), "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        data = fetch(hp.dataset, "", tmp_path / "data", test_dataset=hp.test_dataset, progress="off")
        size = max(path.stat().st_size for path in folder.glob("*.tar"))
        settings = quiet(tmp_path, cache_bytes=8 * size)
        assert check_prepared(data, hp, ranks=2, workers=1, cache_bytes=settings.cache_bytes) == []
        result = run_training(hp, data, tmp_path / "run", settings)
    fetched = Counter(name for name in proxy.requests if name.endswith(".tar"))
    assert len(fetched) == 20
    assert fetched.total() <= 21
    expected, reported = plain_loop(hp, folder / "train.json")
    assert losses(result) == pytest.approx(reported, abs=1e-6)
    for name, value in weights(result).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_a_cache_that_is_too_small_is_said_before(shards: Path, tmp_path: Path) -> None:
    """Two ranks on two lanes each: they want two shards each, and as many on their way; here there are ten."""
    content = json.loads((shards / "train.json").read_text())
    largest = max(entry["filesize"] for entry in content["shardlist"])
    for entry in content["shardlist"]:
        entry["url"] = f"s3://bucket/{entry['url']}"
    (tmp_path / "far.json").write_text(json.dumps(content))
    whole = sum(entry["filesize"] for entry in content["shardlist"])
    hp = of(tmp_path / "far.json", shuffle_shards=2)
    data = fetch(hp.dataset, "", tmp_path / "data", progress="off")

    def said(cache_bytes: int | None, hp: Hyperparameters = hp) -> list[str]:
        return check_prepared(data, hp, ranks=2, workers=1, cache_bytes=cache_bytes)

    assert said(None) == said(whole) == said(whole, of(tmp_path / "far.json", shuffle_shards=1000)) == []
    [caution] = said(8 * largest - 1)
    assert f"={8 * largest - 1}: less than the {8 * largest} that training wants" in caution
    assert "lower shuffle_shards (now 2)" in caution
    [caution] = said(8 * largest)
    assert f"={8 * largest}: less than the {whole} of all shards, which evaluations therefore fetch again" in caution
    own_tests = replace(hp, validation_fraction=0.0, test_dataset="shards:elsewhere")
    assert said(8 * largest, own_tests) == []


@pytest.mark.slow
def test_an_image_that_is_damaged_in_the_cache_is_fetched_again(shards: Path, tmp_path: Path) -> None:
    """The shard's structure is whole, so that only the decoder can notice."""
    with file_server() as server:
        server.files = {path.name: path.read_bytes() for path in shards.iterdir()}
        hp = replace(of(Path("nowhere"), epochs=1), dataset=f"shards:{server.url}/train.json")
        whole = train(hp, tmp_path)
        for cached in (tmp_path / "cache").glob("*.tar"):
            content = bytearray(cached.read_bytes())
            place = content.index(b"IDAT") + 8  # of the first image's pixels
            content[place] ^= 0xFF
            cached.write_bytes(content)
        server.requests.clear()
        healed = train(hp, tmp_path / "again", quiet(tmp_path))
        assert sorted(name for name in server.requests if name.endswith(".tar")) == sorted(
            path.name for path in shards.glob("*.tar")
        )
    for name, value in weights(healed).items():
        assert torch.equal(value, weights(whole)[name])


def labelled(folder: Path, number: int = 30) -> Path:
    """Images in folders of their classes: red, green and blue ones of many sizes."""
    random = np.random.default_rng(0)
    for index in range(number):
        colour = index % 3
        height, width = random.integers(20, 60, 2)
        pixels = random.integers(0, 60, (height, width, 3), dtype=np.uint8)
        pixels[..., colour] += 150
        path = folder / ("red", "green", "blue")[colour] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=95)
    return folder


@pytest.mark.parametrize("where", ["path", "s3"])
def test_an_image_folder_is_learnt(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = labelled(tmp_path / "bucket" / "images", 60)
    (folder / "notes.txt").write_text("not an image")
    hp = replace(BASE, dataset=f"image_folder:{folder}", batch_size=9, epochs=6, augment="resized_crop")
    if where == "path":
        result = train(hp, tmp_path / "out", quiet(tmp_path, wandb_table_rows=0))
    else:
        with s3_server(tmp_path) as server:
            for name, value in server.aws_environment().items():
                monkeypatch.setenv(name, value)
            result = train(replace(hp, dataset="image_folder:s3://bucket/images"), tmp_path / "out")
    sidecar = json.loads(result.sidecar.read_text())
    assert sidecar["classes"] == ["blue", "green", "red"]
    assert result.test_accuracy == 1.0


def test_images_of_a_web_server_are_those_of_its_list(server: FileServer, tmp_path: Path) -> None:
    folder = labelled(tmp_path / "images")
    server.files = {f"data/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*.jpg")}
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name[5:]}\n" for name, content in server.files.items()]
    server.files["data/SHA256SUMS"] = "".join(lines).encode()
    hp = replace(BASE, dataset=f"image_folder:{server.url}/data", batch_size=9, epochs=1)
    result = train(hp, tmp_path / "far")
    here = train(replace(hp, dataset=f"image_folder:{folder}"), tmp_path / "near")
    assert all(torch.equal(value, weights(here)[name]) for name, value in weights(result).items())
    data = fetch(hp.dataset, "", tmp_path / "data", progress="off")
    server.files["data/green/10.jpg"] = server.files["data/red/0.jpg"]
    with pytest.raises(UserError, match=r"green/10\.jpg: does not have the SHA-256 of the list; run again"):
        run_training(hp, data, tmp_path / "run", quiet(tmp_path))


def test_equal_data_at_two_addresses_is_prepared_twice(tmp_path: Path) -> None:
    """What is prepared says where the images are; the first place may be gone when the second is used."""
    folder = labelled(tmp_path / "images")
    pack_image_folder(str(folder), tmp_path / "packed", progress="off")
    shutil.copytree(tmp_path / "packed", tmp_path / "copied")
    shutil.copytree(folder, tmp_path / "images again", copy_function=shutil.copy2)
    places = ("shards", "packed/train.json", "copied/train.json"), ("image_folder", "images", "images again")
    for kind, *two in places:
        assert len({fingerprint(f"{kind}:{tmp_path / place}", "") for place in two}) == 2


def test_a_folder_and_the_shards_packed_from_it_have_the_same_test_images(tmp_path: Path) -> None:
    folder = labelled(tmp_path / "images")
    index = pack_image_folder(str(folder), tmp_path / "packed", progress="off")
    data = ShardDataset(index, tmp_path / "cache")
    assert {sample["__key__"]: sample[".cls"] for sample in data} == {
        f"{path.parent.name}/{path.stem}": ["blue", "green", "red"].index(path.parent.name)
        for path in folder.rglob("*.jpg")
    }


class TestBadSamples:
    """Undecodable images, missing labels and the like, each one error that names the sample."""

    def spoilt(self, tmp_path: Path, spoil) -> Path:
        folder = labelled(tmp_path / "images")
        spoil(folder)
        pack_image_folder(str(folder), tmp_path / "packed", progress="off", seed=None)
        return tmp_path / "packed" / "train.json"

    def test_one_is_an_error_by_default(self, tmp_path: Path) -> None:
        index = self.spoilt(tmp_path, lambda folder: (folder / "red" / "9.jpg").write_bytes(b"no image"))
        with pytest.raises(UserError, match=r"sample 'red/9' in shard .*-000000.tar cannot be decoded.*bad_samples"):
            train(of(index, batch_size=8, validation_fraction=0.0), tmp_path / "out")
        assert not [name for name in OUTPUTS if (tmp_path / "out" / "run" / name).exists()]

    @pytest.mark.slow
    def test_some_are_allowed_and_replaced_alike_on_any_number_of_ranks(self, tmp_path: Path) -> None:
        def spoil(folder: Path) -> None:
            for name in ("red/9", "green/10", "blue/11"):
                (folder / f"{name}.jpg").write_bytes(b"no image")

        index = self.spoilt(tmp_path, spoil)
        hp = of(index, batch_size=8, bad_samples=3, validation_fraction=0.0)
        one, two = (train(replace(hp, num_ranks=ranks), tmp_path / f"{ranks}") for ranks in (1, 2))
        assert losses(one) == pytest.approx(losses(two), abs=1e-9)
        bad = "3 samples could not be decoded, and others stood in for them: sample 'blue/11' in shard "
        for result in (one, two):
            assert [note.startswith(bad) for note in notes(result)] == [False, True]
            assert all(note in html.unescape(result.report.read_text()) for note in notes(result))
        for ranks in (1, 2):  # of two ranks none has met more than two
            with pytest.raises(UserError, match="3 such samples, and bad_samples=2 are allowed"):
                train(replace(hp, bad_samples=2, num_ranks=ranks), tmp_path / f"too many {ranks}")

    @pytest.mark.parametrize(
        ("members", "word"),
        [
            ({".cls": b"1"}, "has no image: it has .cls"),
            ({".jpg": b"x"}, "has no label: it has .jpg"),
            ({".jpg": b"x", ".cls": b"cat"}, "its .cls is b'cat'"),
            ({".jpg": b"x", ".cls": b"7"}, r"label 7: must be 0..2 with 3 classes"),
            ({".jpg": b"x", ".cls": b"-1"}, r"label -1: must be 0..2 with 3 classes"),
        ],
    )
    def test_a_sample_that_is_none(self, tmp_path: Path, members: dict[str, bytes], word: str) -> None:
        """In shards whose index was made by hand, as the commands here would have found it."""
        with tarfile.open(tmp_path / "one.tar", "w") as archive:
            for number, (extension, content) in itertools.product(range(12), members.items()):
                header = tarfile.TarInfo(f"{number}{extension}")
                header.size = len(content)
                archive.addfile(header, io.BytesIO(content))
        content = {"wids_version": 1, "shardlist": [{"url": "one.tar", "nsamples": 12}]}
        (tmp_path / "one.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=word):
            train(of(tmp_path / "one.json", num_classes=3, batch_size=4), tmp_path / "out")


class TestMistakes:
    """What is wrong with the names and numbers of a run, said before a rank starts."""

    def test_an_index_that_does_not_say_how_many_classes(self, shards: Path, tmp_path: Path) -> None:
        content = json.loads((shards / "train.json").read_text())
        del content["flyte_ddp"]
        for entry in content["shardlist"]:
            entry["url"] = str(shards / entry["url"])
        (tmp_path / "plain.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="does not say how many classes there are; set num_classes"):
            train(of(tmp_path / "plain.json"), tmp_path / "out")
        result = train(of(tmp_path / "plain.json", num_classes=10, epochs=1), tmp_path / "out")
        assert result.test_accuracy > 0.5

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            ({"augment": "crop"}, "augment='crop': not for dataset='shards:.*; choose none or resized_crop"),
            ({"test_dataset": "digits"}, "test_dataset='digits': must be shards:ADDRESS"),
            ({"num_classes": 3}, "num_classes=3: the data set has 10"),
            ({"data_source": "x"}, "data_source='x': .*leave data_source empty"),
            ({"dataset": "shards:/no/such.json"}, "index /no/such.json: cannot be read"),
            ({"dataset": "image_folder:/no/such"}, "image folder /no/such: cannot be listed"),
        ],
    )
    def test_words(self, shards: Path, tmp_path: Path, change: dict[str, object], word: str) -> None:
        with pytest.raises(UserError, match=word):
            train(replace(of(shards / "train.json"), **change), tmp_path / "out")

    def test_too_few_images_to_hold_some_out(self, tmp_path: Path) -> None:
        folder = labelled(tmp_path / "images", 4)
        with pytest.raises(UserError, match="has no samples for testing; give more, or hold out less, or test_dataset"):
            train(replace(BASE, dataset=f"image_folder:{folder}", batch_size=2), tmp_path / "out")

    def test_test_sets_of_other_classes(self, shards: Path, tmp_path: Path) -> None:
        pack_image_folder(str(labelled(tmp_path / "images")), tmp_path / "packed", progress="off")
        hp = of(shards / "train.json", test_dataset=f"shards:{tmp_path}/packed/train.json")
        with pytest.raises(UserError, match="has other classes than dataset"):
            train(hp, tmp_path / "out")

    def test_an_image_that_changes_after_it_was_listed(self, tmp_path: Path) -> None:
        folder = labelled(tmp_path / "images")
        hp = replace(BASE, dataset=f"image_folder:{folder}", batch_size=8)
        data = fetch(hp.dataset, "", tmp_path / "data", progress="off")
        (folder / "green" / "10.jpg").write_bytes((folder / "red" / "0.jpg").read_bytes() + b"more")
        with pytest.raises(UserError, match=r"image .*green/10.jpg: has .* bytes, and .* when it was listed"):
            run_training(hp, data, tmp_path / "run", quiet(tmp_path))

    def test_an_object_that_is_replaced_by_one_of_its_size(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = labelled(tmp_path / "served" / "bucket")
        replaced, size = folder / "green" / "10.jpg", 10_000
        replaced.write_bytes(replaced.read_bytes().ljust(size, b"\0"))
        hp = replace(BASE, dataset="image_folder:s3://bucket", batch_size=8)
        with s3_server(folder.parent) as server:
            for name, value in server.aws_environment().items():
                monkeypatch.setenv(name, value)
            data = fetch(hp.dataset, "", tmp_path / "data", progress="off")
            replaced.write_bytes((folder / "red" / "0.jpg").read_bytes().ljust(size, b"\0"))
            with pytest.raises(UserError, match=r"s3://bucket/green/10.jpg: has ETag .* when it was listed; run again"):
                run_training(hp, data, tmp_path / "run", quiet(tmp_path))


class TestPredictions:
    """They are those of the run's own evaluation, whatever the images come from."""

    @staticmethod
    def rows(table: Path) -> list[dict[str, str]]:
        with table.open(newline="") as file:
            return list(csv.DictReader(file))

    def accuracy(self, table: Path) -> float:
        rows = self.rows(table)
        return sum(row["guess"] == row["truth"] for row in rows) / len(rows)

    def test_of_what_was_held_out(self, shards: Path, tmp_path: Path) -> None:
        """Whatever the seed, and the share for validation, were."""
        result = train(of(shards / "train.json", epochs=1, seed=7, validation_fraction=0.3), tmp_path)
        data = fetch(f"shards:{shards}/train.json", "", tmp_path / "data", progress="off")
        table = predict(
            result.model,
            result.sidecar,
            images=None,
            dataset=data,
            output=tmp_path / "table.csv",
            batch_size=50,
            settings=quiet(tmp_path),
        )
        assert 0.3 < result.test_accuracy < 1
        assert self.accuracy(table) == pytest.approx(result.test_accuracy, abs=1e-9)

    def test_of_a_test_set_and_of_its_files(self, tmp_path: Path) -> None:
        folder, tests = labelled(tmp_path / "images"), labelled(tmp_path / "tests", 12)
        hp = replace(
            BASE, dataset=f"image_folder:{folder}", test_dataset=f"image_folder:{tests}", batch_size=9, epochs=6
        )
        result = train(hp, tmp_path)
        data = fetch(hp.dataset, "", tmp_path / "data", test_dataset=hp.test_dataset, progress="off")
        table = predict(result.model, result.sidecar, images=None, dataset=data, output=tmp_path / "table.csv")
        assert self.accuracy(table) == pytest.approx(result.test_accuracy, abs=1e-9)
        files = predict(result.model, result.sidecar, images=tests, dataset=None, output=tmp_path / "files.csv")
        expected, found = ([row["score_red"] for row in self.rows(path)] for path in (table, files))
        assert found == expected

    def test_a_model_of_other_images(self, shards: Path, digits: Path, tmp_path: Path) -> None:
        hp = Hyperparameters(epochs=1, max_steps=1, num_ranks=1)
        result = run_training(hp, digits, tmp_path / "run", quiet(tmp_path))
        data = fetch(f"shards:{shards}/train.json", "", tmp_path / "data", progress="off")
        with pytest.raises(UserError, match="the model takes 1 x 8 x 8; predict with a model that was trained on such"):
            predict(result.model, result.sidecar, images=None, dataset=data, output=tmp_path / "table.csv")
        assert not (tmp_path / "table.csv").exists()


@dataclass
class Store:
    """An S3 server with the images of a bucket, and the proxy before it, which can fail."""

    proxy: Proxy
    names: list[str]


class TestFaultsOfAStore:
    """An object store that fails now and then changes nothing; one that stays away is worth another try of the run."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        folder = labelled(tmp_path / "served" / "bucket")
        with s3_server(folder.parent) as server, faulty_proxy(server.endpoint) as proxy:
            for name, value in {**server.aws_environment(), "AWS_ENDPOINT_URL": proxy.url}.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr(retries, "FIRST_DELAY", 0.001)
            yield Store(proxy, sorted(f"bucket/{path.relative_to(folder)}" for path in folder.rglob("*.jpg")))

    @pytest.fixture
    def hp(self) -> Hyperparameters:
        return replace(BASE, dataset="image_folder:s3://bucket", batch_size=9)

    def test_that_pass(self, hp: Hyperparameters, store: Store, tmp_path: Path) -> None:
        expected = train(hp, tmp_path / "one")
        faults = itertools.cycle([503, "truncate", "slow", "reset", 500])
        store.proxy.faults = {name: [fault] for name, fault in zip(store.names, faults, strict=False)}
        store.proxy.faults["bucket"] = [503, "truncate"]  # the list
        store.proxy.requests.clear()
        result = train(hp, tmp_path / "two")
        assert not any(store.proxy.faults.values())
        assert len(store.proxy.requests) > 2 * len(store.names)
        assert all(torch.equal(value, weights(expected)[name]) for name, value in weights(result).items())

    @pytest.mark.slow
    def test_that_stay(self, hp: Hyperparameters, store: Store, tmp_path: Path) -> None:
        data = fetch(hp.dataset, "", tmp_path / "data", progress="off")
        name = store.names[4]
        store.proxy.faults = {name: [503] * 100}
        with pytest.raises(UnreachableError, match=rf"image s3://{name}: cannot be read \(HTTP 503.*run again"):
            run_training(replace(hp, num_ranks=2), data, tmp_path / "run", quiet(tmp_path))
        store.proxy.faults = {name: [404] * 100}
        with pytest.raises(UserError, match=rf"image s3://{name}: cannot be read \(HTTP 404.*run again") as failure:
            run_training(hp, data, tmp_path / "run again", quiet(tmp_path))
        assert not isinstance(failure.value, UnreachableError)
