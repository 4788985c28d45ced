"""Headers and tables that somebody has written to do harm: errors of ours, in no more memory than the shard takes."""

import io
import json
import random
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tars import BLOCK, header_of, indexed, samples, tar_bytes

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.scanning import create_index, tables_path, verify_index
from flyte_ddp.shards.tabulating import HashedStream
from flyte_ddp.shards.tar import MOST_HEADER_BYTES, SampleTable, hash_table, iterate_tar_members

MIB = 1 << 20
METADATA = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def claim(name: str, kind: bytes, size: int) -> bytes:
    """Return a header with a right checksum that claims a size, which no content follows."""
    return header_of(name, kind, size=size).tobuf(tarfile.GNU_FORMAT)[:BLOCK]


def peak_of(function: Callable[[], object]) -> int:
    """Return the bytes of memory that Python takes at most while a function runs."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_headers_have_a_limit(kind: bytes, tmp_path: Path) -> None:
    for size in (MOST_HEADER_BYTES + BLOCK, 3 * MIB, 2**33, 2**40, 2**59):
        content = claim("a.jpg", kind, size) + bytes(3 * BLOCK)
        (tmp_path / "a.tar").write_bytes(content)

        def read(size: int = size, content: bytes = content) -> None:
            with (tmp_path / "a.tar").open("rb") as file:
                for each in (file, HashedStream(iter([content]))):
                    with pytest.raises(UserError, match=rf"x\.tar: .*a metadata header of {size:,} bytes, above the"):
                        list(iterate_tar_members(each, "x.tar"))

        assert peak_of(read) < MIB


def test_long_names_within_the_limit_are_read() -> None:
    name = "n" * (MOST_HEADER_BYTES - BLOCK) + ".jpg"
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        content = tar_bytes([(name, b"1")], form)
        assert [member.key + member.extension for member, _ in iterate_tar_members(io.BytesIO(content), "x")] == [name]


@pytest.mark.parametrize("name", ["a.cls", "a.jpg", "a.bin"])
def test_files_that_claim_more_than_the_shard_has(name: str, tmp_path: Path) -> None:
    shard = tmp_path / "0.tar"
    (tmp_path / "index.json").write_text(json.dumps({"shardlist": [{"url": "0.tar", "nsamples": 1}]}))
    for size in (8 * MIB, 2**40, 2**59):
        lack = "cut short" if size < 2**44 else "an impossible size"
        said = "must be a class number" if name == "a.cls" and size < 2**44 else lack
        shard.write_bytes(claim(name, b"0", size) + bytes(4 * MIB))

        def read(said: str = said, lack: str = lack) -> None:
            with pytest.raises(UserError, match=said):
                create_index([str(shard)], tmp_path / "made.json", progress="off")
            (problem,) = verify_index(str(tmp_path / "index.json"), decode=True, progress="off")
            assert said in problem
            with pytest.raises(UserError, match=lack):
                ShardDataset(tmp_path / "index.json", tmp_path / "cache")[0]
            with shard.open("rb") as file, pytest.raises(UserError, match=lack):
                list(iterate_tar_members(file, "x.tar", lambda _: True))

        assert peak_of(read) < 16 * MIB


def saved(**columns: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **columns)
    return buffer.getvalue()


TABLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no archive": lambda _: b"no archive",
    "an array": lambda _: (buffer := io.BytesIO(), np.save(buffer, np.zeros(3)))[0].getvalue(),
    "a column is missing": lambda columns: {name: columns[name] for name in columns if name != "sizes"},
    "another type": lambda columns: columns | {"offsets": columns["offsets"].astype(np.float64)},
    "another shape": lambda columns: columns | {"starts": columns["starts"].reshape(1, -1)},
    "shorter": lambda columns: columns | {"sizes": columns["sizes"][:-1]},
    "starts beyond the members": lambda columns: columns | {"starts": columns["starts"] + np.int32(90)},
    "starts that fall": lambda columns: columns | {"starts": columns["starts"][::-1]},
    "an unknown extension": lambda columns: columns | {"kinds": columns["kinds"] + np.uint32(9)},
    "a place before the shard": lambda columns: columns | {"offsets": columns["offsets"] - 2**40},
    "a place behind the shard": lambda columns: columns | {"offsets": columns["offsets"] + 2**40},
    "a negative size": lambda columns: columns | {"sizes": columns["sizes"] - 2**40},
    "a size beyond the shard": lambda columns: columns | {"sizes": columns["sizes"] + (2**63 - 1 - 4000)},
    "no text": lambda columns: columns | {"keys": columns["keys"].astype(np.float64)},
    "more than the shard": lambda columns: columns | {"sizes": np.zeros(8 * MIB, np.int64)},
}


@pytest.mark.parametrize("changed", TABLES)
def test_a_false_table_is_replaced_by_reading_the_shard(changed: str, tmp_path: Path) -> None:
    index = indexed(tmp_path, samples(5))
    expected = list(map(ShardDataset(index, tmp_path / "cache", decode=False).__getitem__, range(5)))
    content = json.loads(index.read_text())
    with np.load(tables_path(index)) as stored:
        made = TABLES[changed](dict(stored))
    table = made if isinstance(made, bytes) else saved(**made)
    tables_path(index).write_bytes(table)
    content["shardlist"][0]["table"] = [0, len(table), hash_table(table)]
    index.write_text(json.dumps(content))

    def read() -> None:
        dataset = ShardDataset(index, tmp_path / "cache", decode=False)
        assert [dataset[number] for number in range(5)] == expected

    assert peak_of(read) < 8 * MIB


def test_a_true_table_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = indexed(tmp_path, samples(5))
    monkeypatch.setattr("flyte_ddp.shards.dataset.iterate_tar_members", None)
    assert len(ShardDataset(index, tmp_path / "cache", decode=False)[4][".bin"])
    table = tables_path(index).read_bytes()
    assert len(SampleTable.from_npz_bytes(table, storage.stat_file(str(tmp_path / "0.tar")).size)) == 5


def mutate(source: random.Random) -> bytes:
    """Return a tar file with some fields of its headers replaced, and with checksums that are right again."""
    form = source.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    names = ["a.jpg", "a.cls", f"{'n' * 120}.jpg" if form != tarfile.USTAR_FORMAT else "b.jpg"]
    content = bytearray(tar_bytes([(name, source.randbytes(source.randrange(700))) for name in names], form))
    headers = [place for place in range(0, len(content), BLOCK) if content[place + 257 : place + 262] == b"ustar"]
    for place in source.sample(headers, source.randrange(1, len(headers) + 1)):
        start, length = source.choice(((0, 100), (100, 8), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155)))
        kind = source.randrange(4)
        if kind == 0:
            field = source.randbytes(length)
        elif kind == 1:
            field = tarfile.itn(source.choice((-1, 1, 513, 2**33, 2**40, 2**59, 2**62)), 12, tarfile.GNU_FORMAT)
            start, length = 124, 12  # the size
        elif kind == 2:
            field = source.choice(b"012345678LKSxgXDMNV\0").to_bytes()
            start, length = 156, 1  # the type
        else:
            field = source.choice((b"\0", b"7", b"/", b"../", b"\xff")) * length
        content[place + start : place + start + length] = field[:length].ljust(length, b"\0")
        fields = content[place : place + 148] + b" " * 8 + content[place + 156 : place + BLOCK]
        content[place + 148 : place + 156] = b"%06o\0 " % sum(fields)
    for _ in range(source.randrange(3) if form == tarfile.PAX_FORMAT else 0):  # also in the records of pax headers
        content[source.randrange(len(content))] = source.randrange(256)
    return bytes(content)


@pytest.mark.exhaustive
def test_headers_that_are_changed_at_random() -> None:
    source = random.Random(56)
    refused = 0
    for _ in range(2_000):
        content = mutate(source)
        found = []
        for file in (io.BytesIO(content), HashedStream(content[i : i + 700] for i in range(0, len(content), 700))):
            try:
                read = list(iterate_tar_members(file, "x.tar", lambda _: True))
            except UserError as error:
                found.append(error.message.partition(" (")[0])
                refused += 1
                continue
            assert all(content[member.offset : member.offset + member.size] == inside for member, inside in read)
            found.append(str(read))
        assert found[0] == found[1]
    assert 1_000 < refused < 4_000
