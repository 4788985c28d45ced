"""Start each run of a benchmark in processes of its own, with a known environment."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.datasets import ImageArrays, fetch, open_arrays
from flyte_ddp.datasets.prepared_folder import StoredSet, write_prepared_set
from flyte_ddp.process import list_living_trees

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 900.0  # for one run; a hang ends as a failure of its benchmark
POLL_SECONDS = 0.02  # between two readings of memory
EXITING = 4  # PF_EXITING, in a process's flags: none of its code runs any more


@dataclass(frozen=True)
class Run:
    """One run of the library."""

    began: float  # Unix time just before the library was called, with flytekit and the tasks imported but not torch
    records: list[dict[str, Any]]  # of metrics.jsonl

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    def epoch_seconds(self) -> list[float]:
        """Training and evaluation of each epoch; start-up and the end's writing are left out."""
        times = [self.of("start")[0]["time"], *(record["time"] for record in self.of("evaluation"))]
        return [after - before for before, after in itertools.pairwise(times)]

    def seconds_to_first_step(self) -> float:
        """From the library's call to the first record of training."""
        return float(self.of("train")[0]["time"]) - self.began


def environment(changes: Mapping[str, str], home: Path | None = None) -> dict[str, str]:
    """This process's environment without settings of ours, of wandb and of OpenMP, and with another HOME."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FLYTE_", "WANDB_", "OMP_"))}
    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
        kept["HOME"] = str(home)
    return kept | dict(changes)


def descendants(pid: int) -> list[int]:
    """The living children of a process, theirs and so on."""
    return list_living_trees([pid])[1:]


def process_name(pid: int) -> str:
    """The name of a living process, such as ``rank 0``; empty without one, or when it runs no more of its code."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return ""
    fields = after.split()
    return before.partition("(")[2] if fields[0] != "Z" and not int(fields[6]) & EXITING else ""


def memory_of(process: subprocess.Popen[str], names: str) -> Iterator[list[tuple[int, int]]]:
    """:func:`pss` of those of its descendants whose whole name matches, read again and again until the process ends."""
    while True:
        found = [pss(pid) for pid in descendants(process.pid) if re.fullmatch(names, process_name(pid))]
        yield [reading for reading in found if reading is not None]
        try:
            process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return


def pss(pid: int) -> tuple[int, int] | None:
    """PSS of a process and its anonymous part, in bytes; None of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    sizes = {name: 1024 * int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    return sizes["Pss"], sizes["Pss_Anon"]


def most_memory() -> int:
    """The most that this process has had at a time, in bytes.

    Not getrusage's figure, which the kernel hands on to a child: that of a benchmark that has run long is larger.
    """
    [kilobytes] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def run_python(module: str, *arguments: str, limit: float = LIMIT_SECONDS) -> None:
    """Runs ``python -m module`` from the repository's root.

    Raises:
        RuntimeError: it failed; with the end of what it printed.

    """
    run_command([sys.executable, "-m", module, *arguments], environment({}), limit)


def run_command(command: list[str], variables: Mapping[str, str], limit: float = LIMIT_SECONDS) -> None:
    """Runs a command from the repository's root and waits for it, up to ``limit`` seconds.

    Raises:
        RuntimeError: it failed; with the end of what it printed.

    """
    done = subprocess.run(
        command, cwd=ROOT, env=dict(variables), capture_output=True, text=True, timeout=limit, check=False
    )
    if done.returncode:
        how = f"exit code {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
        raise RuntimeError(f"{how} of {' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")


def run_library(
    hp: Mapping[str, Any],
    data: Path,
    folder: Path,
    *,
    wandb: str = "disabled",
    forks: bool = True,
    variables: Mapping[str, str] | None = None,
    watch: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Run:
    """Trains once, in a fresh process that has imported what ``pyflyte`` has; the folder is removed afterwards.

    Args:
        forks: whether ranks are forks of a server, where that is possible.
        variables: more of the environment.
        watch: called with the running process; returns when that has ended.

    Raises:
        RuntimeError: training failed.

    """
    shutil.rmtree(folder, ignore_errors=True)  # of a try that failed
    folder.mkdir(parents=True)
    request = {"hp": dict(hp), "data": str(data), "folder": str(folder), "wandb": wandb, "forks": forks}
    command = [sys.executable, "-m", "benchmarks.library_run", json.dumps(request)]
    log = folder / "output.txt"
    given = environment(variables or {})
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=given, stdout=file, stderr=file, text=True)
        try:
            if watch is not None:
                watch(process)
            process.wait(LIMIT_SECONDS)
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"training failed with exit code {process.returncode}\n{log.read_text()[-3000:]}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run = Run(float((folder / "began.txt").read_text()), records)
    shutil.rmtree(folder)
    return run


def fashion_mnist(folder: Path, samples: int = 0) -> Path:
    """The prepared FashionMNIST; with ``samples``, its training images repeated or cut to that number."""
    prepared = fetch("fashion_mnist", "", folder / "fashion_mnist", progress="off")
    if not samples:
        return prepared
    arrays = open_arrays(prepared)
    positions = np.arange(samples) % len(arrays.train_labels)
    return write_data(
        folder / f"fashion_mnist_{samples}",
        ImageArrays(
            name=f"fashion_mnist_{samples}",
            train_images=arrays.train_images[positions],
            train_labels=arrays.train_labels[positions],
            test_images=arrays.test_images,
            test_labels=arrays.test_labels,
            classes=arrays.classes,
        ),
    )


def write_data(folder: Path, arrays: StoredSet) -> Path:
    """Writes a prepared data set by hand."""
    folder.mkdir(parents=True)
    write_prepared_set(arrays, folder, {"source": "made for a benchmark"})
    return folder
