"""Rounding: how another number of ranks, or another launcher, changes a result.

The same run in fp32 is repeated on 1, 2 and 4 spawned ranks of one thread each. The figures are the test accuracy
after each epoch, and the largest difference of a weight from the weight of one rank. Four ranks on digits with each
engine are compared with four spawned ranks.
"""

import importlib
from pathlib import Path
from typing import Any

from benchmarks.measuring import Options, Result, Target
from benchmarks.running import call, fashion_mnist
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.datasets import fetch
from flyte_ddp.run import run_training

RANKS, ENGINES = (1, 2, 4), ("elastic", "ray", "dask")
EPOCHS = {"digits": 5, "fashion_mnist": 3}


def measure(options: Options) -> Result:
    hp = {"model": "small_cnn", "precision": "fp32", "backend": "gloo"}
    result = Result(settings=hp)
    data = {"digits": fetch("digits", "", options.folder / "digits", progress="off")}
    data["fashion_mnist"] = fashion_mnist(options.folder)

    def train(dataset: str, ranks: int, engine: str = "spawn") -> Path:
        run, epochs = options.folder / f"{dataset}-{ranks}-{engine}", 1 if options.quick else EPOCHS[dataset]
        settings = {**hp, "dataset": dataset, "epochs": epochs, "num_ranks": ranks}
        call("benchmarks.rounding:train_once", settings, str(data[dataset]), str(run), engine)
        return run

    for dataset in data:
        runs = {ranks: train(dataset, ranks) for ranks in RANKS}
        for ranks, run in runs.items():
            evaluations = [each for each in read_records(run / "metrics.jsonl") if each["kind"] == "evaluation"]
            for epoch, each in enumerate(evaluations, 1):
                what = f"{dataset}, {ranks} ranks: test accuracy after epoch {epoch}"
                result.add(what, each["test_accuracy"], "%")
        for ranks in RANKS[1:]:
            what = f"{dataset}: largest difference of a weight, {ranks} ranks and 1, in millionths"
            result.targets.append(Target(what, difference(runs[1], runs[ranks]) * 1e6, ""))
    for engine in ENGINES:
        what = f"digits: largest difference of a weight, 4 ranks on {engine} and spawned"
        apart = difference(options.folder / "digits-4-spawn", train("digits", 4, engine))
        result.targets.append(Target(what, apart, "", at_most=0.0))
    return result


def difference(one: Path, other: Path) -> float:
    import torch

    first, second = (torch.load(run / "model.pt", weights_only=True) for run in (one, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def train_once(settings: dict[str, Any], data: str, run: str, engine: str) -> None:
    """Train in ranks that this engine starts on this machine."""
    hp = Hyperparameters(**settings)
    if engine == "ray":
        import ray

        ray.init(num_cpus=hp.num_ranks, include_dashboard=False)  # as many as are asked for, whatever the machine has
    room = "core.launch" if engine == "spawn" else "engines"
    launch = importlib.import_module(f"flyte_ddp.{room}.{engine}").launch
    quiet = Settings(progress="off", wandb_mode="disabled")
    run_training(hp, Path(data), Path(run), quiet, launch=launch, threads=1)
