"""Launchers: the time to the first step, training's rate, the time to notice a killed rank, the launcher's memory.

Each run is a fresh process that has imported flytekit and the tasks, but not torch; Ray and Dask have a cluster of this
machine that stands, with workers that have run nothing, as Flyte sets one up for each run. The first step counts from
the question what hardware there is, in ours to its record; against it stands the engine's own launch of as many ranks
that import torch, form a gloo group and take a step of a network like the tutorial's under DDP, and nothing else. With
spawn and Elastic that includes torch in the launcher, and in each rank the calling script, which has imported flytekit,
as where a task of a workflow's module calls mp.spawn. For Ray these are two tasks. Training's rate is that of a run's
end, against spawned ranks. A rank is killed in the middle of a run, and the time counts until the launcher raises.
Memory is the most that the launching process has had, in runs of ours and in bare ones.

A user's function that joins a gloo group of 2 ranks and adds a number up runs in a script by run_ranks and by torchrun,
counted from the command to the end of that collective; in a process that has imported flytekit, but not torch, by
run_ranks on each launcher (on clusters that stand), as a task with DDP, and as one with kfpytorch's Elastic, counted
from the import of run_ranks or of the module with the task, because that of Elastic imports torch. A small network's
loop calls due() in each step and record() every 50 steps, in blocks of steps in turn with plain ones.
"""

import json
import shutil
import sys
from functools import partial

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.own_functions import ENGINES, measure_own_functions
from benchmarks.running import environment, fashion_mnist, run_command


def measure(options: Options) -> Result:
    hp = {
        "dataset": "fashion_mnist",
        "model": "benchmarks.launcher_ranks:tutorial",
        "batch_size": 256,
        "num_ranks": 2,
        "backend": "gloo",
        "precision": "fp32",
        "strategy": "ddp",
        "validation_fraction": 0.0,
        "eval_interval": 1000,
        "epochs": 1000,
        "max_steps": 20 if options.quick else 1000,
    }
    result = Result(settings=hp)
    data = fashion_mnist(options.folder)

    def run(engine: str, what: str, repeat: int) -> None:
        folder = options.folder / f"{engine}-{what}-{repeat}"
        shutil.rmtree(folder, ignore_errors=True)  # of a try that failed
        order = {"engine": engine, "what": what, "hp": hp, "data": str(data), "folder": str(folder)}
        run_command([sys.executable, "-m", "benchmarks.launcher_run", json.dumps(order)], environment({}))
        found = json.loads((folder / "found.json").read_text())
        if what == "train":
            result.add(f"{engine}: rate", found["rate"], "samples/s")
        elif what == "kill":
            result.add(f"{engine}: to notice a killed rank", found["seconds"], "s")
        else:
            side = "bare" if what == "bare" else "ours"
            result.add(f"{engine}: to the first step, {side}", found["seconds"], "s")
            result.add(f"{engine}: memory of the launcher, {side}", found["memory"], "MiB")

    for whats, repeats in ((("bare", "first step"), 7), (("train",), 5), (("kill",), 3)):
        sides = {f"{engine}: {what}": partial(run, engine, what) for engine in ENGINES for what in whats}
        interleaved(options, result, sides, options.number(repeats))
    for engine in ENGINES:
        step = f"{engine}: to the first step"
        ratio = result.ratio(f"{step}, ours / bare", f"{step}, ours", f"{step}, bare")
        result.targets.append(Target(f"{step}, times a bare launch", ratio, "x", at_most=1.2))
    for engine in ENGINES[1:]:
        ratio = result.ratio(f"{engine} / spawn: rate", f"{engine}: rate", "spawn: rate")
        result.targets.append(Target(f"{engine}: rate, of spawned ranks'", ratio, "%", at_least=0.97))
    for engine in ENGINES:
        label = f"{engine}: to notice a killed rank"
        result.targets.append(Target(label, result.median(label), "s"))
        label = f"{engine}: memory of the launcher"
        result.targets.append(Target(label, result.median(f"{label}, ours"), "MiB"))
    measure_own_functions(options, result)
    return result
