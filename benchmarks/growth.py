"""Growth: the cost of ten times as much work, as a ratio to the cost of the original amount.

Each measurement is a separate process, after a small first measurement that is not counted, and sizes alternate.

Times are processor seconds. Tables of predictions grow by rows, and by classes beyond 100. Sweeps grow by trials: tpe
draws all trials, and each wave is drawn from the finished trials, as in a pod. The benchmark also times a new window
of a champion that already has windows, and a registry's log and champion.

Memory is measured in three cases. An evaluation, in training and in a judgement, is measured by the added maximum, in
units of a batch's fp32 logits. An idle rank that has joined is measured by the memory share, with few ranks and with
many. The launcher of these ranks is measured by the maximum.

Linear growth gives a ratio of 10 or less, because a fixed part does not grow.
"""

from functools import partial
from typing import Any

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import call

LINEAR, FLAT = 12.0, 1.2  # most of ten times as much
TPE = 20.0  # a trial costs more until the study knows 225 trials, and as much from then on


def measure(options: Options) -> Result:
    """Return the result of all rows, each at two sizes."""
    small = 10 if options.quick else 1  # by which sizes are smaller
    cases: dict[str, tuple[str, tuple[list[Any], list[Any]], float | None]] = {
        "predict, by rows": ("predict", ([400 // small, 1000], [4000 // small, 1000]), LINEAR),
        "predict, by classes": ("predict", ([2000 // small, 1000], [2000 // small, 10_000]), LINEAR),
        "tpe, by trials": ("draw_sweep", ([90 // small], [900 // small]), TPE),
        "windows, one more": ("record_windows", ([100 // small], [1000 // small]), LINEAR),
        "registry, by entries": ("read_registry", ([100 // small], [1000 // small]), LINEAR),
        "training's evaluation, by batches": (
            *("evaluate", (["training", 10_000, 10 // small], ["training", 10_000, 100 // small])),
            LINEAR,
        ),
        "judgement, by batches": (
            *("evaluate", (["judgement", 10_000, 10 // small], ["judgement", 10_000, 100 // small])),
            LINEAR,
        ),
        "at rest, by ranks": ("rest", ([1], [2]) if options.quick else ([2], [16]), None),
    }
    result = Result(settings={name: sizes for name, (_, sizes, _) in cases.items()})

    def run(name: str, place: int, _: int) -> None:
        function, sizes = cases[name][:2]
        found = call(f"benchmarks.growth_sizes:{function}", *sizes[place])
        for what, value in found.items() if isinstance(found, dict) else [("seconds", found)]:
            result.add(f"{name}: {what}, {'more' if place else 'fewer'}", value, UNITS.get(what, "s"))

    sides = {f"{name}, {'more' if place else 'fewer'}": partial(run, name, place) for name in cases for place in (0, 1)}
    interleaved(options, result, sides, options.number(3))
    for label in [label.removesuffix(", more") for label in result.series if label.endswith(", more")]:
        name, what = label.rsplit(": ", 1)
        figure = result.ratio(f"{label}, more / fewer", f"{label}, more", f"{label}, fewer")
        bound = FLAT if what in UNITS else cases[name][2]
        result.targets.append(Target(f"{label}, of more by that of fewer", figure, "x", at_most=bound))
    for name in ("training's evaluation, by batches", "judgement, by batches"):
        label = f"{name}: memory, more"
        result.targets.append(Target(f"{label}, in logits of a batch", result.median(label), "x", at_most=1.2))
    return result


UNITS = {"memory": "batches", "rank": "MiB", "launcher": "MiB"}
