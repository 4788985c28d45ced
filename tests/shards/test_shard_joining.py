"""One index for several data sets."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tars import samples, write_shards
from wids import wids_specs

from flyte_ddp.errors import UserError
from flyte_ddp.shards.index import Part, read_index
from flyte_ddp.shards.joining import join_indexes
from flyte_ddp.shards.scanning import create_index


def indexed(folder: Path, *shards: int, classes: tuple[str, ...] = ()) -> str:
    """The address of an index of shards with so many samples."""
    paths = write_shards(folder, *(samples(number, prefix=f"{place}-") for place, number in enumerate(shards)))
    urls = [str(path) for path in paths]
    create_index(urls, folder / "all.json", name=folder.name, classes=classes, progress="off")
    return str(folder / "all.json")


def test_the_shards_of_all_with_their_weights(tmp_path: Path) -> None:
    one, two = indexed(tmp_path / "here" / "one", 8, 9), indexed(tmp_path / "here" / "two", 7)
    written = join_indexes([one, f"file://{two}"], tmp_path / "here" / "both.json", weights=[2, 0.5])
    index = read_index(str(tmp_path / "here" / "both.json"))
    assert (index.shards, index.parts, index.digest) == (written.shards, written.parts, written.digest)
    assert (index.name, index.parts, index.classes) == ("both", (Part("one", 2.0), Part("two", 0.5)), tuple("0123456"))
    alone = [read_index(address).shards for address in (one, two)]
    assert index.shards == [*alone[0], *(shard._replace(part=1) for shard in alone[1])]
    assert (index.summary()["part 0"], index.summary()["part 1"]) == ("weight 2, one", "weight 0.5, two")
    (tmp_path / "here").rename(tmp_path / "there")  # all of it goes with its folder
    moved = read_index(str(tmp_path / "there" / "both.json")).shards
    assert [shard.url for shard in moved] == [shard.url.replace("/here/", "/there/") for shard in index.shards]


def test_wids_finds_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # which wids takes relative addresses to refer to
    index = join_indexes([indexed(tmp_path / name, 7, 8) for name in "ab"], tmp_path / "both.json", weights=[1, 3])
    found = wids_specs.load_dsdesc_and_resolve("both.json")["shardlist"]
    assert [(str(Path(entry["url"]).absolute()), entry["nsamples"], entry["weight"]) for entry in found] == [
        (shard.url, shard.samples, index.parts[shard.part].weight) for shard in index.shards
    ]


def test_what_it_is_made_of_is_kept(tmp_path: Path) -> None:
    addresses = [indexed(tmp_path / name, 7) for name in "ab"]
    (tmp_path / "link").symlink_to(tmp_path / "b")
    before = [Path(address).read_bytes() for address in addresses]
    for output in (Path(addresses[0]), tmp_path / "link" / "all.json"):
        with pytest.raises(UserError, match=r"would replace .*all\.json, which it is made from"):
            join_indexes(addresses, output)
    with pytest.raises(UserError, match=r"0\.tar: exists and is not an index"):
        join_indexes(addresses, tmp_path / "a" / "0.tar")
    assert [Path(address).read_bytes() for address in addresses] == before
    for _ in range(2):
        join_indexes(addresses, tmp_path / "both.json")


MISTAKES: list[tuple[Callable[[str, str, str], list[str]], list[float], str]] = [
    (lambda a, *_: [a], [], "must be two or more"),
    (lambda a, *_: [a, f"file://{a}"], [], "each given once"),
    (lambda a, b, _: [a, b], [1], "1 weights: must be one for each"),
    (lambda a, b, _: [a, b], [1, 0], "weight=0; must be a number above 0"),
    (lambda a, *_: [a, a.replace("all", "gone")], [], "gone.json: cannot be read"),
    (lambda a, *_: [a, a.replace("a/all", "joined")], [], "refers to other indexes"),
    (lambda a, _, c: [a, c], [], "c/all.json has the classes ['x',"),
    (lambda a, *_: [a, a.replace("a/all", "wrong")], [], "wrong.json: a field has a wrong type (flyte_ddp is 'x')"),
    (lambda a, *_: [a, a.replace("a/all", "number")], [], "number.json: a field has a wrong type (shardlist is 5)"),
]


def test_mistakes(tmp_path: Path) -> None:
    a, b = (indexed(tmp_path / name, 7) for name in "ab")
    c = indexed(tmp_path / "c", 7, classes=tuple("xyzuvwt"))
    join_indexes([a, b], tmp_path / "joined.json")
    (tmp_path / "wrong.json").write_text('{"flyte_ddp": "x", "shardlist": [{"url": "0.tar", "nsamples": 1}]}')
    (tmp_path / "number.json").write_text('{"shardlist": 5}')
    for addresses, weights, said in MISTAKES:
        with pytest.raises(UserError) as caught:
            join_indexes(addresses(a, b, c), tmp_path / "out.json", weights=weights)
        assert said in caught.value.message
        assert not (tmp_path / "out.json").exists()
