"""How packing writes shards: what fails or is killed, what is replaced, full disks, and threads."""

import operator
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import wids
from image_folders import all_files, image_bytes, write_files
from interruptions import ended_before_each_change
from mounts import ALONE, need_mounts
from served_shards import contents
from tars import shard_bytes

from flyte_ddp.datasets.packing import pack_image_folder, pack_images, pack_source
from flyte_ddp.errors import UserError
from flyte_ddp.shards import packing
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.shards.packing import pack_samples
from flyte_ddp.shards.scanning import create_index, verify_index


@pytest.mark.parametrize("error", [UserError("sample 19 is bad"), KeyboardInterrupt("Ctrl-C"), "in two places"])
def test_what_fails_leaves_all_as_it_was(tmp_path: Path, error: BaseException | str) -> None:
    def sample(number: int) -> tuple[str, dict[str, bytes]]:
        if number == 19 and not isinstance(error, str):
            raise error
        return str(number if number < 19 else 16), {".a": b"x"}

    letters(9, tmp_path / "old")
    (tmp_path / "old" / "other.json").write_text("")
    before = all_files(tmp_path / "old")
    for name in ("new", "old"):
        with pytest.raises(UserError if isinstance(error, str) else type(error), match=str(error)) as caught:
            pack_samples(sample, 20, tmp_path / name, per_shard=16, classes=[], seed=None, progress="off")
        assert isinstance(error, str) or caught.value is error
    assert not [*tmp_path.glob("new/*")]
    assert all_files(tmp_path / "old") == before
    assert packed_texts(tmp_path / "old" / "train.json") == "a" * 9


def letters(count: int, folder: Path, *, letter: str = "a", name: str = "train") -> ShardIndex:
    """A shard for each two samples."""

    def sample(number: int) -> tuple[str, dict[str, bytes]]:
        return f"{letter}{number}", {".txt": letter.encode()}

    return pack_samples(sample, count, folder, classes=[], name=name, per_shard=2, seed=None, progress="off")


def test_packing_anew_removes_the_shards_that_are_no_longer_named(tmp_path: Path) -> None:
    """And nobody else's: those of other names, of another's index, and of no index."""
    letters(9, tmp_path)
    letters(4, tmp_path, name="train-2")
    others = ("train-000009.tar", "train-x.tar", "atrain-000004.tar", "notes.txt", ".train-000004.tar")
    for name in others:
        (tmp_path / name).write_text("somebody else's")
    before = sorted(all_files(tmp_path))
    letters(3, tmp_path, letter="b")
    gone = [f"train-00000{number}.tar" for number in (2, 3, 4)]
    assert sorted(all_files(tmp_path)) == [name for name in before if name not in gone]
    assert packed_texts(tmp_path / "train.json") == "bbb"


def test_shards_that_were_only_indexed_are_not_removed(tmp_path: Path) -> None:
    own = [f"train-00000{number}.tar" for number in range(5)]
    write_files(tmp_path, {name: shard_bytes({name[:12]: {".cls": b"0"}}) for name in own})
    create_index([str(tmp_path / name) for name in own], tmp_path / "train.json", progress="off")
    letters(2, tmp_path)
    assert sorted(all_files(tmp_path)) == [*own, "train.json", "train.json.tables"]


def packed_texts(index: Path) -> str:
    """All samples of an index that is right, one after the other."""
    assert verify_index(str(index), progress="off") == []
    return b"".join(sample[".txt"] for sample in contents(index)).decode()


MORE = (True, signal.SIGINT), (True, signal.SIGKILL), (False, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("links", "number"),
    [(False, signal.SIGKILL), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE)],
)
def test_a_pack_that_is_ended_leaves_the_old_or_the_new(tmp_path: Path, number: int, links: bool, monkeypatch) -> None:
    """At any change of a file; and the next one leaves nothing else behind."""
    old, new = tmp_path / "old", tmp_path / "new"
    letters(3, old)
    letters(1, new, letter="b")
    whole = [all_files(old), all_files(new)]
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", no_links)
    seen = set()
    for folder in ended_before_each_change(old, lambda copy: letters(1, copy, letter="b"), number):
        seen.add(packed_texts(folder / "train.json"))
        assert number == signal.SIGKILL or all_files(folder) in whole
        letters(1, folder, letter="b")
        assert all_files(folder) == whole[1]
        assert not (folder / ".train.packing").exists()
    assert seen == {"aaa", "b"}


def no_links(path: Path, target: Path) -> None:
    raise PermissionError(f"{path}: no links to {target} on this file system")


