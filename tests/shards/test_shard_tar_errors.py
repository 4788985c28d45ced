"""Errors for tar files that are damaged, cut short, of another kind or not made for samples."""

import gzip
import io
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tar_reading import as_stream, members_of, table_of
from tars import BLOCK, header_of, tar_bytes, with_checksum

from flyte_ddp.errors import UserError
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.index import Shard, ShardIndex
from flyte_ddp.shards.tar import DamagedShardError, iterate_members


def test_what_is_no_plain_file_below_the_folder_is_refused() -> None:
    for header, said in (
        (header_of("a.jpg", tarfile.SYMTYPE, linkname="/etc/passwd"), r"'a\.jpg', a link"),
        (header_of("a.jpg", tarfile.LNKTYPE, linkname="b.jpg"), "a link"),
        (header_of("a.jpg", tarfile.CHRTYPE, devmajor=1, devminor=3), "a device"),
        (header_of("a.jpg", tarfile.FIFOTYPE), "a device"),
        (header_of("a.jpg", tarfile.GNUTYPE_SPARSE), "a sparse file"),
        (header_of("a.jpg", b"0", pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": "1"}), "a sparse file"),
        (header_of("/etc/a.jpg", b"0"), "'/etc/a.jpg' leads out"),
        (header_of("../a.jpg", b"0"), "leads out"),
        (header_of("a\0b.jpg", b"0", pax_headers={"path": "a\0b.jpg"}), r"x00b\.jpg"),
    ):
        forms = (tarfile.PAX_FORMAT,) if header.pax_headers else (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)
        for content in [tar_bytes([("first.b", b"1"), (header, b"")], form) for form in forms]:
            for file in (io.BytesIO(content), as_stream(content)):
                with pytest.raises(UserError, match=f"^shard x.tar: .*{said}.*$"):
                    list(iterate_members(file, "x.tar"))


WHOLE = tar_bytes(
    [("a.jpg", b"x" * 600), ("a.cls", b"1"), (f"{'n' * 120}.jpg", b"y" * 512), ("é.cls", b"")], tarfile.PAX_FORMAT
)
GNU = tar_bytes([("a.jpg", b"x" * 600), (f"{'n' * 120}.jpg", b"y" * 512)], tarfile.GNU_FORMAT)


# Every seventh place is in each byte of a header, with all bits by turns.
EACH = pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.exhaustive)])
BOTH = pytest.mark.parametrize("content", [WHOLE, GNU], ids=["pax", "gnu"])


@EACH
@BOTH
@pytest.mark.slow
def test_cut_short_at_any_byte(content: bytes, step: int) -> None:
    """It is an error, or all that is missing is a part of the zeros at the end."""
    whole = list(iterate_members(io.BytesIO(content), "x.tar"))
    last = whole[-1][0]
    end = last.offset + -(-last.size // BLOCK) * BLOCK
    for length in range(0, len(content), step):
        for file in (io.BytesIO(content[:length]), as_stream(content[:length])):
            if length < end + BLOCK:
                with pytest.raises(DamagedShardError, match=r"x\.tar: not a whole, .*\((cut short|empty) at byte"):
                    list(iterate_members(file, "x.tar"))
            else:
                assert list(iterate_members(file, "x.tar")) == whole


def header_blocks(content: bytes) -> list[int]:
    """Where the headers are: those of files, and those of headers."""
    return [place for place in range(0, len(content), BLOCK) if content[place + 257 : place + 262] == b"ustar"]


@EACH
@BOTH
@pytest.mark.slow
def test_a_flipped_bit_in_any_header(content: bytes, step: int) -> None:
    """It is an error, unless it is in what fills up the checksum itself."""
    whole = [member[:4] for member in members_of(content)]
    harmless = set()
    headers = header_blocks(content)
    assert len(headers) in (3, 6)
    for place in headers:
        for bit in range(0, BLOCK * 8, step):
            damaged = bytearray(content)
            damaged[place + bit // 8] ^= 1 << bit % 8
            try:
                found = [member[:4] for member, _ in iterate_members(io.BytesIO(damaged), "x.tar")]
            except DamagedShardError:
                continue
            assert found == whole
            harmless.add(bit // 8)
    assert harmless <= {148, 154, 155}  # a zero for a space before the number, and what is after it


def test_a_header_of_zeros_is_no_end() -> None:
    for place in header_blocks(WHOLE):
        with pytest.raises(DamagedShardError, match=r"bytes follow the end mark|no file follows|damaged"):
            members_of(WHOLE[:place] + bytes(BLOCK) + WHOLE[place + BLOCK :])


def test_what_is_no_tar_file() -> None:
    for content, said in (
        (b"", "empty at byte 0"),
        (gzip.compress(WHOLE + np.random.default_rng(0).bytes(9999)), "not a whole, uncompressed tar file .no header"),
        (b"<html>not found</html>", "cut short"),
        (WHOLE + WHOLE, "joined with cat"),
    ):
        with pytest.raises(DamagedShardError, match=said):
            members_of(content)


MUTATIONS = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8)
NUMBERS = st.sampled_from([b"-0000000512\0", b"77777777777\0", b"\xff" * 12, b"\x80" + b"\xff" * 11, bytes(12)])


@settings(max_examples=150, deadline=None)
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
    for file in (io.BytesIO(damaged), as_stream(bytes(damaged))):
        try:
            found.append([member for member, _ in iterate_members(file, "x.tar")])
        except UserError as error:
            found.append(re.sub(r"byte [\d,]+", "", error.message))
    assert found[0] == found[1]


def test_what_is_no_plain_file_is_no_shard(tmp_path: Path) -> None:
    """A pipe, or a device, may never end."""
    os.mkfifo(tmp_path / "pipe")
    for url in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(UserError, match=f"^shard {url}: is no plain file"):
            ShardDataset(ShardIndex("", [Shard(url, 3)]), tmp_path / "cache")[0]


def test_members_that_are_no_samples() -> None:
    for names, said in (
        (("a.jpg", "a.cls", "a.jpg"), r"sample 'a' has two members \.jpg"),
        (("a.jpg", "b.jpg", "a.cls"), "sample 'a' are in two places"),
        (("d/.a", "d/x.a", "d/.b"), r"sample 'd/' are in two places, .* 'd/\.b' says"),
    ):
        with pytest.raises(UserError, match=rf"^shard x\.tar: .*{said}"):
            table_of(tar_bytes([(name, b"1") for name in names]))
