"""Memory of one more rank, beyond what a rank costs without data, and of a run on as many classes as ImageNet-21k.

Synthetic images of about 1 GB, an epoch that touches all of them, a model so small that data dominate. PSS (each page
divided by the number of processes that map it) is read from ``/proc/PID/smaps_rollup`` of all ranks while they train,
and the largest sum is taken. What the third rank adds, less what it adds with a tiny data set and as many steps, is
compared with the size of the data. Other processes that come and go with torch change the ranks' part of torch's files:
measure on a quiet machine, or look at the part that is no file's.

The run on 21,841 classes has two training images of each and as many for testing, of 16 x 16 pixels, and two ranks.
Its figures are the largest PSS of its launcher and of any other process, from its start to the end of its report, and
the largest sum over all its processes.
"""

import subprocess

import numpy as np
from torch import nn

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import memory_of, pss, run_library, write_data
from flyte_ddp.datasets import ImageArrays

BATCH_SIZE = 1024
SHAPE = (32, 32, 3)
CLASSES = 21_841  # of ImageNet-21k
KINDS = PSS, ANONYMOUS = "PSS of all ranks", "of that, memory that is no file's"


def model(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A linear classifier of 4x4 averages; the ranks import it by name."""
    channels, height, width = input_shape
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(channels * height * width // 64, num_classes))


def measure(options: Options) -> Result:
    """Measures 2 and 3 ranks, on large and on tiny data."""
    samples = 33_000 if options.quick else 360_000
    steps = -(-samples // BATCH_SIZE)
    folders = {
        "large": write_data(options.folder / "large", synthetic(samples)),
        "tiny": write_data(options.folder / "tiny", synthetic(4 * BATCH_SIZE)),
    }
    size = sum(array.nbytes for array in synthetic(samples).list_arrays().values())
    result = Result(
        settings={"samples": samples, "data_mb": round(size / 1e6), "batch_size": BATCH_SIZE, "steps": steps}
    )

    def run(name: str, ranks: int, repeat: int) -> None:
        hp = {
            "dataset": "benchmarks.memory:synthetic",
            "model": "benchmarks.memory:model",
            "batch_size": BATCH_SIZE,
            "epochs": 1 if name == "large" else steps,
            "max_steps": steps,
            "eval_interval": steps,
            "num_ranks": ranks,
            "validation_fraction": 0.0,
            "learning_rate": 1e-3,
        }
        readings: list[tuple[float, float]] = []
        run_library(
            hp,
            folders[name],
            options.folder / f"run-{name}-{ranks}-{repeat}",
            watch=lambda process: readings.extend(watch(process, ranks)),
        )
        for kind, value in zip(KINDS, max(readings), strict=True):
            result.add(f"{name} data, {ranks} ranks: {kind}", value, "MB")

    classes = 1_500 if options.quick else CLASSES
    with_classes = write_data(options.folder / "classes", of_classes(classes))
    many = f"{classes:,} classes"

    def run_with_classes(repeat: int) -> None:
        hp = {
            "dataset": "benchmarks.memory:of_classes",
            "model": "benchmarks.memory:model",
            "epochs": 1,
            "num_ranks": 2,
            "validation_fraction": 0.0,
            "learning_rate": 1e-3,
        }
        readings: list[tuple[float, list[float]]] = []
        run_library(
            hp,
            with_classes,
            options.folder / f"run-classes-{repeat}",
            watch=lambda process: readings.extend(watch_all(process)),
        )
        launchers, others = zip(*readings, strict=True)
        result.add(f"{many}: launcher", max(launchers), "MB")
        result.add(f"{many}: largest other process", max(map(max, others)), "MB")
        result.add(f"{many}: all processes", max(first + sum(rest) for first, rest in readings), "MB")

    sides = [(name, ranks) for ranks in (2, 3) for name in folders]
    interleaved(
        options,
        result,
        {f"{name} {ranks}": lambda repeat, name=name, ranks=ranks: run(name, ranks, repeat) for name, ranks in sides}  # type: ignore[misc]
        | {many: run_with_classes},
        options.number(3),
    )
    for kind in KINDS:
        figures = [result.values(f"{name} data, {ranks} ranks: {kind}") for name in folders for ranks in (2, 3)]
        for large2, large3, tiny2, tiny3 in zip(*figures, strict=True):
            added = (large3 - large2) - (tiny3 - tiny2)
            result.add(f"added by the third rank for the data: {kind}", added * 1e6 / size, "%")
    share = result.median(f"added by the third rank for the data: {PSS}")
    result.targets.append(
        Target("PSS added by one more rank for the data, of the data's size", share, "%", at_most=0.05)
    )
    own = result.median(f"added by the third rank for the data: {ANONYMOUS}")
    result.targets.append(Target("of that, memory that is no file's, of the data's size", own, "%"))
    mapped = result.median(f"large data, 2 ranks: {PSS}") - result.median(f"tiny data, 2 ranks: {PSS}")
    what = "the data in the memory of 2 ranks together, of the data's size (about 100 %: all of it was touched, once)"
    result.targets.append(Target(what, mapped * 1e6 / size, "%"))
    for process, limit in (("launcher", 1000), ("largest other process", 1000), ("all processes", None)):
        value = result.median(f"{many}: {process}")
        result.targets.append(Target(f"{many}: PSS, {process}", value, "MB", at_most=limit))
    return result


def synthetic(samples: int) -> ImageArrays:
    """Random images of ten classes, in a block that is repeated."""
    images = np.random.default_rng(0).integers(0, 256, (1000, *SHAPE), dtype=np.uint8)
    labels = np.arange(samples, dtype=np.int64) % 10
    repeated = np.broadcast_to(images, (-(-samples // 1000), *images.shape)).reshape(-1, *SHAPE)[:samples]
    return ImageArrays("synthetic", repeated, labels, images, labels[:1000], tuple("0123456789"))


def of_classes(classes: int) -> ImageArrays:
    """Return random images, two of each class for training and the same ones for testing."""
    labels = np.arange(2 * classes, dtype=np.int64) % classes
    images = np.random.default_rng(0).integers(0, 256, (2 * classes, 16, 16, 3), dtype=np.uint8)
    return ImageArrays("classes", images, labels, images, labels, tuple(f"class {number}" for number in range(classes)))


def watch_all(process: subprocess.Popen[str]) -> list[tuple[float, list[float]]]:
    """Return PSS in MB, of the launcher and of each of its descendants, each time that it was read."""
    found = []
    for others in memory_of(process, ".*"):
        if others and (launcher := pss(process.pid)):
            found.append((launcher[0] / 1e6, [whole / 1e6 for whole, _ in others]))
    return found


def watch(process: subprocess.Popen[str], ranks: int) -> list[tuple[float, float]]:
    """PSS of all ranks, and the part of it that is no file's, in MB, each time that it was read."""
    sums = []
    for readings in memory_of(process, r"rank \d+"):
        if len(readings) == ranks:
            whole, anonymous = (sum(column) / 1e6 for column in zip(*readings, strict=True))
            sums.append((whole, anonymous))
    return sums
