"""What is found in whole tar files: the same as wids, webdataset and Python's tarfile find in them."""

import io
import subprocess
import tarfile
import zlib
from pathlib import Path

import pytest
import webdataset
import wids.wids
from hypothesis import given, settings
from hypothesis import strategies as st
from tar_reading import as_stream, members_of, table_of
from tars import BLOCK, tar_bytes, with_checksum

from flyte_ddp.errors import UserError
from flyte_ddp.shards.samples import SampleTable, tabulate_members
from flyte_ddp.shards.tar import Member, iterate_members

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def grouped(table: SampleTable) -> list[tuple[str, list[str]]]:
    return [(key, [member.extension for member in table.sample_members(i)]) for i, key in enumerate(table.keys)]


def is_seen(name: str) -> bool:
    """Whether webdataset, or wids with a key that is not only of dots, makes a member of a sample of it."""
    return webdataset.tariterators.base_plus_ext(name)[0] is not None or bool(wids.wids.splitname(name)[0].strip("./"))


def check_against_tarfile(content: bytes) -> None:
    """Key, extension, offset and content of each member are as wids' rule and Python's tarfile have them."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        expected = [
            (*wids.wids.splitname(found.name), found.offset_data, archive.extractfile(found).read())  # type: ignore[union-attr]
            for found in archive
            if found.isfile() and "." in found.name and is_seen(found.name)
        ]
    found = members_of(content)
    assert [(m.key, m.extension, m.offset, m.size) for m in found] == [(k, e, o, len(c)) for k, e, o, c in expected]
    assert [m.header for m in found] == [zlib.crc32(content[m.offset - BLOCK : m.offset]) for m in found]
    given = [inside for _, inside in iterate_members(as_stream(content), "x.tar", lambda extension: extension == ".b")]
    assert given == [inside if extension == ".b" else None for _, extension, _, inside in expected]


PARTS = st.text(st.sampled_from("ab.é"), min_size=1, max_size=6).filter(lambda text: text not in (".", ".."))
NAMES = st.lists(st.builds("/".join, st.lists(PARTS, min_size=1, max_size=3)), unique=True, max_size=12)


@settings(max_examples=100, deadline=None)
@given(NAMES, st.sampled_from(FORMATS), st.data())
@pytest.mark.slow
def test_names_are_grouped_as_by_wids(names: list[str], form: int, data: st.DataObject) -> None:
    content = tar_bytes([(name, data.draw(st.binary(max_size=1200))) for name in names], form)
    check_against_tarfile(content)
    named = [name for name in names if "." in name and is_seen(name)]
    split = [wids.wids.splitname(name) for name in named]
    groups = wids.wids.group_by_key(named)
    expected = [(split[group[0]][0], [split[i][1] for i in group]) for group in groups]
    if len({key for key, _ in expected}) < len(expected):
        with pytest.raises(UserError, match="in two places"):
            table_of(content)
    else:
        assert grouped(table_of(content)) == expected


LONG, UNICODE = f"folder/{'n' * 300}", "é/名前"


def test_names_that_are_long_or_not_english() -> None:
    for form, name in (
        (tarfile.GNU_FORMAT, LONG),
        (tarfile.PAX_FORMAT, LONG),
        (tarfile.USTAR_FORMAT, f"{'f' * 120}/{'n' * 90}"),  # name and prefix
        (tarfile.PAX_FORMAT, UNICODE),
        (tarfile.GNU_FORMAT, UNICODE * 60),
        (tarfile.USTAR_FORMAT, "not-utf-8-\udcff"),
    ):
        files = [("first.b", b"1"), (f"{name}.jpg", b"content"), (f"{name}.cls", b"5"), ("z.b", b"2")]
        content = tar_bytes(files, form)
        check_against_tarfile(content)
        table = table_of(content)
        again = SampleTable.from_bytes(table.to_bytes())
        assert again.keys == table.keys == ("first", name, "z")
        assert [again.sample_members(i) for i in range(3)] == [table.sample_members(i) for i in range(3)]


def test_tables_of_no_samples_and_of_many_extensions() -> None:
    assert len(SampleTable.from_bytes(table_of(tar_bytes([])).to_bytes())) == 0
    # As of names that are numbered behind a dot; no number of an extension wraps around.
    found = [Member("key", f".{number}.jpg", 512 * number, 1, number) for number in range(70_000)]
    assert tabulate_members(found, "x.tar").sample_members(0) == found


def test_what_other_programs_write(tmp_path: Path) -> None:
    """GNU tar, in each of its formats, with a folder, its default padding, and names that begin with ./"""
    (tmp_path / "in" / "c").mkdir(parents=True)
    for name in ("c/1.jpg", "c/1.cls", f"c/{'n' * 150}.jpg"):
        (tmp_path / "in" / name).write_bytes(name.encode())
    for form in ("gnu", "oldgnu", "pax", "v7"):
        files = ["c/1.cls", "c/1.jpg"] if form == "v7" else ["."]
        options = ["--format", form, "--sort=name", "-cf", tmp_path / f"{form}.tar", "-C", tmp_path / "in"]
        subprocess.run(["tar", *options, *files], check=True)
        content = (tmp_path / f"{form}.tar").read_bytes()
        check_against_tarfile(content)
        assert table_of(content).keys == (("c/1",) if form == "v7" else ("./c/1", f"./c/{'n' * 150}"))


def with_size(header: bytes, size: bytes) -> bytes:
    return with_checksum(header[:124] + size + header[136:])


def test_sizes_that_have_no_room_in_the_header() -> None:
    """Of files over 8 GB: a pax header's is the one that counts, and GNU writes large numbers in another way."""
    header = tarfile.TarInfo("big.b")
    header.pax_headers = {"size": "700", "comment": "and more"}
    content = tar_bytes([(header, b"x" * 700), ("z.b", b"2")], tarfile.PAX_FORMAT)
    own = content.index(b"big.b", 1024)
    content = content[:own] + with_size(content[own : own + BLOCK], b"00000000000\0") + content[own + BLOCK :]
    check_against_tarfile(content)
    assert members_of(content)[0].size == 700
    content = tar_bytes([("a.b", b"x" * 700)], tarfile.GNU_FORMAT)
    check_against_tarfile(with_size(content[:BLOCK], b"\x80" + (700).to_bytes(11, "big")) + content[BLOCK:])


def test_hidden_files_are_passed_over_as_by_webdataset() -> None:
    """As a Mac's tar adds them. In folders webdataset makes samples of these, which mean nothing."""
    whole = [("a.jpg", b"1"), ("a.cls", b"0"), ("b.jpg", b"2"), ("b.cls", b"1")]
    with_hidden = [pair for name, content in whole for pair in ((f"._{name}", b"x"), (name, content))]
    for folder in ("", "./", "d/", "./d/e/"):
        files = [(f"{folder}{name}", content) for name, content in [(".hidden.cls", b"x"), *with_hidden]]
        content = tar_bytes(files if folder in ("", "./") else files[1:])
        found = grouped(table_of(content))
        assert found == [(f"{folder}{key}", [".jpg", ".cls"]) for key in "ab"]
        if folder in ("", "./"):
            members = webdataset.tariterators.tar_file_iterator(io.BytesIO(content))
            theirs = webdataset.tariterators.group_by_keys({"__url__": "", **member} for member in members)
            assert [sample["__key__"] for sample in theirs] == [key for key, _ in found]
