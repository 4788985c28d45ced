"""Seconds for an epoch (training and evaluation): ours against a plain DDP loop and Lightning's ddp_spawn.

All sides train the tutorial's network on FashionMNIST with global batches of 256 on 2 CPU ranks of 1 thread. The
hyperparameters are the same, and wandb and progress are off. Each measurement is a fresh run of two epochs with
another seed. Ratios and targets are for the second epoch. The first epoch (with warm-up) is reported too. Both
exclude start-up and preparation of data.

The plain loop evaluates 1,000 samples at a time, as in the tutorial. Ours and Lightning evaluate 250, our default,
and so does a second plain loop.
"""

import statistics
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import call, fashion_mnist, run_library
from flyte_ddp.core.machine.resources import Bf16, detect_bf16_support
from flyte_ddp.datasets import SampleArrays, open_arrays

COMMON = {"batch_size": 256, "learning_rate": 0.05, "momentum": 0.9, "num_ranks": 2}
SMALL_TEST_BATCH = "plain with test batches of 250"
OURS = {
    **COMMON,
    "dataset": "fashion_mnist",
    "model": "tutorial",
    "weight_decay": 0.0,
    "nesterov": False,
    "schedule": "constant",
    "validation_fraction": 0.0,
}


def measure(options: Options) -> Result:
    size = {"epochs": 1, "max_steps": 8} if options.quick else {"epochs": 2, "max_steps": 0}
    result = Result(settings={**COMMON, **size, "threads_per_rank": 1})
    data = fashion_mnist(options.folder)
    order = COMMON | size | {"task": "images"} | write_idx(open_arrays(data), options.folder / "torchvision")
    test_batches = {"plain": 1000, SMALL_TEST_BATCH: 250, "lightning": 250}
    peers = {
        name: partial(run_peer, result, name, order | {"test_batch_size": size}) for name, size in test_batches.items()
    }
    precisions = ("fp32", "bf16") if detect_bf16_support("cpu") is Bf16.FASTER else ("fp32",)
    ours = {
        precision: partial(run_ours, result, options.folder, data, precision, OURS | size) for precision in precisions
    }
    interleaved(options, result, {**peers, **ours}, options.number(5))
    for name in (name for name in peers if f"{name}: last epoch" in result.series):
        for side, factor in zip(ours, (2.3, 3.5), strict=False):
            figure = result.ratio(f"{name} / {side}", f"{name}: last epoch", f"{side}: last epoch")
            target = factor if name == "plain" else None
            result.targets.append(Target(f"epoch of {side}, times faster than {name}", figure, "x", at_least=target))
    result.targets += [accuracy_gap(result, side) for side in ours]
    return result


def run_ours(result: Result, folder: Path, data: Path, precision: str, hp: dict[str, Any], seed: int) -> None:
    """Add one run of the library. ``auto`` chooses bf16 on this machine."""
    hp = hp | {"precision": "auto" if precision == "bf16" else precision, "seed": seed}
    done = run_library(hp, data, folder / "run")
    note(result, precision, done.epoch_seconds(), done.of("evaluation")[-1]["test_accuracy"])
    seconds = done.of("end")[0]["seconds"]
    for part in ("data", "forward_backward", "communication", "evaluation", "other"):
        result.add(f"{precision}: share of {part} in all time", seconds[part] / seconds["total"], "%")


def run_peer(result: Result, name: str, order: dict[str, Any], seed: int) -> None:
    epochs = call("benchmarks.peers:run_peer", order | {"side": name.partition(" ")[0], "seed": seed})
    note(result, name, [epoch["seconds"] for epoch in epochs], epochs[-1]["accuracy"])


def note(result: Result, side: str, seconds: list[float], accuracy: float) -> None:
    result.add(f"{side}: first epoch", seconds[0], "s")
    result.add(f"{side}: last epoch", seconds[-1], "s")
    result.add(f"{side}: test accuracy", accuracy, "%")


def accuracy_gap(result: Result, side: str) -> Target:
    """Return the mean gain in test accuracy over the plain loop.

    The target is at least 0 minus two standard errors.
    """
    pairs = zip(result.values(f"{side}: test accuracy"), result.values("plain: test accuracy"), strict=True)
    gaps = [ours - theirs for ours, theirs in pairs]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    what = f"test accuracy of {side} minus that of plain, mean (target: 0 less two standard errors)"
    return Target(what, statistics.fmean(gaps), "%", at_least=-2 * error)


def write_idx(arrays: SampleArrays, folder: Path) -> dict[str, Any]:
    """Write the files that torchvision's FashionMNIST reads, and return where they are and how to normalise."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, images, labels in (
        ("train", arrays.train_inputs, arrays.train_targets),
        ("t10k", arrays.test_inputs, arrays.test_targets),
    ):
        write_idx_file(raw / f"{name}-images-idx3-ubyte", images[..., 0])
        write_idx_file(raw / f"{name}-labels-idx1-ubyte", labels.astype(np.uint8))
    return {"data": str(folder), "mean": arrays.mean[0], "std": arrays.std[0]}


def write_idx_file(path: Path, values: NDArray[np.uint8]) -> None:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.tobytes())
