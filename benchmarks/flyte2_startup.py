"""Start-up with Flyte 2: the time of a cache hit, and from the prompt to the first optimiser step.

The time of a cache hit is that of the second of two identical ``flyte run --local`` commands. It is compared with the
second run of an empty cached task with a dataclass. The time to the first step is compared with that of ``pyflyte run``
with the same hyperparameters. It ends with the record of the step, with nothing cached.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.preset import PYFLYTE
from benchmarks.running import ROOT, environment, run_command
from flyte_ddp.core.text.json_lines import read_records

FLYTE = str(Path(sys.executable).with_name("flyte"))
EMPTY = """from dataclasses import dataclass

import flyte

env = flyte.TaskEnvironment("empty", cache=flyte.Cache("auto"))


@dataclass
class Options:
    name: str = "a"
    number: int = 1
    rate: float = 0.5
    on: bool = False


@env.task
async def nothing(options: Options = Options()) -> int:
    return options.number
"""
HP = json.dumps({"num_ranks": 2, "backend": "gloo", "log_interval": 1, "max_steps": 2})
OURS = [FLYTE, "run", "--local", "flyte2/training.py", "training", "--hp", HP]
FLYTE_1 = [PYFLYTE, "run", "workflows/training.py", "training_wf", "--hp", HP]


def measure(options: Options) -> Result:
    result = Result(settings={"hp": HP})
    first_steps(options, result)
    cache_hits(options, result)
    return result


def first_steps(options: Options, result: Result) -> None:
    """Add the times from the prompt to the first step, each with an empty home folder."""

    def start(side: str, repeat: int) -> None:
        home = options.folder / f"{side}-{repeat}"
        variables = environment({"FLYTE_DDP_RUNS": str(home / "runs"), "FLYTE_DISABLE_SENTRY": "true"}, home)
        began = time.time()
        run_command(commands[side], variables)
        [metrics] = (home / "runs").glob("*/metrics.jsonl")
        ended = next(record["time"] for record in read_records(metrics) if record["kind"] == "train")
        result.add(f"to the first step: {side}", ended - began, "s")

    commands = {"flyte": OURS, "pyflyte": FLYTE_1}
    interleaved(options, result, {side: partial(start, side) for side in commands}, options.number(10))
    ours, flyte_1 = (f"to the first step: {side}" for side in commands)
    figure = result.ratio(f"{ours} / pyflyte", ours, flyte_1)
    result.targets.append(Target("first step after the prompt, times that with pyflyte", figure, "x", at_most=1.0))


def cache_hits(options: Options, result: Result) -> None:
    """Add the times of cache hits. The run that fills each cache comes first and is not counted."""
    (options.folder / "empty.py").write_text(EMPTY)
    home = options.folder / "home"
    variables = environment({"FLYTE_DDP_RUNS": str(home / "runs"), "FLYTE_DISABLE_SENTRY": "true"}, home)
    sides = {"empty": ([FLYTE, "run", "--local", "empty.py", "nothing"], options.folder), "ours": (OURS, ROOT)}
    for command, folder in sides.values():
        run_command(command, variables, folder=folder)

    def hit(side: str, _: int) -> None:
        command, folder = sides[side]
        began = time.perf_counter()
        run_command(command, variables, folder=folder)
        result.add(f"cache hit: {side}", time.perf_counter() - began, "s")

    interleaved(options, result, {side: partial(hit, side) for side in sides}, options.number(20))
    figure = result.ratio("cache hit: ours / empty", "cache hit: ours", "cache hit: empty")
    result.targets.append(Target("cache hit, times an empty cached task with a dataclass", figure, "x", at_most=1.3))
