"""Reading tar files: what wids and Python's tarfile find in them, and errors for what is none or not whole."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset
import wids.wids
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import BLOCK, header_of, samples, shard_bytes, tar_bytes, with_checksum

from flyte_ddp.errors import UserError
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.index import Shard, ShardIndex
from flyte_ddp.shards.samples import SampleTable, digest_of, tabulate
from flyte_ddp.shards.tar import DamagedShardError, Member, members

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


class Stream(io.RawIOBase):
    """Bytes that can be read only once and come in small pieces, as from a network."""

    def __init__(self, content: bytes) -> None:
        self.rest = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        return self.rest.readinto(memoryview(buffer)[:700])


def members_of(content: bytes) -> list[Member]:
    """The members, which must be the same whichever way the file is read."""
    seekable, stream = (list(members(file, "x.tar")) for file in (io.BytesIO(content), Stream(content)))
    assert seekable == stream
    return [member for member, _ in seekable]


def table_of(content: bytes) -> SampleTable:
    return tabulate(members_of(content), "x.tar")


def grouped(table: SampleTable) -> list[tuple[str, list[str]]]:
    return [(key, [member.extension for member in table.members(i)]) for i, key in enumerate(table.keys)]


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
        assert member.content(content[offset - BLOCK : offset + len(inside)]) == inside
    given = [inside for member, inside in members(Stream(content), "x.tar", lambda extension: extension == ".b")]
    assert given == [inside if extension == ".b" else None for _, extension, _, inside in expected]


PARTS = st.text(st.sampled_from("ab.é"), min_size=1, max_size=6).filter(lambda text: text not in (".", ".."))
NAMES = st.lists(st.builds("/".join, st.lists(PARTS, min_size=1, max_size=3)), unique=True, max_size=12)


@settings(max_examples=300, deadline=None)
@given(NAMES, st.sampled_from(FORMATS), st.data())
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


def test_samples_are_those_of_wids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same file, read by wids itself."""
    contents = [
        ("d/1.jpg", b"one"),
        ("d/1.seg.png", b""),
        ("d/README", b"text"),
        ("d/1.cls", b"3"),
        ("e.f/2.b.c", b"two"),
    ]
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes([(header_of("d", tarfile.DIRTYPE), b""), *contents]))
    theirs = wids.wids.IndexedTarSamples(path=str(path))
    table = table_of(path.read_bytes())
    ours = [
        {m.extension: m.content(path.read_bytes()[m.offset - BLOCK : m.offset + m.size]) for m in table.members(i)}
        for i in range(len(table))
    ]
    expected = [{k: v if k == "__key__" else v.read() for k, v in theirs[i].items()} for i in range(len(theirs))]
    theirs.close()
    assert [{"__key__": key} | found for key, found in zip(table.keys, ours, strict=True)] == expected
    assert "README" in capsys.readouterr().out  # wids says that it leaves this out


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
        (tarfile.PAX_FORMAT, UNICODE * 60),
        (tarfile.GNU_FORMAT, UNICODE * 60),
        (tarfile.USTAR_FORMAT, "not-utf-8-\udcff"),
    ],
)
def test_names_that_are_long_or_not_english(form: int, name: str) -> None:
    content = tar_bytes([("first.b", b"1"), (f"{name}.jpg", b"content"), (f"{name}.cls", b"5"), ("z.b", b"2")], form)
    check_against_tarfile(content)
    table = table_of(content)
    assert table.keys == ("first", name, "z")
    stored = table.to_bytes()
    assert SampleTable.from_bytes(stored, digest_of(stored)).keys == table.keys


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


