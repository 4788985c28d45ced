"""The commands around shards, called as users call them, and all that verifying an index finds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from file_server import FileServer
from image_folders import image_files, write_files
from tars import samples, shard_bytes, write_shards

from flyte_ddp.errors import UserError
from flyte_ddp.shards.__main__ import shards as commands
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.scanning import create_index, verify_index

FILES = image_files(*(f"{kind}/{number}.png" for kind in ("ant", "bee") for number in range(6)))


@dataclass(frozen=True)
class Ended:
    """What a command said, and its exit status."""

    status: int
    output: str
    errors: str

    @property
    def error(self) -> str:
        """The message of a user's mistake: no traceback, and nothing but the message."""
        assert self.status == 1, self
        [*rest, line] = self.errors.splitlines()
        assert line.startswith("Error: "), self.errors
        assert not [text for text in rest if "Traceback" in text]
        return line.removeprefix("Error: ")


def shards(*arguments: str | Path, folder: Path) -> Ended:
    """``python -m flyte_ddp.shards`` in a folder."""
    ended = subprocess.run(
        [sys.executable, "-m", "flyte_ddp.shards", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.slow
def test_from_a_folder_of_images_to_a_single_sample(tmp_path: Path) -> None:
    """All commands, one after the other, as in the documentation."""
    write_files(tmp_path / "images", FILES)
    packed = shards(
        "pack", "images", "out", "--samples-per-shard", "5", "--seed", "3", "--name", "val", folder=tmp_path
    )
    assert (packed.status, packed.output) == (0, "out/val.json: 3 shards, 12 samples\n")
    assert packed.errors == "image folder images: 12 images of 2 classes (ant 6, bee 6)\npacking (12 samples)\n"

    (tmp_path / "names").write_text("ant\nbee\n")
    created = shards(
        "create",
        "out/val-{000000..000002}.tar",
        "-o",
        "out/again.json",
        "--classes",
        "names",
        "--progress",
        "off",
        folder=tmp_path,
    )
    assert created == Ended(0, "out/again.json: 3 shards, 12 samples, 2 classes\n", "")
    first, again = (json.loads((tmp_path / "out" / name).read_text()) for name in ("val.json", "again.json"))
    assert (again["name"], again["shardlist"], again["flyte_ddp"]["classes"]) == (
        "again",
        first["shardlist"],
        ["ant", "bee"],
    )

    joined = shards("join", "out/val.json", "out/again.json", "--weight", "1", "--weight", "0.5", folder=tmp_path)
    assert joined == Ended(0, "joined.json: 2 data sets, 6 shards, 24 samples\n", "")
    assert "weight 0.5" in shards("show", "joined.json", folder=tmp_path).output

    verified = shards("verify", "out/val.json", "--decode", folder=tmp_path)
    assert verified == Ended(0, "out/val.json: all is as it says\n", "checking (3 shards)\n")

    shown = shards("show", "out/val.json", "--shards", folder=tmp_path)
    assert shown.status == 0
    for line in ("samples          12 (2 to 5 a shard)", "classes          2", "digests          3 shards have one"):
        assert line in shown.output.splitlines()
    assert [line.split()[0] for line in shown.output.splitlines()[-3:]] == ["5", "5", "2"]

    shown = shards("sample", "out/val.json", "7", "--to", "members", folder=tmp_path)
    assert shown.status == 0
    expected = ShardDataset(tmp_path / "out" / "val.json", tmp_path / "cache", decode=False)[7]
    described = json.loads(shown.output)
    assert described[".png"] == f"{len(expected['.png'])} bytes"
    assert described[".cls"] == expected[".cls"].decode()
    assert {name: described[name] for name in expected if name.startswith("__")} == {
        name: value for name, value in expected.items() if name.startswith("__")
    }
    key = expected["__key__"].replace("/", "_")
    assert (tmp_path / "members" / f"{key}.png").read_bytes() == expected[".png"]


@pytest.mark.slow
def test_mistakes_are_one_message_without_a_traceback(tmp_path: Path) -> None:
    write_shards(tmp_path, samples(3), samples(3, prefix="b"))
    (tmp_path / "no.tar").write_text("no tar file")
    (tmp_path / "not.txt").write_bytes(b"\xff\xfe")
    create_index([str(tmp_path / "0.tar")], tmp_path / "index.json", progress="off")
    for arguments, said in {
        ("create", "gone.tar"): r"shard .*/gone\.tar: cannot be read (no such file); check the address",
        ("create", "no.tar"): "shard .*/no.tar: not a whole, uncompressed tar file",
        ("create", "0.tar", "--classes", "gone.txt"): "classes gone.txt: No such file or directory",
        ("verify", "gone.json"): "index gone.json: cannot be read (no such file)",
        ("join", "index.json"): "must be two or more",
        ("sample", "index.json", "3"): "sample 3: the index has 3, so it must be 0..2",
    }.items():
        ended = shards(*arguments, folder=tmp_path)
        for part in said.split(".*"):
            assert part.replace("\\", "") in ended.error
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0.tar",
        "1.tar",
        "index.json",
        "index.json.tables",
        "no.tar",
        "not.txt",
    ]
    assert shards("show", "index.json", "--sideways", folder=tmp_path).status == 2
    damaged = bytearray((tmp_path / "0.tar").read_bytes())
    damaged[600] ^= 1
    (tmp_path / "0.tar").write_bytes(damaged)
    found = shards("verify", "index.json", "--progress", "off", folder=tmp_path)
    assert found.error == "index index.json: 2 problems"
    assert [line.split(": ")[1].split()[0] for line in found.output.splitlines()] == ["SHA-256", "MD5"]


Damage = Callable[[Path], object]


def change(name: str, edit: Callable[[bytearray], object]) -> Damage:
    def apply(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        edit(content)
        (folder / name).write_bytes(content)

    return apply


def edit_index(edit: Callable[[dict[str, Any]], object]) -> Damage:
    def apply(folder: Path) -> None:
        content = json.loads((folder / "train.json").read_text())
        edit(content)
        (folder / "train.json").write_text(json.dumps(content))

    return apply


def in_an_image(content: bytearray) -> None:
    place = content.index(b"IDAT") + 20
    content[place] ^= 0xFF


def with_a_text_for_an_image(folder: Path) -> None:
    """Whatever digests say: the shard has been like that from the beginning."""
    (folder / "train-000000.tar").write_bytes(shard_bytes({"ant/0": {".png": b"no image", ".cls": b"0"}}))
    remake_index(folder)


def with_members_left_out(folder: Path) -> None:
    """One has no label, one no image."""
    whole = {".png": (folder.parent / "images" / "ant" / "0.png").read_bytes(), ".cls": b"0"}
    contents = {f"ant/{number}": dict(whole) for number in range(5)}
    del contents["ant/1"][".cls"]
    del contents["ant/3"][".png"]
    (folder / "train-000000.tar").write_bytes(shard_bytes(contents))
    remake_index(folder)


def remake_index(folder: Path, classes: tuple[str, ...] = ("ant", "bee")) -> None:
    paths = [str(path) for path in sorted(folder.glob("*.tar"))]
    create_index(paths, folder / "train.json", name="train", classes=classes, progress="off")


DAMAGE: dict[str, tuple[Damage, list[str]]] = {
    "nothing": (lambda _: None, []),
    "a byte of an image": (
        change("train-000001.tar", in_an_image),
        [
            r"sample '(ant|bee)/\d' in .*train-000001.tar: .png .*",
            "shard .*train-000001.tar: SHA-256 .*",
            "shard .*: MD5 .*",
        ],
    ),
    "a missing shard": (
        lambda folder: (folder / "train-000001.tar").unlink(),
        [r"shard .*/train-000001.tar: cannot be read \(no such file\); check the address"],
    ),
    "a shard cut short": (
        change("train-000002.tar", lambda content: content.__delitem__(slice(600, None))),
        ["shard .*/train-000002.tar: not a whole, uncompressed tar file .*"],
    ),
    "other shards": (
        lambda folder: shutil.copy(folder / "train-000001.tar", folder / "train-000000.tar"),
        ["shard .*-000000.tar: SHA-256 .*", "shard .*: MD5 .*", "shard .*the table of samples .* of another shard"],
    ),
    "counts in the index": (
        edit_index(lambda content: content["shardlist"][0].update(nsamples=6)),
        ["shard .*/train-000000.tar: samples 5, and 6 in the index"],
    ),
    "sizes in the index": (
        edit_index(lambda content: content["shardlist"][2].update(filesize=6)),
        ["shard .*/train-000002.tar: bytes 10240, and 6 in the index"],
    ),
    "digests in the index": (
        edit_index(lambda content: content["shardlist"][2].update(md5sum="0" * 32)),
        ["shard .*/train-000002.tar: MD5 .*, and 0{32} in the index"],
    ),
    "fewer classes in the index": (
        edit_index(lambda content: content["flyte_ddp"].update(classes=["ant"])),
        [r"shard .*: has label 1, and the index has 1 classes"] * 3,
    ),
    "missing tables": (
        lambda folder: (folder / "train.json.tables").unlink(),
        ["shard .*: the table of samples beside the index is missing or of another shard"] * 3,
    ),
    "members left out": (
        with_members_left_out,
        [
            r"sample 'ant/1' in shard .*/train-000000.tar has no label: it has .png; .*; in all 2 such samples",
            r"sample 'ant/1' in .*/train-000000.tar: has .png, and most have .cls, .png",
            r"sample 'ant/3' in .*/train-000000.tar: has .cls, and most have .cls, .png",
        ],
    ),
    "a text for an image": (
        with_a_text_for_an_image,
        [r"sample 'ant/0' in .*/train-000000.tar: .png cannot be decoded \(an image of no known format\); .*"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_verifying_finds(damage: str, tmp_path: Path) -> None:
    from flyte_ddp.datasets.packing import pack_image_folder

    pack_image_folder(str(write_files(tmp_path / "images", FILES)), tmp_path / "out", per_shard=5, progress="off")
    apply, expected = DAMAGE[damage]
    apply(tmp_path / "out")
    found = verify_index(str(tmp_path / "out" / "train.json"), decode=True, progress="off")
    assert len(found) == len(expected), found
    for text, pattern in zip(found, expected, strict=True):
        assert_matches(pattern, text)


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(UserError, match=f"^{pattern}$"):
        raise UserError(text)


def test_tables_that_a_server_does_not_give_are_not_called_missing(server: FileServer, tmp_path: Path) -> None:
    """All are in one file, of which one line says so."""
    paths = write_shards(tmp_path, samples(3), samples(4, prefix="b"))
    create_index([str(path) for path in paths], tmp_path / "x.json", progress="off")
    server.files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    address = f"{server.url}/x.json"
    server.faults = {"x.json.tables": [503, "reset", 503]}
    assert verify_index(address, progress="off") == []
    server.gives_parts = False
    [said] = verify_index(address, progress="off")
    tables = f"tables of samples {address}.tables: cannot be read, and were not compared"
    assert said == f"{tables} (the server cannot give a part of a file: it ignores Range)"
    server.faults = {"x.json.tables": [503] * 8}
    [said] = verify_index(address, progress="off")
    assert said.startswith(f"{tables} (HTTP 503")
    del server.files["x.json.tables"]
    assert len(verify_index(address, progress="off")) == 2


def test_a_name_that_is_no_text_is_shown(tmp_path: Path) -> None:
    name = os.fsdecode(b"n\xf6.tar")
    write_shards(tmp_path, samples(3))[0].rename(tmp_path / name)
    create_index([str(tmp_path / name)], tmp_path / "x.json", progress="off")
    ended = CliRunner().invoke(commands, ["show", str(tmp_path / "x.json"), "--shards"])
    assert (ended.exit_code, ended.output.split()[-1]) == (0, f"{tmp_path}/n\\udcf6.tar")
