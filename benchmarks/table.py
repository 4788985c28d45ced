"""Samples/s of training a network on a table: ours against a plain DDP loop, Lightning and Accelerate.

The table has 100,000 rows of 50 numbers in fp32. The network has two hidden layers of 64, and Adam runs in one
kernel. Global batches are 256 and 1,024, on one and two CPU ranks with a core each. The peers read a TensorDataset by
torch's DataLoader in the rank, as in their documents. Ours has the same arrays as ``arrays(...)``. Each measurement
is a fresh run, without its first epoch. Ours records each tenth step, checks each loss and saves a checkpoint an
epoch. The peers do none of this.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import Run, call, run_library
from benchmarks.sample_tasks import ROWS
from flyte_ddp.datasets import fetch

PEERS = ("plain", "lightning", "accelerate")
SIZES = [(ranks, batch) for ranks in (1, 2) for batch in (256, 1024)]
OURS: dict[str, Any] = {
    "dataset": "benchmarks.sample_tasks:table_set",
    "model": "benchmarks.sample_tasks:build_mlp",
    "objective": "regression",
    "optimizer": "adam",
    "weight_decay": 0.0,
    "schedule": "constant",
    "validation_fraction": 0.0,
    "eval_interval": 1000,
}


def measure(options: Options) -> Result:
    common: dict[str, Any] = {"learning_rate": 0.001, "epochs": 2 if options.quick else 4}
    result = Result(settings={**common, "rows": ROWS, "threads_per_rank": 1})
    data = fetch(OURS["dataset"], "", options.folder / "table", progress="off")
    for ranks, batch in SIZES:
        order = common | {"num_ranks": ranks, "batch_size": batch}
        name = f"{ranks} rank{'s' * (ranks > 1)}, batch {batch}"
        sides = {"ours": partial(run_ours, result, name, order, data, options.folder / "run")}
        sides |= {side: partial(run_peer, result, name, order | {"side": side}) for side in PEERS}
        with on_cores(ranks):
            interleaved(options, result, sides, options.number(5))
        for side in PEERS:
            figure = result.ratio(f"{name}: ours / {side}", f"{name}: ours", f"{name}: {side}")
            at_least = 3.0 if side == "lightning" else None
            result.targets.append(Target(f"{name}: rate, times {side}", figure, "x", at_least=at_least))
    return result


@contextmanager
def on_cores(number: int) -> Iterator[None]:
    """Run the processes started in the block on this many cores. All ranks then have a thread each."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-number:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run_ours(result: Result, name: str, order: dict[str, Any], data: Path, folder: Path, seed: int) -> None:
    done = run_library(OURS | order | {"seed": seed}, data, folder)
    result.add(f"{name}: ours", rate_after_first_epoch(done, order["batch_size"]), "samples/s")


def rate_after_first_epoch(run: Run, batch: int) -> float:
    """Return the samples/s between the first record after the first epoch and the last."""
    per_epoch = -(-ROWS // batch)
    first, *_, last = (record for record in run.of("train") if record["step"] >= per_epoch)
    done = [record["step"] // per_epoch * ROWS + record["step"] % per_epoch * batch for record in (first, last)]
    return float((done[1] - done[0]) / (last["time"] - first["time"]))


def run_peer(result: Result, name: str, order: dict[str, Any], seed: int) -> None:
    _, *epochs = call("benchmarks.peers:run_peer", order | {"task": "table", "samples": ROWS, "seed": seed})
    seconds = [epoch["seconds"] for epoch in epochs]
    result.add(f"{name}: {order['side']}", ROWS * len(seconds) / sum(seconds), "samples/s")
