"""Start each run of a benchmark in processes of its own, with a known environment."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyte_ddp.core.machine.process import list_living_trees
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.prepared_set import PreparedSet, write_prepared_set

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 900.0  # for one run; a hang ends as a failure of its benchmark
EXITING = 4  # PF_EXITING, in a process's flags: none of its code runs any more


@dataclass(frozen=True)
class Run:
    began: float  # Unix time just before the library was called, with flytekit and the tasks imported but not torch
    records: list[dict[str, Any]]  # of metrics.jsonl

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def epoch_seconds(self) -> list[float]:
        """Return the seconds of each epoch with its evaluation, without start-up and the final writes."""
        times = [self.of("start")[0]["time"], *(record["time"] for record in self.of("evaluation"))]
        return [after - before for before, after in itertools.pairwise(times)]


def environment(changes: Mapping[str, str], home: Path | None = None) -> dict[str, str]:
    """Return this process's environment without settings of this project, wandb and OpenMP, and with another HOME."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FLYTE_", "WANDB_", "OMP_"))}
    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
        kept["HOME"] = str(home)
    return kept | dict(changes)


def descendants(pid: int) -> list[int]:
    """Return the living children of a process, including indirect children."""
    return list_living_trees([pid])[1:]


def process_name(pid: int) -> str:
    """Return the name of a living process, such as ``rank 0``, or "" if the process has ended or is exiting."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return ""
    fields = after.split()
    return before.partition("(")[2] if fields[0] != "Z" and not int(fields[6]) & EXITING else ""


def most_memory() -> int:
    """Return the peak memory of this process in bytes.

    The figure of getrusage is not used, because the kernel passes the peak of a long-running benchmark on to a child.
    """
    [kilobytes] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def run_command(
    command: list[str], variables: Mapping[str, str], limit: float = LIMIT_SECONDS, folder: Path = ROOT
) -> None:
    """Run a command from a folder, by default the repository's root, for up to ``limit`` seconds.

    Raises:
        RuntimeError: The command failed. The error has the end of the output.
    """
    done = subprocess.run(
        command, cwd=folder, env=dict(variables), capture_output=True, text=True, timeout=limit, check=False
    )
    if done.returncode:
        how = f"exit code {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
        raise RuntimeError(f"{how} of {' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")


def call(name: str, *arguments: Any, limit: float = LIMIT_SECONDS, variables: Mapping[str, str] | None = None) -> Any:
    """Return the result of the function ``module:name`` in a separate process. Arguments and result are JSON.

    Raises:
        RuntimeError: The function failed. The error has the end of the output.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "returned.json")
        child = [sys.executable, "-m", "benchmarks.child", name, str(output), json.dumps(arguments)]
        run_command(child, environment(variables or {}), limit)
        return json.loads(output.read_text())


def run_library(
    hp: Mapping[str, Any],
    data: Path,
    folder: Path,
    *,
    wandb: str = "disabled",
    variables: Mapping[str, str] | None = None,
) -> Run:
    """Train once in a fresh process with the imports of ``pyflyte``, and remove the folder."""
    shutil.rmtree(folder, ignore_errors=True)  # of a try that failed
    order = {"hp": dict(hp), "data": str(data), "folder": str(folder), "wandb": wandb}
    began = call("benchmarks.child:train_library", order, variables=variables)
    run = Run(began, read_records(folder / "metrics.jsonl"))
    shutil.rmtree(folder)
    return run


def extract_revision(revision: str, folder: Path, *parts: str) -> None:
    """Make a folder with parts of this repository at a revision.

    Raises:
        SystemExit: git has no such parts at the revision.
    """
    folder.mkdir()
    archive = folder / "revision.tar"
    command = ["git", "archive", f"--output={archive}", revision, *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"--against {revision}: {done.stderr.strip()}; name a commit with {', '.join(parts)}")
    shutil.unpack_archive(archive, folder, filter="data")
    archive.unlink()


def fashion_mnist(folder: Path) -> Path:
    return fetch("fashion_mnist", "", folder / "fashion_mnist", progress="off")


def write_data(folder: Path, arrays: PreparedSet) -> Path:
    folder.mkdir(parents=True)
    write_prepared_set(arrays, folder, {"source": "made for a benchmark"})
    return folder
