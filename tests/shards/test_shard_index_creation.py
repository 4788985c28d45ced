"""Indexes made of shards on this machine and on servers, samples read with them, and mistakes that are refused."""

from pathlib import Path

import pytest
from file_server import FileServer
from image_folders import image_bytes, write_files
from surroundings import s3_environment
from tars import samples, shard_bytes, write_shards

from flyte_ddp.errors import UserError
from flyte_ddp.report.previews import render_index_preview
from flyte_ddp.shards import scanning
from flyte_ddp.shards.__main__ import read_class_names
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.index import read_index
from flyte_ddp.shards.inspection import read_sample
from flyte_ddp.shards.scanning import create_index, expand_ranges, verify_index


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["http", "s3", "gs", "file"])
def test_an_index_of_remote_shards(
    scheme: str, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their names, whatever the order is in which they come; faults that pass are no matter.

    Of a single sample no more than its members is read.
    """
    contents = [samples(4 + seed % 3, seed, f"{seed}/") for seed in range(10)]
    s3_environment(server.url, monkeypatch)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    server.files = {f"bucket/s/{number:02d}.tar": shard_bytes(found) for number, found in enumerate(contents)}
    write_files(tmp_path, server.files)
    start = {"http": server.url, "s3": "s3:/", "gs": "gs:/", "file": f"file://{tmp_path}"}[scheme]
    server.faults = {"bucket/s/03.tar": ["reset", 503, "truncate"], "bucket/s/00.tar": ["stall"]}
    monkeypatch.setattr("flyte_ddp.storage.failures.READ_TIMEOUT", 0.5)
    index = create_index([f"{start}/bucket/s/{{00..09}}.tar"], tmp_path / "index.json", progress="off")
    assert index.counts.tolist() == [len(found) for found in contents]
    assert read_index(str(tmp_path / "index.json")).shards == index.shards
    dataset = ShardDataset(tmp_path / "index.json", tmp_path / "cache", decode=False)
    expected = [(key, found[".bin"], found[".cls"]) for shard in contents for key, found in shard.items()]
    got = [(sample["__key__"], sample[".bin"], sample[".cls"]) for sample in map(dataset.__getitem__, range(0, 49, 7))]
    assert got == expected[:49:7]
    assert verify_index(str(tmp_path / "index.json"), progress="off") == []
    server.spans.clear()
    assert read_sample(str(tmp_path / "index.json"), 42) == dataset[42]
    lengths = [512 + len(content) for content in expected[42][1:]]
    asked = [text.removeprefix("bytes=").split("-") for text in server.spans]
    assert [int(end) - int(start) + 1 for start, end in asked] == (lengths if scheme != "file" else [])


def test_a_sample_of_a_server_that_gives_no_parts_or_without_tables(server: FileServer, tmp_path: Path) -> None:
    server.files["0.tar"] = shard_bytes(samples(5))
    index = tmp_path / "index.json"
    create_index([f"{server.url}/0.tar"], index, progress="off")
    expected = read_sample(str(index), 3)
    server.gives_parts = False
    assert read_sample(str(index), 3) == expected
    server.gives_parts = True
    scanning.tables_path(index).unlink()
    assert read_sample(str(index), 3) == expected
    create_index([f"{server.url}/0.tar"], index, progress="off")
    server.files["0.tar"] = shard_bytes(samples(5, seed=1))
    with pytest.raises(UserError, match=r"0\.tar: damaged at byte [\d,]+, where .* should be; copy it again, or renew"):
        read_sample(str(index), 3)


def test_a_page_of_samples_reads_the_index_once(server: FileServer, tmp_path: Path) -> None:
    server.files["0.tar"] = shard_bytes(samples(5))
    create_index([f"{server.url}/0.tar"], tmp_path / "index.json", progress="off")
    server.files["index.json"] = (tmp_path / "index.json").read_bytes()
    page = render_index_preview(f"{server.url}/index.json")
    assert all(key in page for key in samples(5))
    assert server.requests.count("index.json") == 1


def test_patterns_of_names() -> None:
    assert [name for url in ("a", "b{08..11}c") for name in expand_ranges(url)] == ["a", "b08c", "b09c", "b10c", "b11c"]
    assert expand_ranges("{9..10}/{000..001}") == ["9/000", "9/001", "10/000", "10/001"]
    assert expand_ranges("{5..4}") == []


def test_a_label_out_of_range(tmp_path: Path) -> None:
    def create(label: bytes, *classes: str) -> tuple[str, ...]:
        contents = {"a": {".png": image_bytes(), ".cls": b"1"}, "b": {".png": image_bytes(), ".cls": label}}
        paths = write_shards(tmp_path, contents)
        return create_index([str(paths[0])], tmp_path / "x.json", classes=classes, progress="off").classes

    for label, classes, said in (
        (b"2", ("one", "two"), f"^shard {tmp_path}/0.tar: has label 2, and with 2 classes labels are 0..1"),
        (b"-1", (), f"in {tmp_path}/0.tar: label -1; labels are 0, 1, 2"),
        (b"x", (), f"in {tmp_path}/0.tar: .cls cannot be decoded .invalid"),
        (b"99999999999", (), "a label is 99,999,999,999: with more than 1,000,000 classes give their names"),
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
        (["ftp://h/x"], "x.json", "must be a path, or start with"),
        (["nothing.tar"], "x.json", "nothing.tar: has no samples"),
        (["0.tar"], "s3://bucket/x.json", "cannot be written to; choose a path on this machine"),
        (["0.tar"], "0.tar/x.json", "cannot write .*0.tar/x.json"),
        (["0.tar"], "0.tar", "0.tar: would replace .*0.tar, which it is made from"),
        (["0.tar"], "link.tar", "link.tar: would replace .*0.tar, which"),
        (["x.json.tables"], "x.json", "would replace .*x.json.tables"),
        (["0.tar"], "nothing.tar", "nothing.tar: exists and is not an index; remove it, or choose another name"),
    ],
)
def test_other_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, urls: list[str], output: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path, samples(3))
    (tmp_path / "nothing.tar").write_bytes(shard_bytes({}))
    (tmp_path / "link.tar").symlink_to("0.tar")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=said):
        create_index(urls, Path(output), progress="off")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_names_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a line, also as Windows writes them; each of its own."""
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path, samples(3))

    def create(content: bytes) -> tuple[str, ...]:
        Path("names.txt").write_bytes(content)
        classes = read_class_names(Path("names.txt"))
        return create_index(["0.tar"], Path("x.json"), classes=classes, progress="off").classes

    for content, said in {
        b"a\nb\n\nc": "class '' is named 1 time: each must have a name of its own",
        b"a\n \nc": "class ' ' is named",
        b"a\nb\na": "class 'a' is named 2 times",
        b"\n\n": "classes names.txt: is empty; it must have the classes' names",
    }.items():
        with pytest.raises(UserError, match=said):
            create(content)
    assert create("\ufeffant\r\nbéé\r\nc\r\n\r\n".encode()) == ("ant", "béé", "c")


def test_a_mistake_ends_the_work_of_all_threads(server: FileServer, tmp_path: Path) -> None:
    """Of many shards only a few more are read after one that is none."""
    for number in range(200):
        server.files[f"{number}.tar"] = shard_bytes(samples(1)) if number else b"none"
    with pytest.raises(UserError, match=r"/0\.tar: not a whole"):
        create_index([f"{server.url}/{{0..199}}.tar"], tmp_path / "x.json", progress="off")
    assert len(server.requests) <= 3 * scanning.THREADS
    assert list(tmp_path.iterdir()) == []
