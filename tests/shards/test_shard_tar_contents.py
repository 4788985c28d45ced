"""What is found in whole tar files: the same as wids, webdataset and Python's tarfile find in them."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
import webdataset
import wids.wids
from hypothesis import given, settings
from hypothesis import strategies as st
from tar_reading import Stream, members_of, table_of
from tars import BLOCK, tar_bytes, with_checksum

from flyte_ddp.errors import UserError
from flyte_ddp.shards.samples import SampleTable, tabulate
from flyte_ddp.shards.tar import Member, members

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def grouped(table: SampleTable) -> list[tuple[str, list[str]]]:
    return [(key, [member.extension for member in table.sample_members(i)]) for i, key in enumerate(table.keys)]


def is_seen(name: str) -> bool:
    """Whether webdataset, or wids with a key that is not only of dots, makes a member of a sample of it."""
    return webdataset.tariterators.base_plus_ext(name)[0] is not None or bool(wids.wids.splitname(name)[0].strip("./"))


def expected_of(content: bytes) -> list[tuple[str, str, int, bytes]]:
    """Key, extension, offset and content of each member as wids' rule and Python's tarfile have them."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        files = [found for found in archive if found.isfile() and "." in found.name and is_seen(found.name)]
        return [
            (*wids.wids.splitname(found.name), found.offset_data, archive.extractfile(found).read())  # type: ignore[union-attr]
            for found in files
        ]


def check_against_tarfile(content: bytes) -> None:
    found = members_of(content)
    expected = expected_of(content)
    assert [(m.key, m.extension, m.offset, m.size) for m in found] == [(k, e, o, len(c)) for k, e, o, c in expected]
    for member, (_, _, offset, inside) in zip(found, expected, strict=True):
        assert member.extract_content(content[offset - BLOCK : offset + len(inside)]) == inside
    given = [inside for member, inside in members(Stream(content), "x.tar", lambda extension: extension == ".b")]
    assert given == [inside if extension == ".b" else None for _, extension, _, inside in expected]


PARTS = st.text(st.sampled_from("ab.é"), min_size=1, max_size=6).filter(lambda text: text not in (".", ".."))
NAMES = st.lists(st.builds("/".join, st.lists(PARTS, min_size=1, max_size=3)), unique=True, max_size=12)


@settings(max_examples=100, deadline=None)
@given(NAMES, st.sampled_from(FORMATS), st.data())
@pytest.mark.slow
def test_names_are_grouped_as_by_wids(names: list[str], form: int, data: st.DataObject) -> None:
    contents = [data.draw(st.binary(max_size=1200)) for _ in names]
    content = tar_bytes(zip(names, contents, strict=True), form)
    check_against_tarfile(content)
    named = [name for name in names if "." in name and is_seen(name)]
    groups = wids.wids.group_by_key(named)
    split = [wids.wids.splitname(name) for name in named]
    expected = [(split[group[0]][0], [split[i][1] for i in group]) for group in groups]
    keys = [key for key, _ in expected]
    if len(set(keys)) < len(keys):
        with pytest.raises(UserError, match="in two places"):
            table_of(content)
    else:
        assert grouped(table_of(content)) == expected


LONG = "folder/" + "n" * 300
UNICODE = "é/名前"


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (tarfile.GNU_FORMAT, LONG),
        (tarfile.PAX_FORMAT, LONG),
        (tarfile.USTAR_FORMAT, "f" * 120 + "/" + "n" * 90),  # name and prefix
        (tarfile.GNU_FORMAT, UNICODE),
        (tarfile.PAX_FORMAT, UNICODE),
        (tarfile.GNU_FORMAT, UNICODE * 60),
        (tarfile.USTAR_FORMAT, "not-utf-8-\udcff"),
    ],
)
def test_names_that_are_long_or_not_english(form: int, name: str) -> None:
    content = tar_bytes([("first.b", b"1"), (f"{name}.jpg", b"content"), (f"{name}.cls", b"5"), ("z.b", b"2")], form)
    check_against_tarfile(content)
    table = table_of(content)
    assert table.keys == ("first", name, "z")
    again = SampleTable.from_bytes(table.to_bytes())
    assert again.keys == table.keys
    assert [again.sample_members(i) for i in range(3)] == [table.sample_members(i) for i in range(3)]


def test_a_tar_file_without_files_has_no_samples() -> None:
    assert len(SampleTable.from_bytes(table_of(tar_bytes([])).to_bytes())) == 0


def test_no_number_of_an_extension_wraps_around() -> None:
    """As names have that are numbered behind a dot."""
    found = [Member("key", f".{number}.jpg", 512 * number, 1, number) for number in range(70_000)]
    assert tabulate(found, "x.tar").sample_members(0) == found


def test_what_other_programs_write(tmp_path: Path) -> None:
    """GNU tar, in each of its formats, with a folder, its default padding, and names that begin with ./"""
    (tmp_path / "in" / "c").mkdir(parents=True)
    for name in ("c/1.jpg", "c/1.cls", f"c/{'n' * 150}.jpg"):
        (tmp_path / "in" / name).write_bytes(name.encode())
    for form in ("gnu", "oldgnu", "pax", "posix"):
        subprocess.run(
            ["tar", "--format", form, "--sort=name", "-cf", tmp_path / f"{form}.tar", "-C", tmp_path / "in", "."],
            check=True,
        )
        content = (tmp_path / f"{form}.tar").read_bytes()
        check_against_tarfile(content)
        assert table_of(content).keys == ("./c/1", f"./c/{'n' * 150}")
    command = ["tar", "--format=v7", "-cf", tmp_path / "v7.tar", "-C", tmp_path / "in", "c/1.cls", "c/1.jpg"]
    subprocess.run(command, check=True)
    check_against_tarfile((tmp_path / "v7.tar").read_bytes())


def test_a_size_in_a_pax_header_is_the_one_that_counts() -> None:
    """As of files over 8 GB, whose own header has no room for it."""
    header = tarfile.TarInfo("big.b")
    header.pax_headers = {"size": "700", "comment": "and more"}
    content = bytearray(tar_bytes([(header, b"x" * 700), ("z.b", b"2")], tarfile.PAX_FORMAT))
    own = content.index(b"big.b", 1024)
    content[own : own + BLOCK] = with_checksum(
        bytes(content[own : own + 124]) + b"00000000000\0" + bytes(content[own + 136 : own + BLOCK])
    )
    check_against_tarfile(bytes(content))
    [big, _] = members_of(bytes(content))
    assert big.size == 700


def test_a_size_in_gnus_large_numbers() -> None:
    content = bytearray(tar_bytes([("a.b", b"x" * 700)], tarfile.GNU_FORMAT))
    content[:BLOCK] = with_checksum(
        bytes(content[:124]) + b"\x80" + (700).to_bytes(11, "big") + bytes(content[136:512])
    )
    check_against_tarfile(bytes(content))


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
