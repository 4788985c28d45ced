"""Fetching: atomic, repeatable, concurrent, on a full disk, from servers that fail; and what a fingerprint costs."""

import concurrent.futures
import dataclasses
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer
from image_folders import all_files
from mnist_files import NAMES, Tiny, assert_tiny, leftovers
from mounts import ALONE, need_mounts

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import file_digest
from flyte_ddp.datasets import (
    DATASETS,
    fetch,
    fetching,
    fingerprint,
    is_whole,
    open_arrays,
    open_prepared,
    prepared_folder,
)


def test_a_second_fetch_does_nothing(tiny: Tiny, server: FileServer, tmp_path: Path) -> None:
    server.files = tiny.files
    (tmp_path / "plain").mkdir()
    first = fetch("mnist", server.url, tmp_path / "data", progress="off")
    assert first.stat().st_mode == (tmp_path / "plain").stat().st_mode, "others may read it"
    requests = len(server.requests)
    written = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert max(written, key=written.__getitem__).name == "dataset.json", "the description comes last"
    assert fetch("mnist", server.url, tmp_path / "data", progress="off") == first == (tmp_path / "data").absolute()
    assert len(server.requests) == requests
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == written


def test_two_fetches_at_once_both_succeed(tiny: Tiny, server: FileServer, tmp_path: Path) -> None:
    """Each request waits for its twin, so neither fetch can be over before the other has begun to write."""
    server.files, server.before_answer = tiny.files, threading.Barrier(2)
    folder = tmp_path / "data"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(fetch, "mnist", server.url, folder, progress="off") for _ in range(2)]
        assert [future.result(timeout=20) for future in both] == [folder, folder]
    np.testing.assert_array_equal(open_arrays(folder).train_inputs[..., 0], tiny.arrays[0])
    assert leftovers(tmp_path) == ["data"]
    assert server.requests.count(NAMES[3]) == 2


def test_a_folder_with_something_else_is_left_alone(tiny: Tiny, tmp_path: Path) -> None:
    mirror = str(tiny.write(tmp_path / "mirror"))
    with pytest.raises(UserError, match="is not a prepared data set"):
        fetch("digits", "", Path(mirror), progress="off")
    folder = fetch("mnist", mirror, tmp_path / "data", progress="off")
    for dataset in ("digits", "mnist"):
        with pytest.raises(UserError, match=r"holds dataset='mnist', data_source=.*choose another folder"):
            fetch(dataset, "", folder, progress="off")
    assert leftovers(Path(mirror)) == sorted(NAMES)


@pytest.mark.parametrize(
    ("name", "damage"), [("train_inputs", None), ("train_targets", -1), ("test_targets", b"something else")]
)
def test_a_folder_with_a_damaged_array_is_filled_again(tmp_path: Path, name: str, damage: int | bytes | None) -> None:
    """Also where a copy of a prepared folder was cut short, or killed before it had copied all files."""
    (tmp_path / "data").mkdir()  # an empty folder is filled, too
    folder = fetch("digits", "", tmp_path / "data", progress="off")
    before, path = content(folder), folder / f"{name}.npy"
    mapped = getattr(open_arrays(folder), name)
    path.unlink()  # whoever has mapped it keeps it
    if damage is not None:
        path.write_bytes(damage if isinstance(damage, bytes) else before[path.name][:damage])
    with pytest.raises(UserError, match=r"the prepared data set is damaged .*; delete the folder and fetch it again"):
        open_prepared(folder)
    assert not is_whole(folder)
    assert fetch("digits", "", folder, progress="off") == folder
    assert content(folder) == before
    assert leftovers(tmp_path) == ["data"]
    np.testing.assert_array_equal(mapped, getattr(open_arrays(folder), name))


def test_a_folder_with_a_damaged_description_is_filled_again(tmp_path: Path) -> None:
    folder = fetch("digits", "", tmp_path / "data", progress="off")
    before = content(folder)
    (folder / "dataset.json").write_bytes(before["dataset.json"][:-5])
    fetch("digits", "", folder, progress="off")
    assert content(folder) == before
    (folder / "dataset.json").write_text("{}")
    (folder / "verified.json").unlink()  # perhaps another program's dataset.json
    with pytest.raises(UserError, match="damaged"):
        fetch("digits", "", folder, progress="off")


