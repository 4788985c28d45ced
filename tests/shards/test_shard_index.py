"""Indexes: wids reads ours and we read those of its tool, wherever they are; what is none is one clear error."""

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import wids
import wids.wids_index
from file_server import FileServer
from served_shards import all_of
from tars import indexed, samples, write_shards

from flyte_ddp.core.errors import UserError
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.index import Part, Shard, ShardIndex, read_index

Content = dict[str, Any]
FIRST, SECOND = samples(5), samples(3, seed=1, prefix="é/")
BOTH = [*FIRST.items(), *SECOND.items()]


def entry(url: str, number: int = 5, **more: Any) -> Content:
    return {"url": url, "nsamples": number, **more}


def index_of(*shards: Content, **more: Any) -> Content:
    return {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": list(shards), **more}


def written(path: Path, content: Content) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return str(path)


def theirs(index: str, folder: Path) -> list[tuple[str, dict[str, bytes]]]:
    """Keys and members as wids reads them."""
    dataset = wids.ShardListDataset(index, cache_dir=str(folder), transformations=[])
    found = [dataset[i] for i in range(len(dataset))]
    dataset.close()
    return [(sample["__key__"], {k: v.read() for k, v in sample.items() if k.startswith(".")}) for sample in found]


def ours(index: str, folder: Path) -> list[tuple[str, dict[str, bytes]]]:
    return all_of(ShardDataset(index, folder, decode=False))


def test_wids_reads_what_we_write(tmp_path: Path) -> None:
    index = indexed(tmp_path / "shards", FIRST, SECOND, classes=list("abcdefg"))
    for number, found in enumerate(json.loads(index.read_text())["shardlist"]):
        stored = (tmp_path / "shards" / f"{number}.tar").read_bytes()
        assert found == entry(f"{number}.tar", (5, 3)[number]) | {
            "filesize": len(stored),
            "md5sum": hashlib.md5(stored).hexdigest(),
            "sha256": hashlib.sha256(stored).hexdigest(),
            "table": found["table"],
        }
    assert ours(str(index), tmp_path / "cache") == theirs(str(index), tmp_path / "wids") == BOTH
    # All of it can be moved to another place.
    index = (tmp_path / "shards").rename(tmp_path / "moved") / "index.json"
    assert ours(str(index), tmp_path / "cache") == theirs(str(index), tmp_path / "wids-moved") == BOTH


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # wids leaves shards to be collected
def test_we_read_what_wids_own_tool_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path / "shards", FIRST, SECOND)
    monkeypatch.chdir(tmp_path / "shards")
    monkeypatch.setattr(wids.wids_index.wids_dl, "download_file", lambda remote, _: remote)  # it would be in /tmp
    output = tmp_path / "theirs.json"
    given = {"files": ["{0..1}.tar"], "output": str(output), "name": "n", "info": None, "base": "shards"}
    wids.wids_index.main_create(argparse.Namespace(**given))
    index = read_index(str(output))
    assert (index.name, index.counts.tolist(), index.parts) == ("n", [5, 3], (Part("n"),))
    stored = [(tmp_path / "shards" / name).read_bytes() for name in ("0.tar", "1.tar")]
    assert [shard.md5 for shard in index.shards] == [hashlib.md5(content).hexdigest() for content in stored]
    assert ours(str(output), tmp_path / "cache") == BOTH


def test_data_sets_of_other_indexes(tmp_path: Path) -> None:
    written(tmp_path / "one" / "inner.json", index_of(entry("0.tar", filesize=9), base="two", name="inner", weight=7))
    outer = index_of(
        entry("0.tar"),
        name="own",
        base="one/two",
        weight=2,
        datasets=[
            {"name": "inline", "shardlist": [entry("1.tar"), entry("2.tar")], "weight": 0.5},
            {"name": "elsewhere", "shardlist": [entry("3.tar")], "base": "three"},
            {"source_url": "../inner.json", "weight": 3},
        ],
    )
    index = read_index(written(tmp_path / "outer.json", outer))
    assert index.parts == (Part("own", 2.0), Part("inline", 0.5), Part("elsewhere", 1.0), Part("inner", 3.0))
    two, three = tmp_path / "one" / "two", tmp_path / "three"
    assert index.shards == [
        Shard(f"{two}/0.tar", 5),
        Shard(f"{two}/1.tar", 5, part=1),
        Shard(f"{two}/2.tar", 5, part=1),
        Shard(f"{three}/3.tar", 5, part=2),
        Shard(f"{two}/0.tar", 5, size=9, part=3),
    ]
    without_own = outer | {"shardlist": []}
    assert read_index(written(tmp_path / "outer.json", without_own)).parts == index.parts[1:]


