"""A disk that is full of a run's checkpoints costs the older one, and not the run."""

import subprocess
import sys
from pathlib import Path

from mounts import ALONE, need_mounts

# A disk for two checkpoints of 1 MiB and a half.
RUN = """
import subprocess, sys
from pathlib import Path
import torch
from flyte_ddp.core.models.saving import save_model
from flyte_ddp.core.models.sidecar import Digests, LeavesInput, Sidecar
from flyte_ddp.core.runs.checkpoint import FOLDER, Identity, find_newest_checkpoint, write_and_make_room
from flyte_ddp.core.runs.checkpoint_writer import CheckpointWriter, Snapshot
from flyte_ddp.core.runs.run_folder import METRICS

folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2600k", "none", str(folder)], check=True)
(folder / METRICS).touch()
weights = {"weight": torch.ones(1 << 18)}
sidecar = Sidecar(model="m", classes=[], input=LeavesInput("leaf", {}), digests=Digests(weights=""))
writer = CheckpointWriter(folder, Identity({}), None)
for step in (1, 2, 3, 4):
    writer.hand_to_thread(Snapshot(0, step, 0, weights))
    writer.wait_until_written()
    found, unreadable = find_newest_checkpoint(folder / FOLDER)
    print(found.step, [*unreadable], len([*(folder / FOLDER).iterdir()]))
writer.close()
write_and_make_room(folder, lambda: save_model(folder, weights, sidecar))
print(sorted(path.name for path in folder.rglob("*.*t")))
try:
    write_and_make_room(folder, lambda: save_model(folder / "another", {"weight": torch.ones(1 << 20)}, sidecar))
except Exception as error:
    print(type(error).__name__, error)
print(find_newest_checkpoint(folder / FOLDER)[0].step)
"""


def test_the_older_checkpoint_makes_room(tmp_path: Path) -> None:
    need_mounts(tmp_path)
    ended = subprocess.run(
        [*ALONE, sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    *steps, files, error, newest = ended.stdout.splitlines()
    assert steps == ["1 [] 1", "2 [] 2", "3 [] 2", "4 [] 2"]
    assert files == "['b.ckpt', 'model.pt']"
    assert error.startswith("UserError")
    assert "No space left on device; free some space" in error
    assert newest == "4"
