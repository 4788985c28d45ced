"""Ranks as forks of a process that has imported torch: what that spares, beside ranks that import it themselves.

2 and 4 ranks take two steps on FashionMNIST (default model, batch 256, wandb disabled), called from a process that has
imported flytekit and the tasks, as ``pyflyte`` has, but not torch. Counted are the seconds from the library's call to
the record of the first step, the CPU time of all processes from their start to their end, and the largest sum that was
seen, in readings 20 ms apart, of the PSS of the ranks and their server: pages that processes share are divided among
them, so that the sum is what they take of the machine.
"""

import resource
import subprocess

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import fashion_mnist, memory_of, run_library

SIDES = {"forks": True, "own imports": False}
FIGURES = {"first step": "s", "CPU time": "s", "memory": "MB"}


def measure(options: Options) -> Result:
    """Measures both sides with both numbers of ranks."""
    hp = {"dataset": "fashion_mnist", "batch_size": 256, "max_steps": 2, "log_interval": 1}
    result = Result(settings=hp)
    data = fashion_mnist(options.folder)
    numbers = (2, 4)

    def run(repeat: int, ranks: int, side: str) -> None:
        sums: list[float] = []
        before = cpu_seconds()
        found = run_library(
            {**hp, "num_ranks": ranks},
            data,
            options.folder / f"{side}-{ranks}-{repeat}",
            forks=SIDES[side],
            watch=lambda process: sums.extend(watch(process)),
        )
        for figure, value in zip(
            FIGURES, (found.seconds_to_first_step(), cpu_seconds() - before, max(sums)), strict=True
        ):
            result.add(f"{ranks} ranks, {side}: {figure}", value, FIGURES[figure])

    interleaved(
        options,
        result,
        {
            f"{ranks} {side}": lambda repeat, ranks=ranks, side=side: run(repeat, ranks, side)  # type: ignore[misc]
            for ranks in numbers
            for side in SIDES
        },
        options.number(7),
    )
    for ranks in numbers:
        for figure in FIGURES:
            forks, own = (f"{ranks} ranks, {side}: {figure}" for side in SIDES)
            ratio = result.ratio(f"{ranks} ranks: {figure}, forks / own imports", forks, own)
            bound = 1.0 if figure != "first step" else 1.1
            result.targets.append(
                Target(f"{ranks} ranks: {figure}, times that of own imports", ratio, "x", at_most=bound)
            )
    return result


def watch(process: subprocess.Popen[str]) -> list[float]:
    """PSS of all ranks and their server, in MB, each time that it was read."""
    return [sum(whole for whole, _ in readings) / 1e6 for readings in memory_of(process, "rank .*")]


def cpu_seconds() -> float:
    """Of the processes that this one has started and that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