def test_samples_are_found_also_among_empty_shards() -> None:
    counts = [0, 3, 0, 0, 2, 1, 0]
    index = ShardIndex("", [Shard(f"{i}.tar", count) for i, count in enumerate(counts)])
    expected = [(shard, inside) for shard, count in enumerate(counts) for inside in range(count)]
    assert [index.locate_sample(sample) for sample in range(len(index))] == expected


def test_the_digest_changes_with_what_identifies_the_content(tmp_path: Path) -> None:
    one, two = Shard("a.tar", 5, 9, "", "ab"), Shard("b.tar", 5)
    index = ShardIndex("n", [one, two], classes=("x",))
    moved = replace(index, name="other", shards=[one._replace(url="elsewhere.tar"), two])
    assert moved.digest == index.digest  # content with a digest is the same wherever it is
    others = [
        replace(index, shards=[one._replace(sha256="cd"), two]),
        replace(index, shards=[one, two._replace(url="c.tar")]),
        replace(index, shards=[two, one]),
        replace(index, shards=[one._replace(samples=6), two]),
        replace(index, classes=("y",)),
        replace(index, parts=(Part("", 2.0),)),
        replace(index, shards=[Shard(f"\udcff{tmp_path}", 5)]),  # a name that is no text can be in it, too
    ]
    assert len({other.digest for other in [index, *others]}) == len(others) + 1


def broken(**shard: Any) -> str:
    return json.dumps(index_of(entry("a.tar"), entry("b.tar") | shard, flyte_ddp={"classes": ["a"], "tables": "t"}))


def only(**more: Any) -> str:
    return json.dumps(index_of(entry("a"), **more))


MALFORMED = {
    "\x00\x01": "is not JSON",
    only()[:-1] + ', "shardlist": []}': "the key 'shardlist' occurs twice",
    '{"shardlist": [{"url": "a", "nsamples": 1, "nsamples": 2}]}': "the key 'nsamples' occurs twice",
    '{"shardlist": []}': "has neither",
    '{"datasets": 5}': "a wrong type",
    '{"shardlist": {"a": 1}}': "a wrong type",
    '{"datasets": [{"source_url": 5}]}': "5 is not an address",
    '{"datasets": [{"shardlist": [{"url": "a", "nsamples": 1}], "datasets": [{}]}]}': "refers to other indexes",
    only(__kind__="wids-shard-index-v2"): "of kind 'wids-shard-index-v2'",
    only(weight=0): "weight=0",
    only(flyte_ddp={"classes": "abc"}): "classes is 'abc'",
    json.dumps(index_of({"url": "a"})): "shard 0 in its shardlist is missing or has a wrong type .*'nsamples'",
    broken(url=""): "'' is not an address",
    broken(url="pipe:cat http://h/x"): "must be a path, or start with",
    broken(nsamples=-1): "-1: must be 0 to",
    broken(table=[1, "2", "3"]): "'2': must be 0 to",
}


def test_an_index_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    for text, said in MALFORMED.items():
        path.write_text(text)
        with pytest.raises(UserError, match=rf"^index {path}: .*{said}.*$") as caught:
            read_index(str(path))
        assert len(caught.value.message) < 600
    with pytest.raises(UserError, match=r"is not JSON .*null byte"):
        read_index(f"{tmp_path}/a\0b")


def test_an_index_that_is_not_there(tmp_path: Path, server: FileServer) -> None:
    for address, said in {str(tmp_path / "no.json"): "no such file", f"{server.url}/no.json": "HTTP 404"}.items():
        with pytest.raises(UserError, match=f"^index {address}: cannot be read .*{said}.*check the (address|path)"):
            read_index(address)
    server.files["i.json"] = only().encode()
    server.faults["i.json"] = [503, "truncate", "reset"]
    assert len(read_index(f"{server.url}/i.json")) == 5  # and one that is there the next time is read
