"""Samples/s of training a small GPT on two CPU ranks: ours against a plain DDP loop, Accelerate and Lightning.

10.8 million parameters, 256 tokens, batches of 8, AdamW in one kernel. In the same two processes, in turn, on the same
batches: the library's step with its data path and its records, the plain loop's, and Accelerate's. Lightning's Trainer
needs processes of its own; fresh runs of it alternate with fresh runs of the plain loop. Beside it stands how long an
evaluation of 8 texts takes, in steps of training.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import run_python
from benchmarks.sample_tasks import GPT, generate_texts, text_loss
from benchmarks.step_sides import make_job, make_work, train_ours
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, open_prepared
from flyte_ddp.launch.supervise.rank import join_process_group, keep_freed_memory
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.order import sampling
from flyte_ddp.training.evaluate import evaluate_split
from flyte_ddp.training.recording import Recorder
from flyte_ddp.training.training_state import TrainingState

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
    """Measure blocks of steps in the same processes, and fresh runs of Lightning."""
    steps, blocks = (1, 1) if options.quick else (2, options.number(12))
    result = Result(settings={**OURS, "steps_per_measurement": steps, "threads_per_rank": 1})
    data = fetch(OURS["dataset"], "", options.folder / "texts", progress="off")
    output = options.folder / "rates.json"
    order = {"data": str(data), "steps": steps, "blocks": blocks, "output": str(output)}
    interleaved(options, result, {"ours, plain, accelerate": lambda _: run_blocks(result, order)}, 1)
    peer = {"task": "gpt", "num_ranks": RANKS, "batch_size": BATCH, "learning_rate": RATE, "output": str(output)}
    peer |= {"samples": BATCH if options.quick else 4 * BATCH, "epochs": 2}
    sides = {side: partial(run_peer, result, peer | {"side": side}) for side in ("plain", "lightning")}
    interleaved(options, result, sides, 1 if options.quick else 3)
    for side, at_least in (("plain", 0.97), ("accelerate", None)):
        figure = result.ratio(f"ours / {side}", "ours", side)
        result.targets.append(Target(f"rate, times {side}", figure, "x", at_least=at_least))
    figure = result.ratio("lightning / plain, fresh runs", "lightning, fresh run", "plain, fresh run")
    result.targets.append(Target("rate of Lightning, times plain, fresh runs", figure, "x"))
    figure = result.median("evaluation of 8 texts") * result.median("ours") / BATCH
    result.targets.append(Target("an evaluation of 8 texts, in steps of training", figure, "x"))
    return result


def run_blocks(result: Result, order: dict[str, Any]) -> None:
    """Add the rates of all blocks."""
    run_python("benchmarks.gpt", json.dumps(order))
    for side, values in json.loads(Path(order["output"]).read_text()).items():
        for value in values:
            result.add(side, value, "s" if "evaluation" in side else "samples/s")


def run_peer(result: Result, order: dict[str, Any], seed: int) -> None:
    """Add one fresh run of a peer, without its first epoch."""
    run_python("benchmarks.sample_peers", json.dumps(order | {"seed": seed}))
    seconds = json.loads(Path(order["output"]).read_text())[1:]
    result.add(f"{order['side']}, fresh run", order["samples"] * len(seconds) / sum(seconds), "samples/s")


def run_rank(rank: int, order: dict[str, Any], records: str) -> None:
    """One rank: blocks of steps of each side in turn, the first of each not counted; rank 0 writes the rates."""
    hp = Hyperparameters(**OURS)
    folder = Path(records)
    work = make_work(hp, Path(order["data"]), folder)
    job = make_job(work)
    torch.set_num_threads(1)
    keep_freed_memory()
    store = distributed.FileStore(str(folder / "store"), RANKS)  # type: ignore[attr-defined]
    join_process_group(work, RankInfo(rank, RANKS, local_rank=rank), store, print)
    state = TrainingState(hp, job.hardware, open_prepared(job.data), None)
    with closing(Recorder(job, state)) as recorder:
        sides = {
            "ours": train_ours(state, recorder),
            "plain": train_plain(state),
            "accelerate": train_accelerate(state),
        }
        rates: dict[str, list[float]] = {side: [] for side in (*sides, "evaluation of 8 texts")}
        for block in range(order["blocks"] + 1):
            for side, steps in sides.items():
                seconds = time_block(lambda steps=steps: [*itertools.islice(steps, order["steps"])])  # type: ignore[misc]
                if block:
                    rates[side].append(BATCH * order["steps"] / seconds)
            seconds = time_block(lambda: evaluate(state))
            if block:
                rates["evaluation of 8 texts"].append(seconds)
    if rank == 0:
        Path(order["output"]).write_text(json.dumps(rates))
    distributed.barrier()
    distributed.destroy_process_group()


def time_block(function: Callable[[], object]) -> float:
    """Return the seconds until all ranks have called the function."""
    distributed.barrier()
    begin = time.perf_counter()
    function()
    distributed.barrier()
    return time.perf_counter() - begin


def evaluate(state: TrainingState) -> None:
    """Evaluate the library's model on the test split."""
    with state.evaluation_mode():
        evaluate_split(state.predict, state.test, state.hp.test_batch_size, state.device, state.objective)


def rank_batches(state: TrainingState) -> Iterator[list[torch.Tensor]]:
    """Yield inputs and targets of this rank's share of each batch of the library's order, from tensors in memory."""
    samples = [*map(torch.from_numpy, generate_texts(len(state.training), 0))]
    for epoch in itertools.count():
        for batch in state.training.order.batches(epoch, BATCH):
            own = torch.from_numpy(sampling.take_slice(batch, distributed.get_rank(), RANKS).astype(np.int64))
            yield [values[own] for values in samples]


def train_plain(state: TrainingState) -> Iterator[None]:
    """Do the steps of a plain DDP loop."""
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    for inputs, targets in rank_batches(state):
        optimizer.zero_grad()
        text_loss(model(inputs), targets).backward()
        optimizer.step()
        yield


def train_accelerate(state: TrainingState) -> Iterator[None]:
    """Do the steps of a loop with Accelerate."""
    accelerator, model = Accelerator(cpu=True), GPT()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=RATE, fused=True))
    for inputs, targets in rank_batches(state):
        optimizer.zero_grad()
        accelerator.backward(text_loss(model(inputs), targets))
        optimizer.step()
        yield


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder_:
        spawn(run_rank, (json.loads(sys.argv[1]), folder_), RANKS)  # type: ignore[no-untyped-call]
