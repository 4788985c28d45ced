"""The part of ``launchers`` on users' functions: the time to the first collective, and the cost of a step."""

import statistics
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import call, environment, run_command

ENGINES = ("spawn", "elastic", "ray", "dask")
SCRIPT, TORCHRUN = "script with run_ranks", "torchrun"
OURS, THEIRS = "DDP task", "Elastic task"
COMMANDS = {
    SCRIPT: [sys.executable, "-m"],
    TORCHRUN: [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", "-m"],
}


def measure_own_functions(options: Options, result: Result) -> None:
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
    """Return the name of a series of seconds to the first collective."""
    return f"own function: to the first collective, {side}" + (", from the call" if since == "call" else "")


def first(options: Options, result: Result, side: str, repeat: int) -> None:
    variables = environment({"FLYTE_DDP_RUNS": str(options.folder / f"own-{repeat}")})
    if side in COMMANDS:
        output, began = options.folder / "own.txt", time.time()
        run_command([*COMMANDS[side], "benchmarks.own_loop", str(output)], variables)
        result.add(label(side), float(output.read_text()) - began, "s")
        return
    found = call("benchmarks.own_loop:run_one", side, variables=variables)
    seconds = found["returned"] - found["called"]
    result.add(label(side), found["import"] + seconds, "s")
    result.add(label(side, "call"), seconds, "s")


def steps(options: Options, result: Result) -> None:
    """Add one run of the loop, as medians of the blocks."""
    found = call("benchmarks.own_loop:run_one", "steps", 2 if options.quick else 300, 100)["returned"]
    for side, values in found.items():
        result.add(f"own loop: {side}, of a step", 1e6 * statistics.median(values), "us")
    pairs = zip(found["with calls"], found["plain"], strict=True)
    result.add("own loop: cost of a step", statistics.median(calls / plain for calls, plain in pairs) - 1, "%")
