"""Indexes made of shards or of other indexes, mistakes that are refused, and samples that cannot be trained on."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from file_server import FileServer
from image_folders import image_bytes
from tars import indexed, samples, shard_bytes, write_shards
from wids import wids_specs

from flyte_ddp.core.errors import UserError
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.encoded.readers import ShardImages
from flyte_ddp.shards import tabulating
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardDataset, ShardReader
from flyte_ddp.shards.index import Part, read_index
from flyte_ddp.shards.scanning import create_index, expand_address_ranges, join_indexes, verify_index


@pytest.mark.slow
def test_an_index_of_remote_shards(server: FileServer, tmp_path: Path, monkeypatch) -> None:
    """In the order of their names, whatever the order is in which they come; faults that pass are no matter.

    Of a single sample no more than its members is read.
    """
    contents = [samples(4 + seed % 3, seed, f"{seed}/") for seed in range(10)]
    server.files = {f"bucket/s/{number:02d}.tar": shard_bytes(found) for number, found in enumerate(contents)}
    server.faults = {"bucket/s/03.tar": ["reset", 503, "truncate"], "bucket/s/00.tar": ["stall"]}
    monkeypatch.setattr("flyte_ddp.storage.transfer.READ_TIMEOUT", 0.5)
    index = create_index([f"{server.url}/bucket/s/{{00..09}}.tar"], tmp_path / "index.json", progress="off")
    assert index.counts.tolist() == [len(found) for found in contents]
    assert read_index(str(tmp_path / "index.json")).shards == index.shards
    dataset = ShardDataset(tmp_path / "index.json", tmp_path / "cache", decode=False)
    expected = [(key, found[".bin"], found[".cls"]) for shard in contents for key, found in shard.items()]
    got = [(sample["__key__"], sample[".bin"], sample[".cls"]) for sample in map(dataset.__getitem__, range(0, 49, 7))]
    assert got == expected[:49:7]
    assert verify_index(str(tmp_path / "index.json"), progress="off") == []


def test_patterns_of_names() -> None:
    assert [name for url in ("a", "b{08..11}c") for name in expand_address_ranges(url)] == [
        "a",
        "b08c",
        "b09c",
        "b10c",
        "b11c",
    ]
    assert expand_address_ranges("{9..10}/{000..001}") == ["9/000", "9/001", "10/000", "10/001"]
    assert expand_address_ranges("{5..4}") == []
    with pytest.raises(UserError, match=r"^s\{0\.\.99999999999\}\.tar: expands to 100,000,000,000 shards"):
        expand_address_ranges("s{0..99999999999}.tar")
    with pytest.raises(UserError, match="expands to 16,000,000 shards"):
        expand_address_ranges("{1..4000}/{1..4000}")


def test_a_label_out_of_range(tmp_path: Path) -> None:
    def create(label: bytes, *classes: str) -> tuple[str, ...]:
        contents = {"a": {".png": image_bytes(), ".cls": b"1"}, "b": {".png": image_bytes(), ".cls": label}}
        paths = write_shards(tmp_path, contents)
        return create_index([str(paths[0])], tmp_path / "x.json", classes=classes, progress="off").classes

    for label, classes, said in (
        (b"2", ("one", "two"), f"^shard {tmp_path}/0.tar: has label 2, .* 2 classes labels must be 0..1"),
        (b"-1", (), f"in {tmp_path}/0.tar: label -1; must be at least 0"),
        (b"x", (), f"in {tmp_path}/0.tar: its .cls is b'x'; must be a class number"),
        (b"99999999999", (), "has label 99999999999, .* 1000000 classes"),
    ):
        with pytest.raises(UserError, match=said):
            create(label, *classes)
        assert [found.name for found in tmp_path.iterdir()] == ["0.tar"]
    assert create(b"2") == ("0", "1", "2")


@pytest.mark.parametrize(
    ("urls", "output", "said"),
    [
        ([], "x.json", "no shards: give at least one tar file"),
        (["0.tar", "./0.tar"], "x.json", "0.tar is given twice"),
        (["nothing.tar"], "x.json", "nothing.tar: has no samples"),
        (["0.tar"], "s3://bucket/x.json", "cannot be written to; choose a local path"),
        (["0.tar"], "0.tar", "0.tar: would overwrite .*0.tar, an input"),
        (["0.tar"], "nothing.tar", "nothing.tar: exists and is not an index; remove it, or choose another name"),
    ],
)
def test_mistakes_in_creating(tmp_path: Path, monkeypatch, urls: list[str], output: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path, samples(3))
    (tmp_path / "nothing.tar").write_bytes(shard_bytes({}))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=said):
        create_index(urls, Path(output), progress="off")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_mistake_ends_the_work_of_all_threads(server: FileServer, tmp_path: Path) -> None:
    """Of many shards only a few more are read after one that is none."""
    for number in range(200):
        server.files[f"{number}.tar"] = shard_bytes(samples(1)) if number else b"none"
    with pytest.raises(UserError, match=r"/0\.tar: not a complete"):
        create_index([f"{server.url}/{{0..199}}.tar"], tmp_path / "x.json", progress="off")
    assert len(server.requests) <= 3 * tabulating.THREADS
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_ends_the_reading_of_long_shards(tmp_path: Path) -> None:
    """Python waits for threads before it exits: beside a bad shard it would be for these 64 GiB, which are no shard."""
    bad, *whole = write_shards(tmp_path, samples(1), samples(1), samples(1, prefix="b"))
    bad.write_bytes(b"none")
    for path in whole:
        os.truncate(path, 64 << 30)  # zeros after the end mark, which take no place on the disk
    before = {*threading.enumerate()}
    with pytest.raises(UserError, match=r"/0\.tar: not a complete"):
        create_index([str(bad), *map(str, whole)], tmp_path / "x.json", progress="off")
    for thread in {*threading.enumerate()} - before:
        thread.join(30.0)
        assert not thread.is_alive()


def counted(folder: Path, *counts: int, **options: Any) -> str:
    """The address of an index of shards with so many samples."""
    shards = (samples(number, prefix=f"{place}-") for place, number in enumerate(counts))
    return str(indexed(folder, *shards, name=folder.name, **options))


def test_an_index_of_the_shards_of_others_with_their_weights(tmp_path: Path) -> None:
    one, two = counted(tmp_path / "here" / "one", 8, 9), counted(tmp_path / "here" / "two", 7)
    written = join_indexes([one, f"file://{two}"], tmp_path / "here" / "both.json", weights=[2, 0.5])
    index = read_index(str(tmp_path / "here" / "both.json"))
    assert (index.shards, index.parts, index.digest) == (written.shards, written.parts, written.digest)
    assert (index.name, index.parts, index.classes) == ("both", (Part("one", 2.0), Part("two", 0.5)), tuple("0123456"))
    alone = [read_index(address).shards for address in (one, two)]
    assert index.shards == [*alone[0], *(shard._replace(part=1) for shard in alone[1])]
    (tmp_path / "here").rename(tmp_path / "there")  # all of it goes with its folder
    moved = read_index(str(tmp_path / "there" / "both.json")).shards
    assert [shard.url for shard in moved] == [shard.url.replace("/here/", "/there/") for shard in index.shards]


def test_wids_finds_the_same_joined_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # which wids takes relative addresses to refer to
    index = join_indexes([counted(tmp_path / name, 7, 8) for name in "ab"], tmp_path / "both.json", weights=[1, 3])
    found = wids_specs.load_dsdesc_and_resolve("both.json")["shardlist"]
    assert [(str(Path(entry["url"]).absolute()), entry["nsamples"], entry["weight"]) for entry in found] == [
        (shard.url, shard.samples, index.parts[shard.part].weight) for shard in index.shards
    ]


def test_mistakes_in_joining(tmp_path: Path) -> None:
    a, b = (counted(tmp_path / name, 7) for name in "ab")
    c = counted(tmp_path / "c", 7, classes=tuple("xyzuvwt"))
    join_indexes([a, b], tmp_path / "joined.json")
    for addresses, weights, said in (
        ([a], [], "must be two or more"),
        ([a, f"file://{a}"], [], "each given once"),
        ([a, b], [1], "1 weights: must be one for each"),
        ([a, b], [1, 0], "weight=0: must be a number above 0"),
        ([a, str(tmp_path / "joined.json")], [], "refers to other indexes"),
        ([a, c], [], r"c/index.json has the classes \['x',"),
    ):
        with pytest.raises(UserError, match=said):
            join_indexes(addresses, tmp_path / "out.json", weights=weights)
        assert not (tmp_path / "out.json").exists()


IMAGE = image_bytes()
GOOD = {f"{number}": {".png": IMAGE, ".cls": b"%d" % (number % 2)} for number in range(3)}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves them to be collected
def test_the_case_of_extensions_is_ignored_as_in_webdataset(tmp_path: Path) -> None:
    contents = {
        "a": {".JPG": b"first", ".CLS": b"1"},
        "b": {".Jpeg": b"second", ".cls": b"0", ".JSON": b"{}"},
        "c": {".seg.png": b"mask", ".PNG": b"third", ".Cls": b"3"},
    }
    [path] = write_shards(tmp_path, contents)
    index = create_index([str(path)], tmp_path / "index.json", progress="off")
    assert index.classes == ("0", "1", "2", "3")
    reader = ShardImages(ShardReader(index, ShardCache(tmp_path / "cache")))
    found = [reader.read_sample(number) for number in range(3)]
    expected = [
        (sample["__key__"], next(sample[name] for name in ("jpg", "jpeg", "png") if name in sample), int(sample["cls"]))
        for sample in wds.WebDataset(str(path), shardshuffle=False)
    ]
    assert [(sample.key, sample.content, sample.label) for sample in found] == expected
    fetch(f"shards:{tmp_path / 'index.json'}", "", tmp_path / "prepared", progress="off")


def test_what_training_refuses_is_said_before_ranks_start_and_by_verifying(tmp_path: Path) -> None:
    """Of a name with dots, a key ends at the first."""
    unfit = {f"2024.{day:02}": {".jpg": IMAGE, ".cls": b"1"} for day in range(9)}
    first, second = write_shards(tmp_path, GOOD, unfit)
    members = ".00.jpg, .00.cls, .01.jpg, .01.cls, .02.jpg, .02.cls; training reads KEY.jpg"
    said = f"sample '2024' in shard {second} has no image, only {members}"
    output = tmp_path / "index.json"
    create_index([str(first), str(second)], output, progress="off")
    assert [line for line in verify_index(str(output), decode=True, progress="off") if line.startswith(said)]
    assert verify_index(str(output), progress="off") == []
    create_index([str(second)], output, progress="off")
    with pytest.raises(UserError) as caught:
        fetch(f"shards:{output}", "", tmp_path / "prepared", progress="off")
    assert caught.value.message.startswith(said)
    assert not (tmp_path / "prepared").exists()


def test_of_a_remote_shard_the_first_sample_is_read(server: FileServer, tmp_path: Path) -> None:
    large = {f"{number}": {".png": bytes(5_000_000), ".cls": b"cat"} for number in range(4)}
    server.files["0.tar"] = shard_bytes(large)
    server.files["index.json"] = json.dumps({"shardlist": [{"url": "0.tar", "nsamples": 4}]}).encode()
    with pytest.raises(UserError, match=r"sample '0' in shard .*0.tar: its .cls is b'cat'; must be a class number"):
        fetch(f"shards:{server.url}/index.json", "", tmp_path / "prepared", progress="off")
    assert server.counts["0.tar"] == 1
    assert [path.name for path in tmp_path.iterdir()] == []
    server.files["0.tar"] = shard_bytes(GOOD)
    server.faults["0.tar"] = [503]  # which passes
    fetch(f"shards:{server.url}/index.json", "", tmp_path / "prepared", progress="off")
