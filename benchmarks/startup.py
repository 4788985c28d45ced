"""Start-up: from the task's start to the first optimiser step, and the time of a cache hit.

The first time is counted in a fresh process that has imported flytekit and the tasks, like ``pyflyte``, but not
torch. The time begins with the library's call and ends with the record of the first optimiser step. The default model
trains on FashionMNIST with log_interval 1, and wandb is offline as without a key. The peer is a fresh process with a
bare ``mp.spawn`` of two ranks that form a gloo group. The peer's time is counted with and without the parent's import
of torch, which mp.spawn needs.

The time of a cache hit is that of the second of two identical ``pyflyte run`` commands. It is compared with the
second run of an empty cached workflow, and of a workflow with a dataclass and a dynamic task, like ours.

Four other commands are measured. They are ``package``, ``--help``, a pod's command up to the task's body, and
``make train``. The last is measured up to the record of the first optimiser step, with nothing cached. With
``--against REV``, these commands are also measured at another revision.
"""

import time
from functools import partial
from pathlib import Path

from benchmarks.commands import measure_commands
from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.preset import PYFLYTE
from benchmarks.running import call, environment, fashion_mnist, run_command, run_library

EMPTY = """from flytekit import task, workflow


@task(cache=True, cache_version="1")
def nothing() -> int:
    return 1


@workflow
def empty_wf() -> int:
    return nothing()
"""
# With what ours also has: a dataclass as input, and a dynamic task.
TYPED = """from dataclasses import dataclass

from flytekit import dynamic, task, workflow


@dataclass
class Options:
    name: str = "a"
    number: int = 1
    rate: float = 0.5
    on: bool = False


@task(cache=True, cache_version="1")
def nothing(options: Options) -> int:
    return options.number


@dynamic(cache=True, cache_version="1")
def choose(options: Options) -> int:
    return nothing(options=options)


@workflow
def typed_wf(options: Options = Options()) -> int:
    return choose(options=options)
"""
BARE, BARE_WITHOUT, OURS = (
    "bare: to the group",
    "bare, without importing torch: to the group",
    "ours: to the first step",
)


def measure(options: Options) -> Result:
    hp = {"dataset": "fashion_mnist", "batch_size": 256, "max_steps": 2, "num_ranks": 2, "log_interval": 1}
    result = Result(settings=hp)
    data = fashion_mnist(options.folder)

    def bare(repeat: int) -> None:
        folder = options.folder / f"bare-{repeat}"
        folder.mkdir()
        found = call("benchmarks.child:spawn_bare", 2, str(folder))
        result.add(BARE, found["whole"], "s")
        result.add(BARE_WITHOUT, found["without_import"], "s")

    def ours(repeat: int) -> None:
        run = run_library(hp, data, options.folder / f"run-{repeat}", wandb="offline")
        result.add(OURS, float(run.of("train")[0]["time"]) - run.began, "s")

    interleaved(options, result, {"bare": bare, "ours": ours}, options.number(10))
    result.targets += [
        Target("first step, times a bare mp.spawn", result.ratio("ours / bare", OURS, BARE), "x", at_most=1.5),
        Target(
            "first step, times a bare mp.spawn without importing torch in the parent",
            result.ratio("ours / bare without importing torch", OURS, BARE_WITHOUT),
            "x",
        ),
    ]
    cache_hits(options, result)
    measure_commands(options, result)
    return result


def cache_hits(options: Options, result: Result) -> None:
    """Add the times of cache hits. The run that fills each cache comes first and is not counted."""
    scripts = {"empty": EMPTY, "typed": TYPED}
    for name, text in scripts.items():
        (options.folder / f"{name}.py").write_text(text)
    variables = environment({"FLYTE_DDP_RUNS": str(options.folder / "runs")}, options.folder / "home")
    ours = [PYFLYTE, "run", "workflows/training.py", "training_wf", "--hp", "config/smoke.json"]
    commands = {name: [PYFLYTE, "run", str(options.folder / f"{name}.py"), f"{name}_wf"] for name in scripts}
    commands["ours"] = ours
    for command in commands.values():
        run_command(command, variables)
    (metrics,) = Path(variables["FLYTE_DDP_RUNS"]).glob("*/metrics.jsonl")
    trained = metrics.stat().st_mtime_ns

    def hit(side: str, _: int) -> None:
        begin = time.perf_counter()
        run_command(commands[side], variables)
        result.add(f"cache hit: {side}", time.perf_counter() - begin, "s")

    interleaved(options, result, {side: partial(hit, side) for side in commands}, options.number(10))
    if metrics.stat().st_mtime_ns != trained:
        raise RuntimeError("the second identical run trained again")
    for name, what, most in (("empty", "", 2.0), ("typed", " with a dataclass and a dynamic task", 1.25)):
        figure = result.ratio(f"cache hit: ours / {name}", "cache hit: ours", f"cache hit: {name}")
        result.targets.append(Target(f"cache hit, times an empty cached workflow{what}", figure, "x", at_most=most))
