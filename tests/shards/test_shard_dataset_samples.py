"""The map-style data set: what samples are, that they bring no code along, and shards that are damaged or replaced."""

import io
import json
import os
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import wids
from file_server import FileServer
from image_folders import image_bytes
from served_shards import all_of, members_of, serve_samples
from tars import indexed, npy_bytes, samples, write_shards
from traps import MakesFolder

from flyte_ddp.core.errors import UserError
from flyte_ddp.shards import dataset as dataset_module
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.scanning import tables_path


def test_samples_are_those_of_wids(tmp_path: Path) -> None:
    """All names and, decoded, all values, but for __dataset__, which wids leaves empty."""
    kinds = {".jpg": image_bytes("JPEG"), ".seg.png": image_bytes("PNG"), ".cls": b"3", ".txt": "é".encode()}
    kinds |= {".json": b'{"a": [1]}', ".npy": npy_bytes(np.arange(6).reshape(2, 3)), ".other": b"bytes"}
    index = indexed(tmp_path / "in", {"a/1": kinds, "a/2": kinds}, {"b.c/3": kinds}, name="data")
    decoder = partial(wids.wids.default_decoder, format="PIL")
    theirs = wids.ShardListDataset(str(index), cache_dir=str(tmp_path / "wids"), transformations=[decoder])
    ours = ShardDataset(index, tmp_path / "cache")
    assert len(ours) == len(theirs) == 3
    for number in range(3):
        mine, other = ours[number], theirs[number]
        other[".other"] = other[".other"].read()
        assert (mine.pop("__dataset__"), other.pop("__dataset__")) == ("data", None)
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if name in (".jpg", ".seg.png", ".npy"):
                assert np.array_equal(np.asarray(mine[name]), np.asarray(value))
            else:
                assert mine[name] == value
    theirs.close()


