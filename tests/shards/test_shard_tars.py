"""What is found in tar files: the same as wids, webdataset and tarfile find; and errors for those that are damaged."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
import wids.wids
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import BLOCK, header_of, tar_bytes

from flyte_ddp.core.errors import UserError
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.index import Shard, ShardIndex
from flyte_ddp.shards.tabulating import HashedStream
from flyte_ddp.shards.tar import Member, SampleTable, group_members_into_samples, iterate_tar_members

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def as_stream(content: bytes) -> HashedStream:
    """Return a file that can be read only once and comes in small pieces, as from a network."""
    return HashedStream(content[start : start + 700] for start in range(0, len(content), 700))


def members_of(content: bytes) -> list[Member]:
    """Return the members; assert that a seekable file and a stream give the same."""
    seekable, stream = (list(iterate_tar_members(file, "x.tar")) for file in (io.BytesIO(content), as_stream(content)))
    assert seekable == stream
    return [member for member, _ in seekable]


def table_of(content: bytes) -> SampleTable:
    return group_members_into_samples(members_of(content), "x.tar")


def grouped(table: SampleTable) -> list[tuple[str, list[str]]]:
    return [(key, [member.extension for member in table.list_sample_members(i)]) for i, key in enumerate(table.keys)]


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
    wanted = iterate_tar_members(as_stream(content), "x.tar", lambda member: member.extension == ".b")
    given = [inside for _, inside in wanted]
    assert given == [inside if extension == ".b" else None for _, extension, _, inside in expected]


PARTS = st.text(st.sampled_from("ab.é"), min_size=1, max_size=6).filter(lambda text: text not in (".", ".."))
NAMES = st.lists(st.builds("/".join, st.lists(PARTS, min_size=1, max_size=3)), unique=True, max_size=12)


@settings(max_examples=60, deadline=None)
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
        with pytest.raises(UserError, match="not next to each other"):
            table_of(content)
    else:
        assert grouped(table_of(content)) == expected


def test_names_that_are_long_or_not_english() -> None:
    for form, name in (
        (tarfile.GNU_FORMAT, f"é/名前{'n' * 300}"),
        (tarfile.PAX_FORMAT, f"é/名前{'n' * 300}"),
        (tarfile.USTAR_FORMAT, f"{'f' * 120}/{'n' * 90}"),  # name and prefix
        (tarfile.USTAR_FORMAT, "not-utf-8-\udcff"),
    ):
        files = [("first.b", b"1"), (f"{name}.jpg", b"content"), (f"{name}.cls", b"5"), ("z.b", b"2")]
        content = tar_bytes(files, form)
        check_against_tarfile(content)
        table = table_of(content)
        again = SampleTable.from_npz_bytes(table.to_npz_bytes(), len(content))
        assert again.keys == table.keys == ("first", name, "z")
        assert [again.list_sample_members(i) for i in range(3)] == [table.list_sample_members(i) for i in range(3)]
    assert len(SampleTable.from_npz_bytes(table_of(tar_bytes([])).to_npz_bytes(), 10_240)) == 0


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


def test_what_is_no_plain_file_below_the_folder_is_refused() -> None:
    for header, said in (
        (header_of("a.jpg", tarfile.SYMTYPE, linkname="/etc/passwd"), r"'a\.jpg', a link"),
        (header_of("a.jpg", tarfile.LNKTYPE, linkname="b.jpg"), "a link"),
        (header_of("a.jpg", tarfile.CHRTYPE, devmajor=1, devminor=3), "a device"),
        (header_of("a.jpg", tarfile.FIFOTYPE), "a device"),
        (header_of("a.jpg", tarfile.GNUTYPE_SPARSE), "a sparse file"),
        (header_of("a.jpg", b"0", pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": "1"}), "a sparse file"),
        (header_of("/etc/a.jpg", b"0"), "'/etc/a.jpg' points outside"),
        (header_of("../a.jpg", b"0"), "points outside"),
        (header_of("a\0b.jpg", b"0", pax_headers={"path": "a\0b.jpg"}), r"x00b\.jpg"),
    ):
        forms = (tarfile.PAX_FORMAT,) if header.pax_headers else (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)
        for content in [tar_bytes([("first.b", b"1"), (header, b"")], form) for form in forms]:
            for file in (io.BytesIO(content), as_stream(content)):
                with pytest.raises(UserError, match=f"^shard x.tar: .*{said}.*$"):
                    list(iterate_tar_members(file, "x.tar"))


WHOLE = tar_bytes(
    [("a.jpg", b"x" * 600), ("a.cls", b"1"), (f"{'n' * 120}.jpg", b"y" * 512), ("é.cls", b"")], tarfile.PAX_FORMAT
)
GNU = tar_bytes([("a.jpg", b"x" * 600), (f"{'n' * 120}.jpg", b"y" * 512)], tarfile.GNU_FORMAT)

STEP = 7  # every seventh place is in each byte of a header, with all bits by turns
BOTH = pytest.mark.parametrize("content", [WHOLE, GNU], ids=["pax", "gnu"])


@BOTH
@pytest.mark.slow
def test_cut_short_at_any_byte(content: bytes) -> None:
    """It is an error, or all that is missing is a part of the zeros at the end."""
    whole = list(iterate_tar_members(io.BytesIO(content), "x.tar"))
    last = whole[-1][0]
    end = last.offset + -(-last.size // BLOCK) * BLOCK
    for length in range(0, len(content), STEP):
        for file in (io.BytesIO(content[:length]), as_stream(content[:length])):
            if length < end + BLOCK:
                with pytest.raises(UserError, match=r"x\.tar: not a complete, .*\((cut short|empty) at byte"):
                    list(iterate_tar_members(file, "x.tar"))
            else:
                assert list(iterate_tar_members(file, "x.tar")) == whole


def header_blocks(content: bytes) -> list[int]:
    """Where the headers are: those of files, and those of headers."""
    return [place for place in range(0, len(content), BLOCK) if content[place + 257 : place + 262] == b"ustar"]


@BOTH
@pytest.mark.slow
def test_a_flipped_bit_in_any_header(content: bytes) -> None:
    """It is an error, unless it is in what fills up the checksum itself."""
    whole = [member[:4] for member in members_of(content)]
    harmless = set()
    headers = header_blocks(content)
    assert len(headers) in (3, 6)
    for place in headers:
        for bit in range(0, BLOCK * 8, STEP):
            damaged = bytearray(content)
            damaged[place + bit // 8] ^= 1 << bit % 8
            try:
                found = [member[:4] for member, _ in iterate_tar_members(io.BytesIO(damaged), "x.tar")]
            except UserError:
                continue
            assert found == whole
            harmless.add(bit // 8)
    assert harmless <= {148, 154, 155}  # a zero for a space before the number, and what is after it


def test_a_header_of_zeros_is_no_end() -> None:
    for place in header_blocks(WHOLE):
        with pytest.raises(UserError, match=r"bytes follow the end mark|no file follows|damaged"):
            members_of(WHOLE[:place] + bytes(BLOCK) + WHOLE[place + BLOCK :])


def test_what_is_no_tar_file() -> None:
    for content, said in (
        (b"", "empty at byte 0"),
        (gzip.compress(WHOLE + np.random.default_rng(0).bytes(9999)), "not a complete, uncompressed tar file .missing"),
        (b"<html>not found</html>", "cut short"),
        (WHOLE + WHOLE, "joined with cat"),
    ):
        with pytest.raises(UserError, match=said):
            members_of(content)


def test_what_is_no_plain_file_is_no_shard(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for url in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(UserError, match=f"^shard {url}: is not a regular file"):
            ShardDataset(ShardIndex("", [Shard(url, 3)]), tmp_path / "cache")[0]


def test_members_that_are_no_samples() -> None:
    for names, said in (
        (("a.jpg", "a.cls", "a.jpg"), r"sample 'a' has two members \.jpg"),
        (("a.jpg", "b.jpg", "a.cls"), "sample 'a' are not next to each other"),
        (("d/.a", "d/x.a", "d/.b"), r"sample 'd/' are not next to each other, .* 'd/\.b'"),
    ):
        with pytest.raises(UserError, match=rf"^shard x\.tar: .*{said}"):
            table_of(tar_bytes([(name, b"1") for name in names]))
