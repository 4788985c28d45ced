"""Training's rate, compared with ranks that repeat the same step on one batch in memory.

In the same two processes, in turn: the library's step with its data path and its records (ours); forward pass, backward
pass and optimiser on one prepared batch, with the same strategy, precision and optimiser (resident); the same without
synchronising gradients (alone). The difference of the last two is the share of communication. Beside it stands the
communication that the library itself reports in its "end" record: what no computation hides. The target is for the
tutorial's network; small_cnn, whose step is about half as long, shows what the same milliseconds weigh there.
"""

import functools
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import fashion_mnist, run_python
from benchmarks.step_sides import make_job, make_work, train_ours
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import open_arrays
from flyte_ddp.launch.supervise.rank import join_process_group, keep_freed_memory
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.machine import Bf16, bf16_support
from flyte_ddp.order import sampling
from flyte_ddp.training.recording import Recorder
from flyte_ddp.training.training_state import TrainingState

MODELS = ("tutorial", "small_cnn")


def measure(options: Options) -> Result:
    """Measures both models in each precision, each in processes of its own."""
    # Short blocks and many pairs: on a shared machine the two of a pair must meet the same conditions.
    steps, blocks = (4, 2) if options.quick else (20, options.number(45))
    # The learning rate is tiny, so that weights stay where arithmetic costs the usual, also where ranks drift apart.
    hp: dict[str, Any] = {
        "dataset": "fashion_mnist",
        "batch_size": 256,
        "num_ranks": 2,
        "validation_fraction": 0.0,
        "learning_rate": 1e-6,
        "weight_decay": 0.0,
    }
    result = Result(settings={**hp, "threads_per_rank": 1, "steps_per_measurement": steps})
    data = fashion_mnist(options.folder)
    precisions = ("fp32", "bf16") if bf16_support("cpu") is Bf16.FASTER else ("fp32",)  # as auto picks it
    for model, precision in itertools.product(MODELS, precisions):
        side = f"{model} {precision}"
        output = options.folder / f"{model}-{precision}.json"
        order: dict[str, Any] = {"hp": hp | {"model": model, "precision": precision, "epochs": 1000}, "data": str(data)}
        order |= {"steps": steps, "blocks": blocks, "output": str(output)}
        interleaved(options, result, {side: functools.partial(take, result, side, order)}, 1)
        found = json.loads(output.read_text())
        share = result.ratio(f"{side}: ours / resident", f"{side}: ours", f"{side}: resident")
        exposed = 1 - result.ratio(f"{side}: resident / alone", f"{side}: resident", f"{side}: alone")
        result.targets += [
            Target(
                f"{side}: rate of training, share of the resident batch's",
                share,
                "%",
                at_least=0.95 if model == "tutorial" else None,
            ),
            Target(f"{side}: share of communication by the library's account", found["communication"], "%"),
            Target(f"{side}: share of communication by subtraction", exposed, "%"),
        ]
    return result


def take(result: Result, side: str, order: dict[str, Any], _: int) -> None:
    """Measures one model in one precision."""
    run_python("benchmarks.data_path", json.dumps(order))
    for kind, rates in json.loads(Path(order["output"]).read_text())["rates"].items():
        for rate in rates:
            result.add(f"{side}: {kind}", rate, "samples/s")


def run_rank(rank: int, order: dict[str, Any], records: str) -> None:
    """One rank: blocks of steps of each kind in turn, the first of each not counted; rank 0 writes the rates."""
    hp = Hyperparameters(**order["hp"])
    folder = Path(records)
    work = make_work(hp, Path(order["data"]), folder)
    job = make_job(work)
    torch.set_num_threads(job.hardware.threads)
    keep_freed_memory()
    store = distributed.FileStore(str(folder / "store"), hp.num_ranks)  # type: ignore[attr-defined]
    join_process_group(work, RankInfo(rank, hp.num_ranks, local_rank=rank), store, print)
    arrays = open_arrays(job.data)
    state = TrainingState(hp, job.hardware, arrays, None)
    with closing(Recorder(job, state)) as recorder:
        kinds = {
            "ours": train_ours(state, recorder),
            "resident": resident(state, True),
            "alone": resident(state, False),
        }
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        account: dict[str, float] = {}
        for block in range(order["blocks"] + 1):
            for kind, steps in kinds.items():
                before = recorder.seconds_by_activity()
                measured = rate(steps, order["steps"])
                if block and kind == "ours":
                    account = {
                        part: account.get(part, 0) + now - before[part]
                        for part, now in recorder.seconds_by_activity().items()
                    }
                if block:
                    rates[kind].append(measured)
    if rank == 0:
        found = {"rates": rates, "communication": account["communication"] / account["total"]}
        Path(order["output"]).write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def rate(steps: Iterator[int], number: int) -> float:
    """Samples a second over the next ``number`` steps, of all ranks together."""
    distributed.barrier()
    begin = time.perf_counter()
    samples = sum(itertools.islice(steps, number))
    distributed.barrier()
    return samples / (time.perf_counter() - begin)


def resident(state: TrainingState, synchronised: bool) -> Iterator[int]:
    """Steps on one prepared batch, with or without communication; yields the global batch's number of samples."""
    size = state.hp.batch_size
    images, labels, _ = state.training.load_batch(
        sampling.take_slice(state.training.order.samples(slice(0, size)), distributed.get_rank(), state.hp.num_ranks)
    )
    images = state.prepare_inputs(images)
    while True:
        with state.sync.micro_batch(last=synchronised):
            with torch.autocast(state.device.type, dtype=torch.bfloat16, enabled=state.hardware.precision == "bf16"):
                logits = state.sync(images)
            loss = functional.cross_entropy(logits.float(), labels, reduction="sum")
            (loss / size).backward()
        if synchronised:
            state.sync.average_gradients(loss.detach().double().view(1))
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        yield size


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder_:
        spawn(run_rank, (request, folder_), request["hp"]["num_ranks"])  # type: ignore[no-untyped-call]
