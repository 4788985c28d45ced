"""Start-up: from the task's start to the first optimiser step, and the time of a cache hit.

The first is counted in a fresh process that has imported flytekit and the tasks, as ``pyflyte`` has, but not torch:
from the library's call to the record of the first optimiser step (log_interval 1, wandb offline as without a key,
default model on FashionMNIST). It stands against a fresh process that does a bare ``mp.spawn`` of two ranks that form
a gloo group: counted with the parent's import of torch, which mp.spawn needs, and without. The time of a cache hit is
that of the second of two identical ``pyflyte run``, against the second run of an empty cached workflow.
"""

import time
from pathlib import Path

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
    return result


def cache_hits(options: Options, result: Result) -> None:
    """Add the times of cache hits; the run that fills each cache comes first and is not counted."""
    script = options.folder / "empty.py"
    script.write_text(EMPTY)
    variables = environment({"FLYTE_DDP_RUNS": str(options.folder / "runs")}, options.folder / "home")
    ours = [PYFLYTE, "run", "workflows/training.py", "training_wf", "--hp", "config/smoke.json"]
    commands = {"empty": [PYFLYTE, "run", str(script), "empty_wf"], "ours": ours}
    for command in commands.values():
        run_command(command, variables)
    (metrics,) = Path(variables["FLYTE_DDP_RUNS"]).glob("*/metrics.jsonl")
    trained = metrics.stat().st_mtime_ns

    def hit(side: str) -> None:
        begin = time.perf_counter()
        run_command(commands[side], variables)
        result.add(f"cache hit: {side}", time.perf_counter() - begin, "s")

    interleaved(options, result, {"empty": lambda _: hit("empty"), "ours": lambda _: hit("ours")}, options.number(10))
    if metrics.stat().st_mtime_ns != trained:
        raise RuntimeError("the second identical run trained again")
    figure = result.ratio("cache hit: ours / empty", "cache hit: ours", "cache hit: empty")
    result.targets.append(Target("cache hit, times an empty cached workflow", figure, "x", at_most=2.0))
