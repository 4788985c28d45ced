"""Faults at random moments: checks that every final model is the same, bit for bit.

A run trains for some seconds on 2 ranks in a separate process, with augmentation, a moving average and selection of
the best epoch. A fault happens at a moment drawn from the run's whole duration, start-up included.

There are faults of ranks and of the run. A fault of ranks kills a rank or the rank server, or stops a rank by
SIGSTOP. The run then continues in place. A fault of the run kills the launcher, sends SIGTERM to a rank or the
launcher, or kills the launcher and damages the newest checkpoint. The same run is then started again.

The sequence of faults and moments follows from a seed. The state of the processes at these moments does not.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.measuring import Options, Result, Target
from benchmarks.rendering import table
from benchmarks.running import ROOT, descendants, environment, process_name
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.launch.supervise.fork_server import SERVER
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.run_folder import UNFINISHED, is_finished
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.datasets import fetch

FAULTS, ENDS = 50, 24  # faults of ranks, and of whole runs
SEED = 0
SIGNALS = {"SIGTERM": signal.SIGTERM, "stop": signal.SIGSTOP}  # by the first word of a kind; else SIGKILL
LIMIT_SECONDS = 120.0  # for a process to end, by itself or because of a fault
TIMEOUT_SECONDS = 3  # for which ranks wait for one that is stopped
OF_RANKS = ("kill a rank", "kill the ranks' server", "stop a rank")
OF_RUNS = (
    "SIGTERM to the launcher",
    "kill the launcher, damage the newest checkpoint",
    "SIGTERM to a rank",
    "kill the launcher",
)
HP = Hyperparameters(
    dataset="digits",
    epochs=60,
    batch_size=64,
    num_ranks=2,
    augment="crop",
    ema_decay=0.9,
    keep="best",
    precision="fp32",
)


@dataclass(frozen=True)
class Row:
    """A fault and its consequences."""

    kind: str
    moment: float  # seconds after the start
    seconds_to_end: float  # from the fault to the end of the last process
    resumed_after: int  # step; 0: from scratch
    left: int  # processes that outlived the launcher
    commands: int  # that the run took
    same_model: bool = False


def measure(options: Options) -> Result:
    numbers = {OF_RANKS: options.number(FAULTS, len(OF_RANKS)), OF_RUNS: options.number(ENDS, len(OF_RUNS))}
    kinds = [of[number % len(of)] for of, many in numbers.items() for number in range(many)]
    hp = replace(HP, epochs=20) if options.quick else HP
    data = fetch("digits", "", options.folder / "digits", progress="off")
    undisturbed = options.folder / "undisturbed"
    begin = time.perf_counter()
    if finish(start(hp, data, undisturbed)) != 0:
        raise RuntimeError((undisturbed / "output.txt").read_text())
    duration = time.perf_counter() - begin
    choice = random.Random(SEED)
    rows: list[Row] = []
    folder = options.folder / "run"
    while len(rows) < len(kinds):
        kind = kinds[len(rows)]
        moment = choice.uniform(0.0, duration)
        row = one_fault(kind, moment, choice.random(), partial(start, hp, data, folder), folder)
        if row is None:  # the run had ended before, as the first one may have been slower, or had no rank yet
            continue
        rows.append(replace(row, same_model=same_weights(folder, undisturbed)))
        print(f"    {len(rows)}/{len(kinds)} {described(rows[-1])}", flush=True)
    write_table(rows, options.output / "chaos.md")
    result = Result(settings={"seed": SEED, "hyperparameters": HP.to_json()})
    of_ranks, of_runs = ([row for row in rows if row.kind in of] for of in (OF_RANKS, OF_RUNS))
    for row in rows:
        result.add("step after which the run went on", row.resumed_after, "steps")
    for row in of_runs:
        result.add(f"{row.kind}: from the fault to the end of all processes", row.seconds_to_end, "s")
    same = sum(row.same_model for row in rows)
    result.targets = [
        Target("faults of ranks", len(of_ranks), "faults", at_least=None if options.quick else FAULTS),
        Target("second commands after them", sum(row.commands - 1 for row in of_ranks), "commands", at_most=0),
        Target("faults of runs", len(of_runs), "faults", at_least=None if options.quick else ENDS),
        Target("final models equal to the undisturbed one's", same / len(rows), "%", at_least=1.0),
        Target("processes left behind", sum(row.left for row in rows), "processes", at_most=0),
        Target(
            "longest time from a run's fault to its end", max(row.seconds_to_end for row in of_runs), "s", at_most=15
        ),
        Target("runs that went on from a checkpoint", sum(row.resumed_after > 0 for row in rows), "runs", 1),
    ]
    return result


def one_fault(
    kind: str, moment: float, which: float, begin: Callable[[], subprocess.Popen[bytes]], folder: Path
) -> Row | None:
    """Start and disturb a run, and start the run again if it has ended.

    Returns None if the run was over before the fault, or had no process to disturb.

    Args:
        kind: Name of the fault.
        moment: Seconds from the start to the fault.
        which: 0 to 1, chooses the rank, and the place of damage in the checkpoint.
        begin: Starts the run.
        folder: Folder of the run, removed first.
    """
    shutil.rmtree(folder, ignore_errors=True)
    process = begin()
    time.sleep(moment)
    family = [pid for pid in descendants(process.pid) if is_of_ranks(pid)]
    if process.poll() is not None:
        return None
    began = time.perf_counter()
    wanted = SERVER if kind.endswith("server") else r"rank \d+" if kind.endswith("rank") else ""
    victims = [pid for pid in family if re.fullmatch(wanted, process_name(pid))] if wanted else [process.pid]
    if not victims:  # there is no rank yet
        process.kill()
        process.wait()
        return None
    victim = victims[int(which * len(victims))]
    os.kill(victim, SIGNALS.get(kind.partition(" ")[0], signal.SIGKILL))
    exit_code = finish(process)
    while (left := [pid for pid in family if is_of_ranks(pid)]) and time.perf_counter() - began < LIMIT_SECONDS / 8:
        time.sleep(0.01)
    seconds = time.perf_counter() - began
    commands = 1
    if exit_code or not is_finished(folder):
        commands = 2
        if "damage" in kind:
            damage(folder, which)
        if finish(begin()) != 0:
            raise RuntimeError(f"the run after {kind!r} failed:\n{(folder / 'output.txt').read_text()[-3000:]}")
    records = read_records(folder / "metrics.jsonl")
    is_disturbed = commands == 2 or any(record["kind"] == "restart" for record in records)
    resumed = [record["resumed_after_step"] for record in records if record["kind"] == "start"][-1]
    return Row(kind, moment, seconds, resumed, len(left), commands) if is_disturbed else None


def same_weights(one: Path, other: Path) -> bool:
    """Return whether the models of two runs are equal, bit for bit."""
    import torch

    weights, expected = (torch.load(folder / "model.pt", weights_only=True) for folder in (one, other))
    return weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)


def start(hp: Hyperparameters, data: Path, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    order = {"hp": hp.to_dict(), "data": str(data), "folder": str(folder), "wandb": "disabled"}
    child = [sys.executable, "-m", "benchmarks.child", "benchmarks.child:train_library"]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [*child, str(folder.with_suffix(".began")), json.dumps([order])],
            cwd=ROOT,
            env=environment({"FLYTE_DDP_CHECKPOINT_SECONDS": "0.5", "FLYTE_DDP_TIMEOUT": str(TIMEOUT_SECONDS)}),
            stdout=output,
            stderr=output,
        )


def finish(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process, and return the exit code. After a time limit the process is killed."""
    try:
        return process.wait(LIMIT_SECONDS)
    finally:
        process.kill()


