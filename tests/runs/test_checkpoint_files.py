"""Checkpoints as files: what others can do with them, and what loading one costs."""

import hashlib
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from kept_checkpoints import ARITHMETIC, IDENTITY

from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import Checkpoint
from flyte_ddp.core.runs.run_folder import rewind_to_newest_checkpoint
from flyte_ddp.pods.checkpoint_store import CheckpointStore

STATE = {"model": {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)}, "step": 7}
MEBIBYTE = 1 << 20
STATE_BYTES = 64 * MEBIBYTE
LOAD = """
import sys
from pathlib import Path
import torch
from flyte_ddp.core.runs import checkpoint

def private_bytes():
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

found = checkpoint.read_checkpoint(Path(sys.argv[1]))
before = private_bytes()
state = checkpoint.load_state(found)
assert float(state["weight"].sum()) == state["weight"].numel()
print(private_bytes() - before)
"""


def write(path: Path, state: dict[str, object], metrics: bytes = b"") -> Checkpoint:
    return checkpoint.write_checkpoint(Checkpoint(1, 7, (ARITHMETIC,), 5.0, IDENTITY, path, metrics), state)


def test_a_user_opens_one_by_torch_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", STATE)
    found = torch.load(tmp_path / "a.ckpt", weights_only=True)["state"]
    assert found["step"] == 7
    for name, value in STATE["model"].items():  # type: ignore[attr-defined]
        assert torch.equal(found["model"][name], value)
        assert found["model"][name].dtype == value.dtype
    with zipfile.ZipFile(tmp_path / "a.ckpt") as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("metrics", [b"", b'{"step": 1}\n' * 100_000])
def test_head_and_state_come_back(tmp_path: Path, metrics: bytes) -> None:
    written = write(tmp_path / "a.ckpt", STATE, metrics)
    found = checkpoint.read_checkpoint(tmp_path / "a.ckpt")
    assert found is not None
    assert found.metrics == metrics
    assert written == checkpoint.read_checkpoint(tmp_path / "a.ckpt", most_bytes=0)
    assert checkpoint.load_state(found)["step"] == 7


def test_a_loaded_state_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    """So all ranks of a host share the page cache's copy."""
    write(tmp_path / "a.ckpt", {"weight": torch.ones(STATE_BYTES // 4)})
    command = [sys.executable, "-c", LOAD, str(tmp_path / "a.ckpt")]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert taken < STATE_BYTES / 8


def test_each_version_of_a_file_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, verify = [], checkpoint.check_file_digest
    monkeypatch.setattr(checkpoint, "check_file_digest", lambda file: calls.append(file.name) or verify(file))
    for _ in range(2):
        write(tmp_path / "a.ckpt", STATE)
        for _ in range(3):
            checkpoint.read_checkpoint(tmp_path / "a.ckpt")
    assert len(calls) == 2


def test_an_upload_leaves_verifying_to_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.ckpt", STATE)
    monkeypatch.setattr(checkpoint, "check_file_digest", None)
    store = CheckpointStore(str(tmp_path / "store"), "one")
    store.upload_checkpoint(tmp_path / "a.ckpt")
    [sent] = tmp_path.glob("store/one/saved-*")
    assert sent.read_bytes() == (tmp_path / "a.ckpt").read_bytes()


def test_bytes_are_hashed_when_they_are_written_and_once_by_each_attempt(tmp_path: Path, monkeypatch) -> None:
    """Not by an upload, not again after a download, nor what the attempt does not resume from."""
    hashed = [0]
    monkeypatch.setattr(checkpoint.hashlib, "sha256", lambda: CountingHash(hashed))
    (tmp_path / "run").mkdir()
    store = CheckpointStore(str(tmp_path / "store"), "one")
    sizes = []
    for step, name in enumerate(checkpoint.SLOTS, 1):
        path = tmp_path / "run" / checkpoint.FOLDER / name
        path.parent.mkdir(exist_ok=True)
        new = Checkpoint(0, step, (ARITHMETIC,), 5.0, IDENTITY, path, b"")
        checkpoint.write_checkpoint(new, {"weight": torch.ones(MEBIBYTE)})
        sizes.append(path.stat().st_size)
        store.upload_checkpoint(path)
    assert take(hashed) == pytest.approx(sum(sizes), rel=0.01)
    checkpoint.verified.clear()  # another process has no part in it
    assert rewind_to_newest_checkpoint(tmp_path / "run", IDENTITY)
    assert checkpoint.find_newest_step(tmp_path / "run") == 2
    assert take(hashed) == pytest.approx(sizes[1], rel=0.01)
    checkpoint.verified.clear()
    (tmp_path / "pod").mkdir()
    store.download_newest_checkpoint(tmp_path / "pod" / checkpoint.FOLDER / checkpoint.SLOTS[0])
    assert rewind_to_newest_checkpoint(tmp_path / "pod", IDENTITY)
    assert take(hashed) == pytest.approx(sizes[1], rel=0.01)


class CountingHash:
    def __init__(self, hashed: list[int]) -> None:
        self.hashed, self.inner = hashed, hashlib.new("sha256")

    def update(self, data: bytes) -> None:
        self.hashed[0] += len(data)
        self.inner.update(data)

    def hexdigest(self) -> str:
        return self.inner.hexdigest()


def take(counter: list[int]) -> int:
    found, counter[0] = counter[0], 0
    return found


def test_the_newest_step_needs_no_metrics(tmp_path: Path) -> None:
    path = tmp_path / checkpoint.FOLDER / "a.ckpt"
    path.parent.mkdir()
    write(path, STATE, bytes(16 * MEBIBYTE))
    tracemalloc.start()
    assert checkpoint.find_newest_step(tmp_path) == 7
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MEBIBYTE
