"""What adding gradients up costs a step, as the number of parameters grows: DDP, hooks and shared memory.

Ten square linear layers of growing width, 8 samples on each of 2 CPU ranks of 1 thread. In the same processes, in turn:
forward and backward without synchronisation, and with each strategy. The figure is the median, over blocks of steps, of
the time that a strategy adds to the step; on cores that compute nothing else at the same time there is little to hide.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import run_python
from flyte_ddp.clock import Clock
from flyte_ddp.launch.supervise.rank import keep_freed_memory
from flyte_ddp.parallel.strategies import GradientSync, create_gradient_sync

LAYERS, SAMPLES, RANKS = 10, 8, 2
WIDTHS = (32, 100, 316, 1000)  # about 10,000 to 10,000,000 parameters
STRATEGIES = ("ddp", "hooks", "shared_memory")
ALONE = "alone"


def measure(options: Options) -> Result:
    """Measures all widths in one pair of processes."""
    steps, blocks = (2, 1) if options.quick else (10, options.number(25))
    output = options.folder / "strategies.json"
    order = {"widths": WIDTHS[:2] if options.quick else WIDTHS, "steps": steps, "blocks": blocks, "output": str(output)}
    result = Result(settings={"layers": LAYERS, "samples_per_rank": SAMPLES, "num_ranks": RANKS, "steps": steps})
    sides = {"all widths": lambda _: run_python("benchmarks.strategies", json.dumps(order))}
    interleaved(options, result, sides, 1)
    for width, found in json.loads(output.read_text()).items():
        parameters = f"{LAYERS * (int(width) ** 2 + int(width)):,} parameters"
        for name, milliseconds in found.items():
            for value in milliseconds:
                result.add(f"{parameters}: {name}", value, "ms")
        for name in STRATEGIES:
            pairs = zip(found[name], found[ALONE], strict=True)
            for with_sync, alone in pairs:
                result.add(f"{parameters}: added by {name}", with_sync - alone, "ms")
            added = result.median(f"{parameters}: added by {name}")
            result.targets.append(Target(f"{parameters}: added to a step by {name}", added, "ms"))
    return result


def run_rank(rank: int, order: dict[str, Any], folder: str) -> None:
    """One rank; rank 0 writes milliseconds a step, by width and strategy."""
    torch.set_num_threads(1)
    keep_freed_memory()
    store = distributed.FileStore(f"{folder}/store", RANKS)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found: dict[str, dict[str, list[float]]] = {}
    for width in order["widths"]:
        sides = {name: create_gradient_sync(network(width), name, Clock()) for name in STRATEGIES}
        sides[ALONE] = GradientSync(network(width))
        found[width] = {name: [] for name in sides}
        inputs = torch.randn(SAMPLES, width)
        for block in range(order["blocks"] + 1):
            for name, sync in sides.items():
                seconds = time_steps(sync, inputs, order["steps"])
                if block:  # the first is for warming up
                    found[width][name].append(1000 * seconds / order["steps"])
    if rank == 0:
        Path(order["output"]).write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def network(width: int) -> nn.Module:
    """Linear layers with relu between them."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def time_steps(sync: GradientSync, inputs: torch.Tensor, steps: int) -> float:
    """Seconds for so many forward and backward passes on all ranks."""
    distributed.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        with sync.micro_batch(last=True):
            loss = sync(inputs).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
        sync.average_gradients(loss.detach().double().view(1))
        sync.model.zero_grad(set_to_none=True)
    distributed.barrier()
    return time.perf_counter() - begin


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        spawn(run_rank, (json.loads(sys.argv[1]), made), RANKS)  # type: ignore[no-untyped-call]