def test_a_member_that_the_system_gives_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does from 2 GB on."""
    dataset = ShardDataset(indexed(tmp_path, samples(1)), tmp_path / "cache", decode=False)
    whole, pread = dataset[0], os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, start: pread(file, min(length, 3), start))
    assert dataset[0] == whole


def test_numbers_count_from_the_end_too_and_end_somewhere(tmp_path: Path) -> None:
    dataset = ShardDataset(indexed(tmp_path, samples(3), samples(2, prefix="b")), tmp_path / "cache", decode=False)
    assert dataset[-1] == dataset[4] == dataset[np.int32(4)] == dataset[torch.tensor(4)]
    assert type(dataset[np.int64(4)]["__index__"]) is int
    assert [sample["__shardindex__"] for sample in dataset] == [0, 1, 2, 0, 1]
    for number, error in {5: IndexError, -6: IndexError, "a": TypeError}.items():
        with pytest.raises(error):
            dataset[number]


def test_no_code_is_run_that_data_bring_along(tmp_path: Path) -> None:
    attack = MakesFolder(tmp_path / "attacked")
    evil = pickle.dumps(attack)
    kept = dict.fromkeys((".pkl", ".pickle", ".pyd", ".pt", ".pth", ".mp", ".x.pkl"), evil)
    archive = io.BytesIO()
    np.savez(archive, allow_pickle=True, a=np.array([attack], dtype=object))
    refused = {"npy1": npy_bytes(np.array([attack], dtype=object)), "npy2": evil, "npy3": archive.getvalue()}
    index = indexed(tmp_path / "in", {"kept": kept} | {key: {".npy": content} for key, content in refused.items()})
    dataset = ShardDataset(index, tmp_path / "cache")
    assert members_of(dataset[0]) == kept
    for number, key in enumerate(refused, 1):
        with pytest.raises(UserError, match=rf"^sample '{key}' in {tmp_path}/in/0\.tar: \.npy cannot be decoded"):
            dataset[number]
    assert not (tmp_path / "attacked").exists()
    np.load(io.BytesIO(refused["npy1"]), allow_pickle=True)  # and it would have worked
    assert (tmp_path / "attacked").exists()


@pytest.mark.usefixtures("no_collection")
def test_a_member_that_is_not_what_its_name_says(tmp_path: Path) -> None:
    for name, content, said in (
        (".jpg", b"no image", "unknown image format"),
        (".cls", b"three", "invalid literal"),
        (".txt", b"\xff", "can't decode"),
        (".json", b"[" * 100_000, "recursion"),
        (".npy", npy_bytes(np.arange(5))[:-1], "array"),
    ):
        dataset = ShardDataset(indexed_raw(tmp_path, {"k": {name: content}}), tmp_path / "cache")
        where = rf"^sample 'k' in {tmp_path}/0\.tar: {name} cannot be decoded"
        with pytest.raises(UserError, match=rf"{where} \(.*{said}.*fix.*$") as caught:
            dataset[0]
        assert " object at 0x" not in caught.value.message


def indexed_raw(folder: Path, *shards: dict[str, dict[str, bytes]]) -> Path:
    """An index as wids makes it, without digests and tables; the samples may be damaged."""
    paths = write_shards(folder, *shards)
    entries = [{"url": path.name, "nsamples": len(found)} for path, found in zip(paths, shards, strict=True)]
    (folder / "raw.json").write_text(json.dumps({"wids_version": 1, "shardlist": entries}))
    return folder / "raw.json"


def test_damage_in_the_cache_names_the_cached_file(server: FileServer, tmp_path: Path) -> None:
    served = serve_samples(server, 5)
    cache = ShardCache(tmp_path)
    dataset = ShardDataset(served.index, cache)
    assert dataset[3][".cls"] == 3
    path = cache.cached_path(served.index.shards[0])
    content = path.read_bytes()
    with dataset.reader.hold_shard_open(0) as shard:
        _, member = shard.table.list_sample_members(3)
    path.write_bytes(content[: member.offset] + b"?" + content[member.offset + 1 :])
    with pytest.raises(UserError, match=rf"\.cls cannot be decoded .* \(cached in {path}\)$"):
        dataset[3]


def test_a_shard_on_this_machine_of_another_size_or_gone(tmp_path: Path) -> None:
    index, path = indexed(tmp_path, samples(5)), tmp_path / "0.tar"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"^shard {path}: has [\d,]+ bytes, but the index lists [\d,]+"):
        ShardDataset(index, tmp_path / "cache")[0]
    path.unlink()
    with pytest.raises(UserError, match=rf"^shard {path}: cannot be fetched \(No such file or directory\)"):
        ShardDataset(index, tmp_path / "cache")[0]


def test_another_number_of_samples_than_the_index_says(tmp_path: Path) -> None:
    for index in (indexed_raw(tmp_path, samples(5)), indexed(tmp_path, samples(5))):
        for number in (4, 6):
            content = json.loads(index.read_text())
            content["shardlist"][0]["nsamples"] = number
            index.write_text(json.dumps(content))
            with pytest.raises(
                UserError, match=rf"^shard {tmp_path}/0\.tar: has 5 samples, but the index lists {number}"
            ):
                ShardDataset(index, tmp_path / "cache")[0]


def flip_bit(tables: Path) -> None:
    content = tables.read_bytes()
    tables.write_bytes(content[:90] + bytes([content[90] ^ 1]) + content[91:])


def test_without_its_tables_an_index_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = indexed(tmp_path, samples(5), samples(5, prefix="b"))
    read: list[str] = []
    tabulate = dataset_module.group_members_into_samples
    noted = lambda found, shard: read.append(shard) or tabulate(found, shard)  # noqa: E731
    monkeypatch.setattr(dataset_module, "group_members_into_samples", noted)
    expected = all_of(ShardDataset(index, tmp_path / "cache"))
    assert read == []  # the tables are used
    for damage in (flip_bit, lambda tables: os.truncate(tables, tables.stat().st_size // 2), Path.unlink):
        damage(tables_path(index))
        assert all_of(ShardDataset(index, tmp_path / "cache")) == expected
        assert read
        read.clear()


def test_tables_of_another_time_give_no_wrong_data(tmp_path: Path) -> None:
    first = {f"{i}": {".a": b"%d" % i, ".b": b"%d" % (i + 1)} for i in range(5)}
    other = {f"{9 - i}": {".b": b"%d" % i, ".a": b"%d" % (i + 2)} for i in range(5)}
    old, new = indexed(tmp_path / "old", first), indexed(tmp_path / "new", other)
    tables_path(old).write_bytes(tables_path(new).read_bytes())
    assert all_of(ShardDataset(old, tmp_path / "cache", decode=False)) == list(first.items())