def test_a_file_that_has_changed_since_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By who opens the folder; fetching it again mends it."""
    folder = fetch("digits", "", tmp_path / "data", progress="off")
    array = np.lib.format.open_memmap(folder / "train_targets.npy", mode="r+")
    array[:] = (array + 1) % 10
    array.flush()
    with pytest.raises(UserError, match=r"is damaged \(train_targets.npy has changed since it was prepared\); delete"):
        open_prepared(folder)
    fetch("digits", "", folder, progress="off")
    assert "train_targets.npy has changed since it was prepared); it is fetched again" in capsys.readouterr().err
    np.testing.assert_array_equal((open_arrays(folder).train_targets + 1) % 10, array)


def test_files_are_hashed_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("digits", "", tmp_path / "data", progress="off")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    hashed = list[str]()
    monkeypatch.setattr(prepared_folder, "file_digest", lambda path: (hashed.append(path.name), file_digest(path))[1])
    for _ in range(2):
        open_prepared(folder)
        assert hashed == []
    for _ in range(2):
        open_prepared(copy)
        assert sorted(hashed) == sorted(path.name for path in folder.glob("*.npy"))
    (copy / "test_inputs.npy").touch()
    open_prepared(copy)
    assert hashed[4:] == ["test_inputs.npy"]
    (copy / prepared_folder.VERIFIED).unlink()
    monkeypatch.setattr(prepared_folder, "write_json", unwritable)
    open_prepared(copy)


def unwritable(*_: object) -> None:
    raise PermissionError("as of a folder that is read-only")


def content(folder: Path) -> dict[str, bytes]:
    return {name: each for name, each in all_files(folder).items() if name != prepared_folder.VERIFIED}


def test_ctrl_c_and_a_folder_that_cannot_be_made_leave_nothing(tmp_path: Path, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "write_prepared_set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("digits", "", tmp_path / "data", progress="off")
    assert leftovers(tmp_path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/data: cannot be written \(.*choose a writable folder"):
        fetch("digits", "", tmp_path / "file" / "data", progress="off")


FULL_DISK = """
import os, pathlib, subprocess, sys
from flyte_ddp.datasets import fetch
from flyte_ddp.core.errors import UserError
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", sys.argv[1]], check=True)
try:
    fetch("digits", "", pathlib.Path(sys.argv[1]) / "data", progress="off")
except UserError as error:
    print(error.message, os.listdir(sys.argv[1]))
"""


def test_a_full_disk_is_a_user_error(tmp_path: Path) -> None:
    need_mounts(tmp_path)
    command = [*ALONE, sys.executable, "-c", FULL_DISK, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{tmp_path}/data: the disk is full; free some space" in result.stdout
    assert result.stdout.endswith(" []\n")


@pytest.mark.slow
def test_the_digits_are_scikit_learns(digits: Path) -> None:
    from sklearn.datasets import load_digits

    bunch, ours = load_digits(), open_arrays(digits)
    images = np.concatenate([ours.train_inputs, ours.test_inputs])[..., 0]
    np.testing.assert_allclose(images / 255, bunch.images / 16, atol=0.5 / 255)
    assert (images.min(), images.max()) == (0, 255)
    np.testing.assert_array_equal(np.concatenate([ours.train_targets, ours.test_targets]), bunch.target)
    assert (len(ours.train_inputs), len(ours.test_inputs)) == (1_500, 297)


LIGHT = """
import sys
from flyte_ddp.datasets import DATASETS, fingerprint
print(*(fingerprint(dataset, "") for dataset in DATASETS), sep="\\n")
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_a_fingerprint_loads_nothing_heavy() -> None:
    printed = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True).stdout
    *fingerprints, modules = printed.splitlines()
    assert fingerprints == [fingerprint(dataset, "") for dataset in DATASETS]
    assert all(len(made) == len(f"{dataset}-") + 16 for made, dataset in zip(fingerprints, DATASETS, strict=True))
    heavy = {"torch", "torchvision", "sklearn", "scipy", "pandas", "PIL", "requests", "botocore", "flytekit", "wandb"}
    assert not heavy & set(modules.split())


@pytest.mark.parametrize("fault", ["truncate", "alter", "gzip"])
def test_a_fault_that_passes_is_retried(tiny: Tiny, server: FileServer, tmp_path: Path, fault: int | str) -> None:
    """``gzip`` must not even count as a fault: the digest is that of the bytes as they are stored."""
    server.files, server.faults = tiny.files, {NAMES[0]: [fault]}
    assert_tiny(fetch("mnist", server.url, tmp_path / "data", progress="off"), tiny)
    assert server.requests.count(NAMES[0]) == (1 if fault == "gzip" else 2)


@pytest.mark.parametrize(("fault", "tries", "said"), [(503, 4, "HTTP 503"), ("alter", 2, "md5")])
def test_a_fault_that_stays_is_an_error(tiny: Tiny, server, tmp_path: Path, fault, tries: int, said: str) -> None:
    server.files, server.faults = tiny.files, {NAMES[2]: [fault] * 9}
    with pytest.raises(UserError) as caught:
        fetch("mnist", server.url, tmp_path / "data", progress="off")
    assert all(part in caught.value.message for part in (said, server.url, NAMES[2]))
    assert len(caught.value.message.splitlines()) == 1
    assert server.requests.count(NAMES[2]) == tries
    assert leftovers(tmp_path) == []


def test_public_addresses_are_tried_in_turn_unless_there_is_a_mirror(tiny: Tiny, server, tmp_path, monkeypatch) -> None:
    system = tiny.write(tmp_path / "system")
    (system / NAMES[0]).write_bytes(b"damaged")
    addresses = (f"{server.url}/gone", server.url)
    dataset = dataclasses.replace(tiny.dataset, addresses=addresses, system_folder=str(system))
    monkeypatch.setitem(DATASETS, "mnist", dataset)
    server.files = tiny.files
    assert_tiny(fetch("mnist", "", tmp_path / "data", progress="off"), tiny)
    assert json.loads((tmp_path / "data/dataset.json").read_text())["source"] == f"{server.url} and {system}"
    assert server.requests == [f"gone/{NAMES[0]}", NAMES[0]]
    (tmp_path / "mirror").mkdir()
    with pytest.raises(UserError, match=f"mirror'.*cannot get {NAMES[0]} .* the published {', '.join(NAMES)}"):
        fetch("mnist", str(tmp_path / "mirror"), tmp_path / "other", progress="off")
    assert len(server.requests) == 2
