"""How packing writes shards: what fails or is killed, what is replaced, full disks, and threads."""

from pathlib import Path

import pytest
from image_folders import all_files, image_bytes, write_files
from served_shards import contents

from flyte_ddp.core.errors import UserError
from flyte_ddp.datasets.packing import pack_image_folder, pack_source
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.shards.packing import pack_samples
from flyte_ddp.shards.scanning import verify_index


@pytest.mark.parametrize(
    "error",
    [UserError("sample 19 is bad"), OSError("no such sample"), KeyboardInterrupt("Ctrl-C"), "next to each other"],
)
def test_what_fails_leaves_all_as_it_was(tmp_path: Path, error: BaseException | str) -> None:
    def sample(number: int) -> tuple[str, dict[str, bytes]]:
        if number == 19 and not isinstance(error, str):
            raise error
        return str(number if number < 19 else 16), {".a": b"x"}

    write_files(tmp_path, {"other.json": b""})
    with pytest.raises(UserError if isinstance(error, str) else type(error), match=str(error)) as caught:
        pack_samples(sample, 20, tmp_path, samples_per_shard=16, classes=[], seed=None, progress="off")
    assert isinstance(error, str) or caught.value is error
    assert all_files(tmp_path) == {"other.json": b""}


def letters(count: int, folder: Path, *, letter: str = "a", name: str = "train") -> ShardIndex:
    """A shard for each two samples."""

    def sample(number: int) -> tuple[str, dict[str, bytes]]:
        return f"{letter}{number}", {".txt": letter.encode()}

    return pack_samples(sample, count, folder, classes=[], name=name, samples_per_shard=2, seed=None, progress="off")


def test_braces_in_the_folders_name_are_no_range(tmp_path: Path) -> None:
    letters(3, tmp_path / "v{1..2}")
    assert packed_texts(tmp_path / "v{1..2}/train.json") == "aaa"


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    letters(3, tmp_path)
    (tmp_path / "val-000001.tar").write_text("somebody else's")
    before = all_files(tmp_path)
    for name, path in (("train", "train.json"), ("val", "val-000001.tar")):
        with pytest.raises(UserError, match=rf"{path}: already exists; remove"):
            letters(4, tmp_path, letter="b", name=name)
    assert all_files(tmp_path) == before
    assert packed_texts(tmp_path / "train.json") == "aaa"


def packed_texts(index: Path) -> str:
    """All samples of an index that is right, one after the other."""
    assert verify_index(str(index), progress="off") == []
    return b"".join(sample[".txt"] for sample in contents(index)).decode()


def test_other_errors(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a/x.png": image_bytes()})
    (tmp_path / "file").write_text("")
    source = str(tmp_path / "source")
    for folder, options, said in (
        (tmp_path / "file", {}, r"cannot write .*file.*: "),
        (tmp_path / "out", {"samples_per_shard": 0}, "samples_per_shard=0: must be at least 1"),
        (tmp_path / "out", {"name": "a/b"}, "name='a/b'"),
    ):
        with pytest.raises(UserError, match=said):
            pack_image_folder(source, folder, progress="off", **options)
    with pytest.raises(UserError, match="unknown split 'Test'"):
        pack_source(source, tmp_path / "out", split="Test", progress="off")
    with pytest.raises(UserError, match="split='test': a folder of images is one split"):
        pack_source(source, tmp_path / "out", split="test", progress="off")
    assert not (tmp_path / "out").exists()
