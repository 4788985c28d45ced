"""Launchers: time to the first step, training rate, time to notice a killed rank, and the launcher's memory.

Each run is a fresh process that has imported flytekit and the tasks, but not torch. For Ray and Dask a cluster is
running on this machine. Its workers have run nothing, because Flyte starts a new cluster for each run.

The time to the first step begins when hardware is detected, and for ours ends at the record of the step. It is
compared with the engine's own launch of as many ranks. These ranks import torch, form a gloo group, take a step of a
network like the tutorial's under DDP, and do nothing else. With spawn and Elastic, this includes the import of torch
in the launcher. In each rank the time also includes the calling script, with flytekit imported, as if a workflow's
task calls mp.spawn. For Ray the ranks are two tasks.

The training rate is the rate at a run's end, compared with spawned ranks. A rank is killed in the middle of a run,
and the time until the launcher raises is measured. Memory is the maximum of the launching process, in our runs and in
bare runs.

A user-defined function joins a gloo group of 2 ranks and adds a number up. In a script, run_ranks and torchrun run
the function, and the time is counted from the command to the end of this collective. Another process has imported
flytekit, but not torch. There, run_ranks runs the function on each launcher (on running clusters). Tasks with DDP and
with kfpytorch's Elastic run the function too. There the time begins with the import of run_ranks or of the task's
module, because the task with Elastic imports torch.

A small network's loop calls due() in each step and record() every 50 steps. Blocks of such steps alternate with
blocks of plain steps.
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