def test_a_comment_for_all_files_is_no_matter() -> None:
    """``git archive`` writes one."""
    content = tar_bytes([("a.b", b"1")], tarfile.PAX_FORMAT, pax_headers={"comment": "0123abcd"})
    check_against_tarfile(content)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (header_of("a.jpg", tarfile.SYMTYPE, linkname="/etc/passwd"), r"'a\.jpg', a link"),
        (header_of("l/" * 80 + "a.jpg", tarfile.SYMTYPE, linkname="t" * 200), "a link"),
        (header_of("a.jpg", tarfile.LNKTYPE, linkname="b.jpg"), "a link"),
        (header_of("a.jpg", tarfile.CHRTYPE, devmajor=1, devminor=3), "a device"),
        (header_of("a.jpg", tarfile.BLKTYPE), "a device"),
        (header_of("a.jpg", tarfile.FIFOTYPE), "a device"),
        (header_of("a.jpg", tarfile.GNUTYPE_SPARSE), "a sparse file"),
        (header_of("a.jpg", b"0", pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": "1"}), "a sparse file"),
        (header_of("/etc/a.jpg", b"0"), "'/etc/a.jpg' leads out"),
        (header_of("../a.jpg", b"0"), "leads out"),
        (header_of("b/../../a.jpg", b"0"), "leads out"),
        (header_of("a\0b.jpg", b"0", pax_headers={"path": "a\0b.jpg"}), r"x00b\.jpg"),
    ],
)
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_is_no_plain_file_below_the_folder_is_refused(header: tarfile.TarInfo, said: str, form: int) -> None:
    if header.pax_headers and form == tarfile.GNU_FORMAT:
        form = tarfile.PAX_FORMAT
    content = tar_bytes([("first.b", b"1"), (header, b"")], form)
    for file in (io.BytesIO(content), Stream(content)):
        with pytest.raises(UserError, match=f"^shard x.tar: .*{said}.*") as caught:
            list(members(file, "x.tar"))
        assert len(caught.value.message.splitlines()) == 1


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_sparse_files_of_gnu_tar_are_refused(tmp_path: Path, form: str) -> None:
    with (tmp_path / "a.b").open("wb") as file:
        file.write(b"x")
        file.truncate(1 << 20)
    command = ["tar", "--sparse", "--format", form, "-cf", tmp_path / "x.tar", "-C", tmp_path, "a.b"]
    subprocess.run(command, check=True)
    content = (tmp_path / "x.tar").read_bytes()
    assert len(content) < 1 << 19
    for file in (io.BytesIO(content), Stream(content)):
        with pytest.raises(UserError, match=r"^shard x\.tar: has '.*a\.b', a link, a device or a sparse file"):
            list(members(file, "x.tar"))


def test_duplicates_name_shard_key_and_extension() -> None:
    twice = tar_bytes([("a.jpg", b"1"), ("a.cls", b"2"), ("a.jpg", b"3")])
    with pytest.raises(UserError, match=r"^shard x\.tar: sample 'a' has two members \.jpg"):
        table_of(twice)
    apart = tar_bytes([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"3")])
    with pytest.raises(UserError, match=r"^shard x\.tar: .*sample 'a' are in two places"):
        table_of(apart)


WHOLE = tar_bytes(
    [("a.jpg", b"x" * 600), ("a.cls", b"1"), (f"{'n' * 120}.jpg", b"y" * 512), ("é.cls", b"")], tarfile.PAX_FORMAT
)
GNU = tar_bytes([("a.jpg", b"x" * 600), (f"{'n' * 120}.jpg", b"y" * 512)], tarfile.GNU_FORMAT)


