"""Samples/s of training a small GPT on two CPU ranks: ours against a plain DDP loop.

The GPT has 10.8 million parameters and 256 tokens. The batches have 8 samples, and AdamW runs in one kernel. The
library's step, with its data path and records, alternates with the plain loop's step. Both run in the same two
processes, on the same batches.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import call
from benchmarks.sample_tasks import GPT, generate_texts, text_loss
from benchmarks.step_sides import make_work, train_ours
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.rank import Rank, configure_malloc
from flyte_ddp.core.order import sampling
from flyte_ddp.core.training.recording import Recorder
from flyte_ddp.core.training.training_state import TrainingState
from flyte_ddp.datasets import fetch, open_prepared
from flyte_ddp.plans.opened_data import OpenedData
from flyte_ddp.plans.resolve import detect_hardware, resolve

RANKS, BATCH, RATE = 2, 8, 1e-3
OURS: dict[str, Any] = {
    "dataset": "benchmarks.sample_tasks:text_set",
    "model": "benchmarks.sample_tasks:GPT",
    "objective": "language",
    "num_classes": 256,
    "optimizer": "adamw",
    "weight_decay": 0.01,
    "schedule": "constant",
    "validation_fraction": 0.0,
    "num_ranks": RANKS,
    "batch_size": BATCH,
    "test_batch_size": BATCH // 2,
    "learning_rate": RATE,
    "epochs": 1000,
}


def measure(options: Options) -> Result:
    steps, blocks = (1, 1) if options.quick else (2, options.number(12))
    result = Result(settings={**OURS, "steps_per_measurement": steps, "threads_per_rank": 1})
    data = fetch(OURS["dataset"], "", options.folder / "texts", progress="off")
    order = {"data": str(data), "steps": steps, "blocks": blocks}
    interleaved(options, result, {"both": lambda _: run_blocks(result, order)}, 1)
    figure = result.ratio("ours / plain", "ours", "plain")
    result.targets.append(Target("rate, times plain", figure, "x", at_least=0.97))
    return result


def run_blocks(result: Result, order: dict[str, Any]) -> None:
    for side, values in call("benchmarks.gpt:spawn_ranks", order).items():
        for value in values:
            result.add(side, value, "samples/s")


def spawn_ranks(order: dict[str, Any]) -> dict[str, list[float]]:
    """Return the rates of the blocks by side."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (order, Path(folder)), RANKS)  # type: ignore[no-untyped-call]
        rates: dict[str, list[float]] = json.loads(Path(folder, "rates.json").read_text())
        return rates


def run_rank(rank: int, order: dict[str, Any], folder: Path) -> None:
    """Run blocks of steps of each side in turn. The first block of each side is not counted.

    Rank 0 writes the rates to rates.json.
    """
    hp = Hyperparameters(**OURS)
    work = make_work(hp, Path(order["data"]), folder)
    torch.set_num_threads(1)
    configure_malloc(retain=True)
    store = distributed.FileStore(str(folder / "store"), RANKS)  # type: ignore[attr-defined]
    Rank(work, RankInfo(rank, RANKS, local_rank=rank), print).join_by(store)
    state = TrainingState(resolve(hp), detect_hardware(hp), OpenedData(hp, open_prepared(Path(order["data"]))), None)
    with closing(Recorder(folder, state)) as recorder:
        sides = {
            "ours": train_ours(state, recorder),
            "plain": train_plain(state),
        }
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for block in range(order["blocks"] + 1):
            for side, steps in sides.items():
                seconds = time_block(lambda steps=steps: [*itertools.islice(steps, order["steps"])])  # type: ignore[misc]
                if block:
                    rates[side].append(BATCH * order["steps"] / seconds)
    if rank == 0:
        (folder / "rates.json").write_text(json.dumps(rates))
    distributed.barrier()
    distributed.destroy_process_group()


def time_block(function: Callable[[], object]) -> float:
    """Return the seconds until all ranks have called the function."""
    distributed.barrier()
    begin = time.perf_counter()
    function()
    distributed.barrier()
    return time.perf_counter() - begin


def rank_batches(state: TrainingState) -> Iterator[list[torch.Tensor]]:
    """Yield inputs and targets of this rank's share of each batch of the library's order, from tensors in memory."""
    samples = [*map(torch.from_numpy, generate_texts(len(state.training), 0))]
    for epoch in itertools.count():
        for batch in state.training.order.batches(epoch, BATCH):
            own = torch.from_numpy(sampling.take_slice(batch, distributed.get_rank(), RANKS).astype(np.int64))
            yield [values[own] for values in samples]


def train_plain(state: TrainingState) -> Iterator[None]:
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    for inputs, targets in rank_batches(state):
        optimizer.zero_grad()
        text_loss(model(inputs), targets).backward()
        optimizer.step()
        yield
