"""The cost of fault tolerance: checkpoints and all other guards of a run, and wandb in a separate process.

First, epochs with and without guards alternate in runs on FashionMNIST (alternating.py). An epoch without guards has
no checkpoint, no check of each step's loss, no copy of the buffers and no lock. The models are the tutorial's network
and a network with BatchNorm. On a shared machine such pairs vary by more than the expected difference. Therefore rank
0's own account stands beside their median. The account is the processor time of all guards, including the thread that
writes checkpoints, as a share of the guarded epochs.

Second, whole runs of the tutorial's network with a wandb server that accepts connections and never answers are
compared with runs without wandb. The figure is the mean of all epochs except the first.

Third, a save of a state of 1 GB is compared with a clone of the same tensors (save_sides.py). The figure is the time
for which a save holds the rank.
"""

import functools
import json
import socket
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import call, fashion_mnist, run_library

LAYERS = 80  # of 12 MiB each with Adam's tensors
ACCOUNT = "FLYTE_DDP_COST_ACCOUNT"  # as in alternating.py, which imports torch


def measure(options: Options) -> Result:
    hp: dict[str, Any] = {
        "dataset": "fashion_mnist",
        "batch_size": 256,
        "num_ranks": 2,
        "backend": "gloo",
        "precision": "fp32",
        "channels_last": "on",
    }
    result = Result(settings={key: str(value) for key, value in hp.items()})
    data = fashion_mnist(options.folder)
    pairs = options.number(15, quick=1)
    for model in ("tutorial", "with_batch_norm"):
        values = {**hp, "model": f"benchmarks.alternating:{model}", "epochs": 2 * pairs + 1}
        account = options.folder / f"{model}.json"
        variables = {"FLYTE_DDP_CHECKPOINT_SECONDS": "3600", ACCOUNT: str(account)}  # checkpoints after epochs only
        sides = f"{model}: guarded epochs", f"{model}: others"

        def run(_: int, sides: tuple[str, str] = sides, **order: Any) -> None:
            seconds = run_library(**order).epoch_seconds()[1:]  # the first warms up
            for side, of_side in zip(sides, (seconds[::2], seconds[1::2]), strict=True):
                for value in of_side:
                    result.add(side, value, "s")

        order: dict[str, Any] = {"hp": quick(values, options), "folder": options.folder / model, "variables": variables}
        interleaved(options, result, {model: functools.partial(run, data=data, **order)}, 1)
        ratio = result.ratio(f"{model}: guarded / others", *sides)
        result.targets.append(Target(f"{model}: added to an epoch by all that guards it", ratio - 1, "%", at_most=0.03))
        spent = json.loads(account.read_text())
        for what, value in spent.items():
            result.add(f"{model}: processor time of guards, {what}", value / pairs, "s")
        share = sum(spent.values()) / sum(result.values(sides[0]))
        result.targets.append(Target(f"{model}: the same by rank 0's account", share, "%", at_most=0.03))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        server = {"WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}", "WANDB_API_KEY": "0" * 40}
        kinds = {"without wandb": {}, "a silent wandb server": {**server, "FLYTE_DDP_WANDB_TIMEOUT": "1"}}

        def side(name: str) -> Callable[[int], None]:
            def run(repeat: int) -> None:
                values = quick({**hp, "model": "tutorial", "epochs": 7}, options)
                folder = options.folder / f"{name.replace(' ', '-')}-{repeat}"
                mode = "online" if kinds[name] else "disabled"
                epochs = run_library(values, data, folder, wandb=mode, variables=kinds[name]).epoch_seconds()
                result.add(f"{name}: epochs but the first", statistics.fmean(epochs[1:]), "s")

            return run

        interleaved(options, result, {name: side(name) for name in kinds}, options.number(5))
    names = (f"{name}: epochs but the first" for name in reversed(kinds))
    ratio = result.ratio("a silent wandb server / without", *names)
    result.targets.append(Target("added to an epoch by a silent wandb server", ratio - 1, "%", at_most=0.05))
    measure_saves(options, result)
    return result


def measure_saves(options: Options, result: Result) -> None:
    layers, repeats = (2 if options.quick else LAYERS), options.number(15)
    for kind in ("training", "function"):
        sides = f"{kind}: a save of 1 GB", f"{kind}: a clone of its tensors"

        def alternate(_: int, kind: str = kind, sides: tuple[str, str] = sides) -> None:
            found = call(f"benchmarks.save_sides:time_{kind}", layers, repeats)
            for side, seconds in zip(sides, found.values(), strict=True):
                for value in seconds:
                    result.add(side, value, "s")

        interleaved(options, result, {f"{kind}: saves": alternate}, 1)
        ratio = result.ratio(f"{kind}: a save / a clone", *sides)
        result.targets.append(Target(f"{kind}: a save of 1 GB, times a clone of its tensors", ratio, "x", at_most=1.1))


def quick(hp: dict[str, Any], options: Options) -> dict[str, Any]:
    """Use few images, for a trial run that only tests the benchmark. At least some epochs are needed."""
    return {**hp, "validation_fraction": 0.98} if options.quick else hp