@pytest.mark.parametrize("content", [WHOLE, GNU], ids=["pax", "gnu"])
def test_cut_short_at_any_byte(content: bytes) -> None:
    """It is an error, or all that is missing is a part of the zeros at the end."""
    whole = list(members(io.BytesIO(content), "x.tar"))
    last = whole[-1][0]
    end = last.offset + -(-last.size // BLOCK) * BLOCK
    for length in range(len(content)):
        for file in (io.BytesIO(content[:length]), Stream(content[:length])):
            if length < end + BLOCK:
                with pytest.raises(DamagedShardError, match=r"x\.tar: not a whole, .*\((cut short|empty) at byte"):
                    list(members(file, "x.tar"))
            else:
                assert list(members(file, "x.tar")) == whole


def header_blocks(content: bytes) -> list[int]:
    """Where the headers are: those of files, and those of headers."""
    return [place for place in range(0, len(content), BLOCK) if content[place + 257 : place + 262] == b"ustar"]


@pytest.mark.parametrize("content", [WHOLE, GNU], ids=["pax", "gnu"])
def test_a_flipped_bit_in_any_header(content: bytes) -> None:
    """It is an error, unless it is in what fills up the checksum itself."""
    whole = [member[:4] for member, _ in members(io.BytesIO(content), "x.tar")]
    harmless = set()
    headers = header_blocks(content)
    assert len(headers) in (3, 6)
    for place in headers:
        for bit in range(BLOCK * 8):
            damaged = bytearray(content)
            damaged[place + bit // 8] ^= 1 << bit % 8
            try:
                found = [member[:4] for member, _ in members(io.BytesIO(damaged), "x.tar")]
            except DamagedShardError:
                continue
            assert found == whole
            harmless.add(bit // 8)
    assert harmless <= {148, 154, 155}  # a zero for a space before the number, and what is after it


def test_a_header_of_zeros_is_no_end() -> None:
    for place in header_blocks(WHOLE):
        damaged = WHOLE[:place] + bytes(BLOCK) + WHOLE[place + BLOCK :]
        with pytest.raises(DamagedShardError, match=r"more after the end mark|no file follows|damaged"):
            list(members(io.BytesIO(damaged), "x.tar"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty at byte 0"),
        (gzip.compress(WHOLE + np.random.default_rng(0).bytes(9999)), "not a whole, uncompressed tar file .no header"),
        (bz2.compress(WHOLE + np.random.default_rng(0).bytes(9999)), "not a whole, uncompressed tar file .no header"),
        (lzma.compress(WHOLE + np.random.default_rng(0).bytes(9999)), "not a whole, uncompressed tar file .no header"),
        (b"<html>not found</html>", "cut short"),
        (b"some text\n" * 999, "no header"),
        (np.random.default_rng(0).bytes(9999), "no header"),
        (WHOLE + WHOLE, "put together with cat"),
    ],
)
def test_what_is_no_tar_file(content: bytes, said: str) -> None:
    with pytest.raises(DamagedShardError, match=said):
        members_of(content)


def test_a_tar_file_without_files_has_no_samples() -> None:
    table = table_of(tar_bytes([]))
    stored = table.to_bytes()
    assert len(table) == len(SampleTable.from_bytes(stored, digest_of(stored))) == 0


MUTATIONS = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8)
NUMBERS = st.sampled_from([b"-0000000512\0", b"77777777777\0", b"\xff" * 12, b"\x80" + b"\xff" * 11, bytes(12)])


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([WHOLE, GNU]), MUTATIONS, st.none() | NUMBERS, st.booleans())
def test_whatever_is_in_it_the_answer_is_members_or_one_error(
    content: bytes, mutations: list[tuple[int, int]], size: bytes | None, mend: bool
) -> None:
    """Also where somebody has made the checksums fit, and where sizes are absurd."""
    damaged = bytearray(content)
    for place, value in mutations:
        damaged[place % len(damaged)] = value
    for number, place in enumerate(header_blocks(content)):
        if size is not None and number == mutations[0][0] % 4:
            damaged[place + 124 : place + 136] = size
        if mend:
            damaged[place : place + BLOCK] = with_checksum(bytes(damaged[place : place + BLOCK]))
    found: list[object] = []
    for file in (io.BytesIO(damaged), Stream(bytes(damaged))):
        try:
            found.append([member for member, _ in members(file, "x.tar")])
        except UserError as error:
            found.append(re.sub(r"byte [\d,]+", "", error.message))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-1],
        lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
        lambda content: content[:0],
        lambda content: content + b"\0",
    ],
)
def test_a_table_is_the_one_of_the_index_or_none(change: Callable[[bytes], bytes]) -> None:
    table = table_of(shard_bytes(samples(20)))
    stored = table.to_bytes()
    again = SampleTable.from_bytes(stored, digest_of(stored))
    assert [again.members(i) for i in range(20)] == [table.members(i) for i in range(20)]
    assert again.to_bytes() == stored
    with pytest.raises(ValueError, match="another table"):
        SampleTable.from_bytes(change(stored), digest_of(stored))


def test_what_is_no_plain_file_is_no_shard(tmp_path: Path) -> None:
    """A pipe, or a device, may never end."""
    os.mkfifo(tmp_path / "pipe")
    for url in (str(tmp_path / "pipe"), "/dev/zero"):
        index = ShardIndex("", [Shard(url, 3)])
        with pytest.raises(UserError, match=f"^shard {url}: is no plain file"):
            ShardDataset(index, tmp_path / "cache")[0]


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


def test_a_member_that_is_of_no_sample_is_named() -> None:
    with pytest.raises(UserError, match=r"sample 'd/' are in two places, .* 'd/\.b' says"):
        table_of(tar_bytes([("d/.a", b""), ("d/x.a", b""), ("d/.b", b"")]))


def test_tens_of_thousands_of_extensions() -> None:
    """As names have that are numbered behind a dot; no number of an extension wraps around."""
    found = [Member("key", f".{number}.jpg", 512 * number, 1, number) for number in range(70_000)]
    assert tabulate(found, "x.tar").members(0) == found