def is_of_ranks(pid: int) -> bool:
    """Return whether a living process is a rank, or the server from which ranks are forked.

    A process that has no name yet counts as well.
    """
    try:
        return bool(process_name(pid)) and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def damage(folder: Path, where: float) -> None:
    """Change a byte of the newest checkpoint, or cut off the file at this byte.

    Without a second checkpoint nothing is damaged, because the run would rightly be rejected.
    """
    checkpoints = folder / UNFINISHED / checkpoint.FOLDER
    newest = checkpoint.find_newest_checkpoint(checkpoints)[0]
    if newest is None or not all((checkpoints / name).exists() for name in checkpoint.SLOTS):
        return
    content = bytearray(newest.path.read_bytes())
    position = int(where * len(content))
    content[position] ^= 1
    newest.path.write_bytes(content if position % 2 else content[:position])


def described(row: Row) -> str:
    how = "in place" if row.commands == 1 else "by another command"
    went_on = (
        f"resumed {how} after step {row.resumed_after:,}" if row.resumed_after else f"restarted {how} from scratch"
    )
    return f"{row.kind} after {row.moment:.1f} s: {went_on}, {'same model' if row.same_model else 'ANOTHER MODEL'}"


def write_table(rows: list[Row], path: Path) -> None:
    cells = []
    for number, row in enumerate(rows, 1):
        times, same = [f"{row.moment:.2f} s", f"{row.seconds_to_end:.2f} s"], "yes" if row.same_model else "**no**"
        cells.append([str(number), row.kind, *times, f"{row.resumed_after:,}", str(row.commands), same])
    head = [
        "",
        "fault",
        "after",
        "all processes gone after",
        "went on after step",
        "commands",
        "same model, bit for bit",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# Faults\n\nMade by `make chaos`; see chaos.json for the machine.\n\n{table(head, cells)}")
