"""Time and processor time of commands, of this checkout and another revision side by side."""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.preset import PYFLYTE
from benchmarks.running import ROOT, environment, extract_revision, run_command
from flyte_ddp.core.text.json_lines import read_records

PARTS = ("flyte_ddp", "flytekitplugins", "tasks", "workflows", "config")  # of the revision
RUN = [PYFLYTE, "run", "workflows/training.py", "training_wf"]
PACKAGE = [PYFLYTE, "--pkgs", "workflows", "package", "--image", "none:1", "--fast", "--force", "--output"]
HP = {"num_ranks": 2, "backend": "gloo", "log_interval": 1, "max_steps": 2}  # make train's, for two steps
TRAIN = "make train, to the first step"
MOST = {"package": 0.6, "--help": 0.6, "loading in a pod": 0.6, TRAIN: 0.75}  # times the revision's


def measure_commands(options: Options, result: Result) -> None:
    """Add the commands' times, without the first run of each. If a revision is given, add ratios and targets."""
    sides = {"ours": ROOT}
    if options.against:
        sides["before"] = options.folder / "revision"
        extract_revision(options.against, sides["before"], *PARTS)
    for side, checkout in sides.items():
        folder = options.folder / f"commands-{side}"
        folder.mkdir()
        variables = environment({"PYTHONPATH": f"{checkout}{os.pathsep}{ROOT}"})
        run_command(child(folder, "write_pod_inputs"), variables, folder=checkout)
        for what in MOST:
            run_once(what, checkout, folder, variables)

    def measure(side: str, what: str, _: int) -> None:
        folder = options.folder / f"commands-{side}"
        variables = environment({"PYTHONPATH": f"{sides[side]}{os.pathsep}{ROOT}"})
        seconds, cpu = run_once(what, sides[side], folder, variables)
        result.add(f"{what}: {side}", seconds, "s")
        result.add(f"{what}, processor time: {side}", cpu, "s")

    pairs = {f"{what}: {side}": partial(measure, side, what) for what in MOST for side in sides}
    interleaved(options, result, pairs, options.number(10))
    for what, most in MOST.items() if options.against else ():
        label = what if what == TRAIN else f"{what}, processor time"
        figure = result.ratio(f"{label}: ours / before", f"{label}: ours", f"{label}: before")
        result.targets.append(Target(f"{label}, times that at {options.against}", figure, "x", at_most=most))


def run_once(what: str, checkout: Path, folder: Path, variables: dict[str, str]) -> tuple[float, float]:
    """Run a command, and return seconds and processor seconds.

    The seconds of TRAIN end with the record of the first step.
    """
    home = folder / f"home-{time.monotonic_ns()}"  # nothing is cached there
    home.mkdir()
    variables = {**variables, "HOME": str(home), "FLYTE_DDP_RUNS": str(home / "runs")}
    command = {
        "package": [*PACKAGE, str(folder / "package.tgz")],
        "--help": [*RUN, "--help"],
        "loading in a pod": child(folder, "load_in_pod"),
        TRAIN: [*RUN, "--hp", json.dumps(HP)],
    }[what]
    before, began = getrusage(RUSAGE_CHILDREN), time.time()
    run_command(command, variables, folder=checkout)
    ended, after = time.time(), getrusage(RUSAGE_CHILDREN)
    if what == TRAIN:
        [metrics] = (home / "runs").glob("*/metrics.jsonl")
        ended = next(record["time"] for record in read_records(metrics) if record["kind"] == "train")
    return ended - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def child(folder: Path, function: str) -> list[str]:
    """Return the command that calls a function of child.py with the path of a pod's inputs."""
    arguments = [str(folder / "returned.json"), json.dumps([str(folder / "inputs.pb")])]
    return [sys.executable, "-m", "benchmarks.child", f"benchmarks.child:{function}", *arguments]
