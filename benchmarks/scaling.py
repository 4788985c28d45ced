"""Cost as data grow: samples a second, and the time to the first record of training, at 1, 4 and 16 times the data.

FashionMNIST cut or repeated to 15,000, 60,000 and 240,000 training samples, the default model (in which the data path
has the largest share), batches of 256 and the same number of steps, which visits every sample of the largest once.
Preparation of the data is not counted. Start-up, whose noise is large beside the 5 % in question, is measured by many
runs of a single step.
"""

import functools

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import fashion_mnist, run_library

SMALLEST, BATCH_SIZE = 15_000, 256
FACTORS = (1, 4, 16)


def measure(options: Options) -> Result:
    """Measures all sizes in turn."""
    smallest = 1500 if options.quick else SMALLEST
    steps = -(-smallest * FACTORS[-1] // BATCH_SIZE)
    hp = {
        "dataset": "fashion_mnist",
        "batch_size": BATCH_SIZE,
        "max_steps": steps,
        "num_ranks": 2,
        "validation_fraction": 0.0,
        "eval_interval": 1000,  # the last step is evaluated, no other
        "epochs": 1000,
    }
    result = Result(settings=hp)
    data = {factor: fashion_mnist(options.folder, smallest * factor) for factor in FACTORS}

    def train(factor: int, repeat: int) -> None:
        done = run_library(hp, data[factor], options.folder / f"run-{factor}-{repeat}")
        result.add(f"{factor} x data: rate", done.of("end")[0]["samples_per_second"], "samples/s")

    def start(factor: int, repeat: int) -> None:
        done = run_library(hp | {"max_steps": 1}, data[factor], options.folder / f"start-{factor}-{repeat}")
        result.add(f"{factor} x data: to the first record", done.seconds_to_first_step(), "s")

    for run, repeats in ((train, 7), (start, 21)):
        interleaved(
            options,
            result,
            {f"{factor} x data: {run.__name__}": functools.partial(run, factor) for factor in FACTORS},
            options.number(repeats),
        )
    for factor in FACTORS[1:]:
        rate = result.ratio(f"{factor} x / 1 x: rate", f"{factor} x data: rate", "1 x data: rate")
        startup = result.ratio(
            f"{factor} x / 1 x: to the first record",
            f"{factor} x data: to the first record",
            "1 x data: to the first record",
        )
        result.targets += [
            Target(f"rate at {factor} times the data, of that at 1", rate, "%", at_least=0.95),
            Target(f"start-up at {factor} times the data, of that at 1", startup, "%", at_most=1.05),
        ]
    return result
