"""Measurements, their statistics, targets, and a description of the machine."""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flyte_ddp.core.errors import StoppedError
from flyte_ddp.core.files import replace_file

TRIES = 3  # of a measurement whose process fails
PACKAGES = ["torch", "torchvision", "torchcodec", "simplejpeg", "pillow", "flytekit", "flytekitplugins-kfpytorch"]
PACKAGES += ["flyte", "lightning", "accelerate", "wandb", "numpy", "webdataset", "wids", "litdata", "ray"]
PACKAGES += ["distributed", "nvidia-dali-cuda120"]


@dataclass(frozen=True)
class Options:
    repeats: int  # measurements of each side; 0: the benchmark's own number
    quick: bool  # tiny settings, to see that it works; the figures mean nothing
    folder: Path  # a fresh temporary folder
    output: Path  # where results go
    against: str = ""  # a git revision to compare with; "": none
    keep: Callable[[Result], object] = lambda _: None  # is given what there is, after each measurement

    def number(self, full: int, quick: int = 1) -> int:
        """Return the repeats requested on the command line, else the benchmark's default."""
        return self.repeats or (quick if self.quick else full)


@dataclass
class Series:
    unit: str
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """A figure and its bound. Without a bound the figure is only reported."""

    what: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Return whether the bound is kept, or None without a bound."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


@dataclass
class Result:
    settings: dict[str, Any]
    series: dict[str, Series] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what went wrong, and what became of it

    def lengths(self) -> dict[str, int]:
        return {label: len(series.values) for label, series in self.series.items()}

    def cut(self, lengths: Mapping[str, int]) -> None:
        """Remove the values that were added since the series had these lengths."""
        self.series = {label: series for label, series in self.series.items() if label in lengths}
        for label, length in lengths.items():
            del self.series[label].values[length:]

    def add(self, label: str, value: float, unit: str) -> None:
        self.series.setdefault(label, Series(unit)).values.append(value)

    def values(self, label: str) -> list[float]:
        return self.series[label].values

    def median(self, label: str) -> float:
        return statistics.median(self.values(label))

    def ratio(self, label: str, above: str, below: str) -> float:
        """Add a series of the ratios ``above / below`` of pairs, and return the median.

        If a side was given up, only its repeats are paired.
        """
        pairs = zip(self.values(above), self.values(below), strict=False)
        self.series[label] = Series("x", [first / second for first, second in pairs])
        return self.median(label)


def summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "n": len(values),
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "stdev": statistics.stdev(values) if len(values) > 1 else 0.0,
        "min": min(values),
        "max": max(values),
    }


def interleaved(options: Options, result: Result, sides: Mapping[str, Callable[[int], None]], repeats: int) -> None:
    """Measure sides in turn (A B A B), so that slow changes of the machine affect all sides alike.

    A failed measurement is repeated some times. If all tries fail, the side is given up, and the other sides continue.

    Args:
        options: Options of the command line.
        result: Result to which the sides add measurements.
        sides: Functions that take a measurement, given the number of the repeat.
        repeats: Number of measurements of each side.
    """
    left = dict(sides)
    for repeat in range(repeats):
        for name, measure in [*left.items()]:
            print(f"    {repeat + 1}/{repeats} {name}", flush=True)
            if not taken(result, f"{name}, {repeat + 1} of {repeats}", functools.partial(measure, repeat)):
                del left[name]
            options.keep(result)


def taken(result: Result, name: str, measure: Callable[[], None], tries: int = TRIES) -> bool:
    """Take a measurement, with repeated tries after failures. Return whether a try succeeded."""
    before = result.lengths()
    for number in range(1, tries + 1):
        try:
            measure()
        except StoppedError:
            raise
        except Exception as error:
            result.cut(before)
            then = "it was measured again" if number < tries else "it was skipped, and its earlier values are kept"
            first, *others = str(error).splitlines()
            what = " ... ".join(line[:200] for line in (first, *others[-1:]))  # the last one has a process's exception
            result.notes.append(f"{name}: {what}; {then}")
            print(f"    {result.notes[-1]}\n{error}", flush=True)
        else:
            return True
    return False


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = facts.get("flags", "").split()
    return {
        "cpu": f"{facts.get('model name', platform.processor())} (family {facts.get('cpu family', '?')})",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "bf16_instructions": [flag for flag in flags if flag in ("avx512_bf16", "amx_bf16")],
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write(path: Path, description: str, result: Result, *, quick: bool, load: float, seconds: float) -> None:
    content = {
        "name": path.name.partition(".")[0],
        "description": description,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": machine(),
        "load_average_before": load,
        "versions": versions(),
        "seconds": round(seconds, 1),
        "settings": result.settings,
        "notes": result.notes,
        "targets": [{**asdict(target), "met": target.met} for target in result.targets],
        "series": {label: {**asdict(series), **summary(series.values)} for label, series in result.series.items()},
    }
    with replace_file(path, durable=False) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
