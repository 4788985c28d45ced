"""The part of ``launchers`` that measures functions of users: to the first collective, and what a step costs."""

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import environment, run_command

ENGINES = ("spawn", "elastic", "ray", "dask")
SCRIPT, TORCHRUN = "script with run_ranks", "torchrun"
OURS, THEIRS = "DDP task", "Elastic task"
COMMANDS = {
    SCRIPT: [sys.executable, "-m"],
    TORCHRUN: [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", "-m"],
}


def measure_own_functions(options: Options, result: Result) -> None:
    """Adds series and targets."""
    sides = [TORCHRUN, SCRIPT, THEIRS, OURS, *ENGINES]
    interleaved(options, result, {side: partial(first, options, result, side) for side in sides}, options.number(7))
    interleaved(options, result, {"steps": lambda _: steps(options, result)}, options.number(3))
    for side in (SCRIPT, OURS, *ENGINES):
        for peer in (TORCHRUN,) if side == SCRIPT else (TORCHRUN, THEIRS):
            figure = result.ratio(f"own function: {side} / {peer}", label(side), label(peer))
            result.targets.append(Target(f"{side}: to the first collective, times {peer}", figure, "x", at_most=1.2))
    figure = result.ratio(f"own function: {OURS} / {THEIRS}, from the call", label(OURS, "call"), label(THEIRS, "call"))
    result.targets.append(Target(f"the same, {OURS}, from the call, times {THEIRS}", figure, "x"))
    cost, alone = result.median("own loop: cost of a step"), result.median("own loop: calls alone, of a step")
    result.targets += [
        Target("own loop: due() and record(), of a step's time", cost, "%", at_most=0.01),
        Target("own loop: due() and record() alone, a step", alone, "us"),
    ]


def label(side: str, since: str = "import") -> str:
    """The name of a series of seconds to the first collective."""
    return f"own function: to the first collective, {side}" + (", from the call" if since == "call" else "")


def first(options: Options, result: Result, side: str, repeat: int) -> None:
    """Adds one measurement of the time to the first collective."""
    output = options.folder / "own.json"
    variables = environment({"FLYTE_DDP_RUNS": str(options.folder / f"own-{repeat}")})
    if side in COMMANDS:
        began = time.time()
        run_command([*COMMANDS[side], "benchmarks.own_loop", str(output)], variables)
        result.add(label(side), float(output.read_text()) - began, "s")
        return
    found = run_own(side, output, variables)
    seconds = found["returned"] - found["called"]
    result.add(label(side), found["import"] + seconds, "s")
    result.add(label(side, "call"), seconds, "s")


def steps(options: Options, result: Result) -> None:
    """Adds one run of the loop: medians of its blocks."""
    blocks, number = ("2", "100") if options.quick else ("300", "100")
    found = run_own("steps", options.folder / "own.json", environment({}), blocks, number)["returned"]
    for side, values in found.items():
        result.add(f"own loop: {side}, of a step", 1e6 * statistics.median(values), "us")
    pairs = zip(found["with calls"], found["plain"], strict=True)
    result.add("own loop: cost of a step", statistics.median(calls / plain for calls, plain in pairs) - 1, "%")


def run_own(side: str, output: Path, variables: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Runs own_run.py; what it found."""
    run_command([sys.executable, "-m", "benchmarks.own_run", side, str(output), *arguments], variables)
    found: dict[str, Any] = json.loads(output.read_text())
    return found
