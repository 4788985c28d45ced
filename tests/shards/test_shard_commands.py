"""The commands around shards, called as users call them, and all that verifying an index finds."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from image_folders import image_files, write_files
from tars import samples, write_shards

from flyte_ddp.datasets.packing import pack_image_folder
from flyte_ddp.shards.__main__ import shards as commands
from flyte_ddp.shards.index import read_index
from flyte_ddp.shards.scanning import create_index, verify_index

FILES = image_files(*(f"{kind}/{number}.png" for kind in ("ant", "bee") for number in range(6)))


def shards(*arguments: object) -> tuple[int, str, str]:
    """Exit status, output and errors of ``python -m flyte_ddp.shards``, in this process."""
    ended = CliRunner().invoke(commands, [*map(str, arguments)])
    return ended.exit_code, ended.stdout, ended.stderr


def test_from_a_folder_of_images_to_a_verified_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands, one after the other, as in the documentation."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "images", FILES)
    packed = shards("pack", "images", "out", "--samples-per-shard", 5, "--seed", 3, "--name", "val")
    said = "image folder images: 12 images of 2 classes (ant 6, bee 6)\npacking (12 samples)\n"
    assert packed == (0, "out/val.json: 3 shards, 12 samples\n", said)

    (tmp_path / "names").write_bytes("\ufeffant\r\nbee\r\n\r\n".encode())
    pattern = "out/val-{000000..000002}.tar"
    created = shards("create", pattern, "-o", "out/again.json", "--classes", "names", "--progress", "off")
    assert created == (0, "out/again.json: 3 shards, 12 samples, classes: 2\n", "")
    first, again = (json.loads((tmp_path / "out" / name).read_text()) for name in ("val.json", "again.json"))
    assert (again["name"], again["shardlist"]) == ("again", first["shardlist"])
    assert again["flyte_ddp"]["classes"] == ["ant", "bee"]

    joined = shards("join", "out/val.json", "out/again.json", "--weight", 1, "--weight", 0.5)
    assert joined == (0, "joined.json: 2 data sets, 6 shards, 24 samples\n", "")
    assert [part.weight for part in read_index("joined.json").parts] == [1, 0.5]

    verified = shards("verify", "out/val.json", "--decode")
    assert verified == (0, "out/val.json: all shards match the index\n", "checking (3 shards)\n")


def test_the_exit_status_says_whether_all_is_well(tmp_path: Path) -> None:
    status, _, said = shards("create", "gone.tar", "-o", tmp_path / "none.json", "--progress", "off")
    assert status == 1
    assert re.fullmatch(r"Error: shard .*gone\.tar: cannot be read \(no such file\); check the address\n", said)
    assert not [*tmp_path.iterdir()]
    [path] = write_shards(tmp_path, samples(3))
    index = tmp_path / "index.json"
    create_index([str(path)], index, progress="off")
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    assert shards("verify", index, "--progress", "off")[0] == 1


def flip_image_byte(folder: Path) -> None:
    content = bytearray((folder / "train-000001.tar").read_bytes())
    content[content.index(b"IDAT") + 20] ^= 0xFF
    (folder / "train-000001.tar").write_bytes(content)


def edit_index(folder: Path, shard: int = 0, classes: tuple[str, ...] = ("ant", "bee"), **changes: object) -> None:
    content = json.loads((folder / "train.json").read_text())
    content["shardlist"][shard].update(changes)
    content["flyte_ddp"]["classes"] = classes
    (folder / "train.json").write_text(json.dumps(content))


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "nothing": (lambda _: None, []),
    "a byte of an image": (
        flip_image_byte,
        [r"sample '(ant|bee)/\d' in .*-000001.tar: .png .*", "shard .*-000001.tar: SHA-256 .*", "shard .*: MD5 .*"],
    ),
    "a missing shard": (
        lambda folder: (folder / "train-000001.tar").unlink(),
        [r"shard .*/train-000001.tar: cannot be read \(no such file\); check the address"],
    ),
    "counts in the index": (
        lambda folder: edit_index(folder, nsamples=6),
        ["shard .*/train-000000.tar: samples 5, but 6 in the index"],
    ),
    "sizes and digests in the index": (
        lambda folder: edit_index(folder, 2, filesize=6, md5sum="0" * 32),
        ["shard .*/train-000002.tar: bytes 10240, but 6 in the index", "shard .*: MD5 .*, but 0{32} in the index"],
    ),
    "fewer classes in the index": (
        lambda folder: edit_index(folder, classes=("ant",)),
        [r"shard .*: has label 1, but the index has 1 classes"] * 3,
    ),
}


def test_verifying_finds(tmp_path: Path) -> None:
    pack_image_folder(
        str(write_files(tmp_path / "images", FILES)), tmp_path / "out", samples_per_shard=5, progress="off"
    )
    for damage, (apply, expected) in DAMAGE.items():
        folder = Path(shutil.copytree(tmp_path / "out", tmp_path / damage))
        apply(folder)
        found = verify_index(str(folder / "train.json"), decode=True, progress="off")
        assert len(found) == len(expected), (damage, found)
        for text, pattern in zip(found, expected, strict=True):
            assert re.fullmatch(pattern, text)