def test_wids_reads_what_is_not_yet_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters(9, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "move_packed_shards", lambda *_: None)
        letters(5, tmp_path, letter="b")
    index = tmp_path / "train.json"
    theirs = wids.ShardListDataset(str(index), cache_dir=str(tmp_path / "wids"), transformations=[])
    assert [theirs[i][".txt"].read() for i in range(len(theirs))] == [b"b"] * 5
    theirs.close()
    assert packed_texts(index) == "bbbbb"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_first_pack_that_is_killed_leaves_no_index_or_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    whole = set()
    for folder in ended_before_each_change(tmp_path / "empty", lambda copy: letters(3, copy)):
        index = folder / "train.json"
        whole.add(index.exists() and packed_texts(index))
    assert whole == {False, "aaa"}


def test_other_files_in_an_indexs_place_are_kept(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('{"annotations": []}')
    with pytest.raises(UserError, match=r"train\.json: exists and is not an index; remove it, or choose another name"):
        letters(3, tmp_path)
    assert all_files(tmp_path) == {"train.json": b'{"annotations": []}'}
    (tmp_path / "test.json").mkdir()
    with pytest.raises(UserError, match=r"test\.json: exists and is not an index; remove it, or choose another name"):
        pack_samples(lambda number: pytest.fail(f"{number} is read"), 1, tmp_path, classes=[], name="test")


def test_two_that_pack_the_same(tmp_path: Path) -> None:
    """Braces in names are only braces."""
    folder = tmp_path / "a{1..3}"
    with packing.open_workspace(folder / "b{1..2}.json"):
        with pytest.raises(UserError, match=r"json: another process is packing it; wait for its end"):
            letters(3, folder, name="b{1..2}")
        letters(3, folder, name="test")
    letters(3, folder, name="b{1..2}")
    assert [packed_texts(folder / f"{name}.json") for name in ("b{1..2}", "test")] == ["aaa"] * 2


@pytest.mark.parametrize("name", ["os.open", "fcntl.flock"])
def test_a_packing_that_begins_while_another_ends(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one removes the folder of work between two steps of this one."""
    original, ended = operator.attrgetter(name)(packing), []

    def call_after_the_end(*arguments: object) -> object:
        if not ended:
            ended.append((tmp_path / ".train.packing").rmdir())
        return original(*arguments)

    monkeypatch.setattr(f"flyte_ddp.shards.packing.{name}", call_after_the_end)
    letters(3, tmp_path)
    assert ended
    assert packed_texts(tmp_path / "train.json") == "aaa"


def test_other_errors(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a/x.png": image_bytes()})
    (tmp_path / "file").write_text("")
    source = str(tmp_path / "source")
    for folder, options, said in (
        (tmp_path / "file", {}, r"cannot write .*file.*: Not a directory"),
        (Path("s3://bucket/x"), {}, r"s3:/bucket/x/train\.json: cannot be written to; choose a path on this machine"),
        (tmp_path / "out", {"per_shard": 0}, "samples_per_shard=0: must be at least 1"),
        (tmp_path / "out", {"seed": -1}, "seed=-1: must be at least 0"),
        (tmp_path / "out", {"name": "a/b"}, "name='a/b'"),
    ):
        with pytest.raises(UserError, match=said):
            pack_image_folder(source, folder, progress="off", **options)
    with pytest.raises(UserError, match="generator to pack: a generator has no len"):
        pack_images((item for item in ()), tmp_path / "out", progress="off")
    with pytest.raises(UserError, match="split='test': a folder of images is one split"):
        pack_source(source, tmp_path / "out", split="test", progress="off")
    assert not (tmp_path / "out").exists()
    assert not Path("s3:").exists()


READ_ONLY = """
import subprocess, sys
from pathlib import Path
from flyte_ddp.errors import UserError
from flyte_ddp.shards.packing import pack_samples

folder = Path(sys.argv[1])
for options, count in (("size=64k", 100), ("ro", 1)):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
    try:
        samples = lambda number: (str(number), {".a": bytes(9000)})
        pack_samples(samples, count, folder / "out", classes=[], per_shard=2, progress="off")
    except UserError as error:
        print(error.message, [path for path in folder.rglob("*") if path.is_file()])
"""


def test_a_really_full_and_a_read_only_disk(tmp_path: Path) -> None:
    need_mounts(tmp_path)
    command = [*ALONE, sys.executable, "-c", READ_ONLY, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    full, read_only = result.stdout.splitlines()
    workspace = f"{tmp_path}/out/.train.packing"
    assert full.startswith(f"cannot write {workspace}/train-000003.tar: No space left on device; free some space")
    assert read_only.startswith(f"cannot write {tmp_path}/out/train.json: Read-only file system; choose")
    assert full.endswith(" []")
    assert read_only.endswith(" []")
