"""Training without epochs: what each worker reads, how samples are mixed, and what ends a stream."""

import itertools
import json
import multiprocessing
import tarfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import faults
import numpy as np
import pytest
import torch
from encoded_runs import quiet
from image_folders import image_bytes
from processes import processes_with, wait_until

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import MachineError, RankLostError, UserError
from flyte_ddp.core.machine import waiting
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.datasets import fetch, open_prepared
from flyte_ddp.datasets.encoded.readers import ShardImages
from flyte_ddp.datasets.encoded.samples import BadSamples, EncodedSamples
from flyte_ddp.datasets.encoded.streams import (
    RankStream,
    StreamImages,
    StreamOrder,
    order_worker_shards,
    read_shard_samples,
)
from flyte_ddp.datasets.packing import pack_source
from flyte_ddp.plans.opened_data import OpenedData
from flyte_ddp.plans.resolve import detect_hardware
from flyte_ddp.run import Result, run_training
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.index import read_index
from flyte_ddp.shards.packing import pack_samples

PER_SHARD = 75

pytestmark = pytest.mark.usefixtures("user_models")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the digits in twenty shards."""
    pack_source("digits", folder := tmp_path_factory.mktemp("shards"), samples_per_shard=PER_SHARD, progress="off")
    return folder


def options_of(shards: Path, **changes) -> RankStream:
    options = {"workers": 0, "shuffle_buffer": 50, "bad_samples": 0, "classes": 10, **changes}
    reader = ShardReader(read_index(str(shards / "train.json")), ShardCache(shards / "no cache"), most_open=1)
    workers, buffer, bad = (options.pop(name) for name in ("workers", "shuffle_buffer", "bad_samples"))
    loader = EncodedSamples(ShardImages(reader), [], BadSamples(bad), size=8, **options)
    return RankStream(reader, loader, 0, workers, buffer)


BASE = Hyperparameters(
    dataset="stream:to be replaced", epochs=3, batch_size=50, image_size=8, shuffle_buffer=100, num_ranks=2
)


def train(hp: Hyperparameters, folder: Path, launch=None, **settings) -> Result:
    data = fetch(hp.dataset, "", folder / "data", test_dataset=hp.test_dataset, progress="off")
    return run_training(hp, data, folder / "run", quiet(folder, **settings), launch=launch)


def test_a_pass_reads_every_shard_once_from_its_beginning_and_each_pass_in_another_order(shards: Path) -> None:
    options = options_of(shards)
    ordered = order_worker_shards(options)
    passes = [[shard for _, shard in itertools.islice(ordered, 20)] for _ in range(3)]
    assert all(sorted(found) == list(range(20)) for found in passes)
    assert len({tuple(found) for found in passes}) == 3
    stored = itertools.islice(read_shard_samples(options, iter([(0, 7), (0, 3)])), 2 * PER_SHARD)
    samples = [found.name for _, found in stored]
    assert len(set(samples)) == 2 * PER_SHARD
    assert all("train-000007" in name for name in samples[:PER_SHARD])
    assert all("train-000003" in name for name in samples[PER_SHARD:])


@pytest.mark.slow
def test_samples_are_mixed_beyond_shards_and_come_once_a_pass(tmp_path: Path) -> None:
    """Of samples whose label is their number, in shards in order."""
    image = image_bytes()
    numbered = lambda number: (f"{number:03d}", {".png": image, ".cls": b"%d" % number})  # noqa: E731
    classes = [f"{number}" for number in range(300)]
    pack_samples(numbered, 300, tmp_path, classes=classes, samples_per_shard=30, seed=None, progress="off")

    def labels(seed: int) -> list[list[int]]:
        images = StreamImages(options_of(tmp_path, classes=300, shuffle_buffer=100, seed=seed), torch.device("cpu"))
        return [images.load_batch(samples, 0)[1].tolist() for samples in StreamOrder(1200).batches(0, 30)]

    batches = labels(0)
    assert batches == labels(0)  # a function of the seed
    assert batches != labels(1)
    assert len({label // 30 for label in batches[3]}) >= 4  # of several shards
    counts = Counter(itertools.chain(*batches))
    # 1,200 samples of 300: four passes, but for what is still in the two buffers.
    assert len(counts) == 300
    assert 2 <= min(counts.values()) <= max(counts.values()) <= 5


def test_the_same_batch_asked_for_again_is_the_same(shards: Path) -> None:
    """The diagnosis of a loss that is not finite computes a step twice."""
    images = StreamImages(options_of(shards), torch.device("cpu"))
    samples = np.arange(10)
    first, again, following = (images.load_batch(numbers, 0)[0] for numbers in (samples, samples, samples + 10))
    assert torch.equal(first, again)
    assert not torch.equal(first, following)
    assert images.load_batch(np.arange(0), 0)[0].shape == (0, 8, 8, 3)


@pytest.mark.slow
def test_empty_shards_leave_no_worker_without_samples(tmp_path: Path) -> None:
    """Every second one is: of two workers one would get all of those, and the rank would wait for it for ever."""
    pack_source("digits", tmp_path, split="test", samples_per_shard=15, progress="off")
    content = json.loads((tmp_path / "train.json").read_text())
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    size = (tmp_path / "empty.tar").stat().st_size
    empty = {"url": "empty.tar", "nsamples": 0, "filesize": size}
    content["shardlist"] = [entry for shard in content["shardlist"] for entry in (shard, empty)]
    (tmp_path / "train.json").write_text(json.dumps(content))
    tests = f"shards:{tmp_path}/train.json"
    hp = replace(BASE, dataset=f"stream:{tmp_path}/train.json", max_steps=2, num_ranks=1, test_dataset=tests)
    records = read_records(train(hp, tmp_path, loaders=2).metrics)
    assert (records[0]["test_samples"], records[-1]["kind"]) == (297, "end")


@pytest.mark.slow
def test_ranks_learn_from_streams_of_their_own_also_after_one_was_killed(shards: Path, tmp_path, monkeypatch) -> None:
    """It takes its worker along, and the retry begins another stream."""
    hp = replace(BASE, dataset=f"stream:{shards}/train.json", model="faults:model", epochs=1, log_interval=1)
    monkeypatch.setenv("MARK", str(tmp_path))  # in the environment of the workers
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="SIGKILL", **{"pass": 5})
    with pytest.raises(RankLostError, match="killed by SIGKILL"):
        train(hp, tmp_path, loaders=1)
    wait_until(lambda: not processes_with(f"MARK={tmp_path}", "spawn_main"), 5)
    result = train(hp, tmp_path, loaders=1)
    assert result.test_accuracy > 0.3
    *_, start = (record for record in read_records(result.metrics) if record["kind"] == "start")
    # 2 of 20 shards for testing, 2 of 18 for validation, and whole batches of the others' samples.
    assert (start["test_samples"], start["validation_samples"]) == (2 * PER_SHARD, 2 * PER_SHARD)
    assert start["training_samples"] == 16 * PER_SHARD
    assert start["steps"] == 16 * PER_SHARD // 50
    said = read_records(result.metrics)[-1]["notes"]
    (note,) = (note for note in said if "resumed from a checkpoint" in note)
    assert [line for line in said if line != note] == [
        "The training data were a stream: each rank and each worker read different shards."
    ]


@pytest.mark.parametrize(
    ("workers", "bad_samples", "said"),
    [
        (0, 0, r"tar cannot be decoded: .*bad_samples$"),
        pytest.param(1, 0, r"tar cannot be decoded: .*bad_samples$", marks=pytest.mark.slow),
        (0, 50, r": no sample of this worker can be .*unknown image f"),  # else it would look for a good one for ever
    ],
)
def test_samples_that_cannot_be_used_are_one_error(tmp_path: Path, workers: int, bad_samples: int, said: str) -> None:
    contents = {".jpg": b"no image", ".cls": b"1"}
    pack_samples(
        lambda number: (f"{number}", contents), 12, tmp_path, classes=["a", "b"], samples_per_shard=3, progress="off"
    )
    options = options_of(tmp_path, classes=2, workers=workers, bad_samples=bad_samples)
    images = StreamImages(options, torch.device("cpu"))
    with pytest.raises(UserError, match=rf"^sample '\d+' in shard .*{said}") as caught:
        images.load_batch(np.arange(3), 0)
    # The error, which is still held, holds no worker: whoever ends the run kills those left, for which torch raises.
    assert caught.tb is not None
    assert not multiprocessing.active_children()
    images.close()


def test_a_batch_that_never_comes_is_an_error(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "limit_seconds", 0.2)
    images = StreamImages(options_of(shards), torch.device("cpu"))
    images.samples = (threading.Event().wait() for _ in range(9))  # type: ignore[assignment]
    with pytest.raises(MachineError, match=r"^a batch of the stream was not ready within 0.2 s \(FLYTE_DDP_TIMEOUT\)"):
        images.load_batch(np.arange(3), 0)


def test_weights_are_refused_before_a_rank_starts_and_more_readers_than_shards_by_ranks(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*_: object, **__: object) -> None:
        pytest.fail("a rank was started")

    parts = [{"source_url": f"{shards}/train.json", "weight": 2}]
    (tmp_path / "weighted.json").write_text(json.dumps({"wids_version": 1, "datasets": parts}))
    hp = replace(BASE, dataset=f"stream:{tmp_path}/weighted.json", num_classes=10)
    with pytest.raises(UserError, match=r"has weight 2, .*stream.*; use shards:ADDRESS"):
        train(hp, tmp_path / "weighted", loaders=1, launch=launch)
    hp = replace(BASE, dataset=f"stream:{shards}/train.json")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(UserError, match="streams need webdataset, which is not installed"):
            train(hp, tmp_path / "without", loaders=1, launch=launch)
    data = open_prepared(fetch(hp.dataset, "", tmp_path / "data", progress="off"))
    with pytest.raises(UserError, match="has 16 training shards for 1 ranks x 17 workers"):
        OpenedData(hp, data).open_splits(detect_hardware(hp), torch.device("cpu"), quiet(tmp_path, loaders=17))
