"""The overhead of our training step against a bare loop's, for small models that are limited by the host.

Steps have 8 samples in fp32 on one thread. The models are an MLP on a table of 50 columns, and small_cnn on images of
28 x 28 pixels. In one process, two sides alternate in blocks (benchmarks/step_sides.py). The library's step has its
data path, checks and records. The plain loop has the same model and optimiser, and none of these.
"""

from functools import partial
from typing import Any

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import LIMIT_SECONDS, call

MODELS = ("table of 50 columns, batch 8", "small_cnn, batch 8")


def measure(options: Options) -> Result:
    result = Result(settings={"threads": 1, "batch_size": 8, "precision": "fp32"})
    order = {"threads": 1, "blocks": options.number(25)}

    def run(name: str, _: int) -> None:
        add_steps(result, options, order | {"case": name})

    interleaved(options, result, {name: partial(run, name) for name in MODELS}, 1)
    for name in MODELS:
        ratio = result.ratio(f"{name}: ours / bare", f"{name}: ours", f"{name}: bare")
        result.targets.append(Target(f"{name}: time of a step, of a bare loop's", ratio, "x", at_most=1.25))
    return result


def add_steps(result: Result, options: Options, order: dict[str, Any], limit: float = LIMIT_SECONDS) -> None:
    """Add the milliseconds of steps of a case of benchmarks/step_sides.py, measured in a separate process."""
    found = call("benchmarks.step_sides:time_blocks", order | {"quick": options.quick}, limit=limit)
    for side, seconds in found.items():
        for value in seconds:
            result.add(f"{order['case']}: {side}", 1000 * value, "ms")
