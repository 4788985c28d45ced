"""More ranks: efficiency of 2 ranks, and a model of up to 1,024, checked over links of known speed.

Efficiency is the rate of two ranks, divided by twice the rate of one rank. Each rank has one thread. For ``strong``
the total batch of all ranks is constant, and for ``weak`` the batch of each rank. For a link, two ranks run in two
network namespaces on a core each. The namespaces are joined by a veth pair, limited by a token bucket or unlimited.
The interface counts the bytes of a step, as the difference between two runs of unequal length. The time of
computation is measured with two runs of one rank each, side by side.

The model is that of gloo's ring. With n ranks and gradients of S bytes, each rank sends 2 (n - 1) / n x S bytes a
step. These are sent in 2 (n - 1) stages for each of DDP's buckets (25 MiB, the first 1 MiB). Two small sums need as
many stages each: the sum of the loss, and the sum of the used parameters. The processor handles these bytes as well.
The handling time is the time of a step over an unlimited link, minus that of a single rank. In the worst case
computation, handling and sending follow one another. In the best case all buckets are sent while the backward pass
computes, and each bucket is handled while others are sent.

The model makes several assumptions. All ranks are equally fast, all the time. Each rank has a separate link, both
ways at once, and 95 % of the bits are gradients. A message takes 50 us from rank to rank. Handling is proportional to
the bytes. The backward pass takes two thirds of the computation. Batches grow with the number of ranks. BatchNorm
over all ranks is not modelled (``sync_batchnorm`` is off), because each such layer would be an exchange that nothing
hides.

Without the right to create network namespaces (root and iproute2), links and model are skipped.
"""

import functools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.link import Host, linked_hosts
from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import LIMIT_SECONDS, ROOT, call, environment, fashion_mnist
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.engines import elastic
from flyte_ddp.run import run_training

NETWORKS = {"small_cnn": 256, "resnet18": 64}  # with the batch of two ranks
SPEEDS = (200, 1000)  # Mbit/s of the links that there are
MODELLED = (1_000, 10_000)  # and of those of the model
RANKS = (8, 64, 1024)
SMALL_SUMS = 2
PAYLOAD, LATENCY, BACKWARD = 0.95, 50e-6, 2 / 3
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
UNLIMITED = 0
PORT = 29400  # within the hosts' own network


def measure(options: Options) -> Result:
    base = {
        "dataset": "fashion_mnist",
        "backend": "gloo",
        "precision": "fp32",
        "validation_fraction": 0.0,
        "eval_interval": 100_000,
        "epochs": 100_000,
        "test_batch_size": 1000,
        "sync_batchnorm": False,
    }
    result = Result(settings=base)
    links = can_link()
    for network, batch in NETWORKS.items():
        measure_network(options, result, {**base, "model": network}, batch, links=links)
    return result


def measure_network(options: Options, result: Result, base: dict[str, Any], batch: int, *, links: bool) -> None:
    network = base["model"]
    steps = 4 if options.quick else {"small_cnn": 400, "resnet18": 40}[network]
    data = fashion_mnist(options.folder)

    def rate(label: str, settings: Mapping[str, Any], repeat: int) -> None:
        folder = options.folder / f"{network}-{label}-{repeat}"
        shutil.rmtree(folder, ignore_errors=True)  # of a try that failed
        call("benchmarks.ranks:train", {**base, **settings, "max_steps": steps}, str(data), str(folder))
        result.add(f"{network}: {label}", rate_of(folder), "samples/s")
        shutil.rmtree(folder)

    one, half = {"num_ranks": 1, "batch_size": batch}, {"num_ranks": 1, "batch_size": batch // 2}
    two = {"num_ranks": 2, "batch_size": batch}
    sides: dict[str, dict[str, Any]] = {
        "1 rank": one,
        "1 rank, half the batch": half,
        "2 ranks, shared_memory": {**two, "strategy": "shared_memory"},
        "2 ranks, ddp": {**two, "strategy": "ddp"},
    }
    interleaved(
        options,
        result,
        {label: functools.partial(rate, label, settings) for label, settings in sides.items()},
        options.number(5),
    )
    for strategy in ("shared_memory", "ddp"):
        for kind, before in (("strong", "1 rank"), ("weak", "1 rank, half the batch")):
            label = f"{network}: efficiency, {strategy}, {kind}"
            twice = result.ratio(label, f"{network}: 2 ranks, {strategy}", f"{network}: {before}")
            result.targets.append(Target(f"{label}, 1 to 2 ranks", twice / 2, "%"))
    if links:
        over_links(options, result, {**base, "strategy": "ddp"}, batch, steps, data)


def can_link() -> bool:
    """Return whether this process may make hosts and links."""
    try:
        with linked_hosts(SPEEDS[0]):
            return True
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"    links are skipped: {error}", flush=True)
        return False


def over_links(options: Options, result: Result, base: dict[str, Any], batch: int, steps: int, data: Path) -> None:
    network = base["model"]
    size = gradient_bytes(base)

    def alone(repeat: int) -> None:
        folders = [options.folder / f"{network}-alone-{repeat}-{number}" for number in (0, 1)]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        hp = {**base, "batch_size": batch // 2, "max_steps": steps, "num_ranks": 1}
        with linked_hosts(SPEEDS[0]) as hosts:
            run_hosts([order_for(host, host, 1, hp, data, folder) for host, folder in zip(hosts, folders, strict=True)])
        for folder in folders:
            result.add(f"{network}: a step's computation", batch / 2 / rate_of(folder), "s")
            shutil.rmtree(folder)

    bytes_in: dict[int, int] = {}  # by number of steps

    def together(speed: int, repeat: int, steps: int = steps) -> None:
        folder = options.folder / f"{network}-{speed}-{repeat}-{steps}"
        shutil.rmtree(folder, ignore_errors=True)
        hp = {**base, "batch_size": batch, "max_steps": steps, "num_ranks": 2}
        with linked_hosts(speed) as hosts:
            run_hosts([order_for(host, hosts[0], 2, hp, data, folder) for host in hosts])
            bytes_in[steps] = max(host.sent() for host in hosts)
        result.add(f"{network}: a step at {named(speed)}, {steps} steps", batch / rate_of(folder), "s")

    def volume(repeat: int) -> None:
        short = steps // 4
        for number in (short, steps):
            together(UNLIMITED, repeat, number)
        result.add(f"{network}: sent in a step", (bytes_in[steps] - bytes_in[short]) / (steps - short), "bytes")

    runs = {f"{network}: {named(speed)}": functools.partial(together, speed) for speed in SPEEDS}
    sides: dict[str, Callable[[int], None]] = {
        f"{network}: alone": alone,
        f"{network}: {named(UNLIMITED)}": volume,
        **runs,
    }
    interleaved(options, result, sides, options.number(3))
    hold_against_the_model(result, network, size, steps)


def hold_against_the_model(result: Result, network: str, size: int, steps: int) -> None:
    """Compare the measurements with the model, and report the model's prediction for more hosts."""

    def step(speed: int) -> float:
        return result.median(f"{network}: a step at {named(speed)}, {steps} steps")

    computation = result.median(f"{network}: a step's computation")
    handling = max(0.0, step(UNLIMITED) - computation)
    sent = result.median(f"{network}: sent in a step") * PAYLOAD / ring_bytes(2, size)
    result.targets.append(Target(f"{network}: sent in a step, of the model's", sent, "%", 0.93, 1.07))
    for speed in SPEEDS:
        best, worst = step_seconds(2, computation, handling, size, speed)
        what = f"{network}: a step at {named(speed)}, of the model's"
        result.targets.append(Target(f"{what} best", step(speed) / best, "%", at_least=0.95))
        result.targets.append(Target(f"{what} worst", step(speed) / worst, "%", at_most=1.05))
    for speed in MODELLED:
        for ranks in RANKS:
            found = step_seconds(ranks, computation, handling, size, speed)
            for kind, seconds in zip(("best", "worst"), found, strict=True):
                what = f"{network}: efficiency on {ranks:,} hosts at {named(speed)}, by the model, {kind}"
                result.targets.append(Target(what, computation / seconds, "%"))


def named(megabits: int) -> str:
    return f"{megabits:,} Mbit/s" if megabits else "an unlimited speed"


def step_seconds(ranks: int, computation: float, handling: float, size: int, megabits: int) -> tuple[float, float]:
    """Return the model's step, at best and at worst, in seconds.

    Args:
        computation: Seconds of a step on a single rank.
        handling: Seconds that gradients add on two ranks over an unlimited link.
        size: Bytes of the gradients.
        megabits: Speed of the link in Mbit/s.
    """
    buckets = 1 + math.ceil(max(0, size - FIRST_BUCKET) / BUCKET)
    stages = 2 * (ranks - 1) * LATENCY
    sending = ring_bytes(ranks, size) / (megabits * 1e6 / 8 * PAYLOAD) + buckets * stages
    handling *= ring_bytes(ranks, size) / ring_bytes(2, size)
    backward = BACKWARD * computation
    best = max(computation + handling, computation - backward + max(backward, sending))
    # The sum of the losses is always waited for.
    return best + stages, computation + handling + sending + SMALL_SUMS * stages


def ring_bytes(ranks: int, size: int) -> float:
    """Return the bytes that each rank of a ring sends."""
    return 2 * (ranks - 1) / ranks * size


def gradient_bytes(base: Mapping[str, Any]) -> int:
    from flyte_ddp.core.models.inputs import InputSpec
    from flyte_ddp.models.zoo import build_model

    hp = Hyperparameters(**base)
    model = build_model(hp.model, 10, InputSpec(1, 28, 28, (0.0,), (1.0,)))
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def order_for(host: Host, first: Host, nodes: int, hp: Mapping[str, Any], data: Path, folder: Path) -> list[str]:
    """Return the command of a host, which is a worker of torchrun. Elastic's store is on the first host."""
    arguments = json.dumps([dict(hp), str(data), str(folder)])
    return host.command(
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:{PORT}", "--rdzv-id", "ranks"),
        *("--rdzv-conf", f"is_host={int(host is first)}", "--local-addr", host.address),
        *("--module", "benchmarks.child", "benchmarks.ranks:train", "/dev/null", arguments),
    )


def run_hosts(commands: list[list[str]]) -> None:
    """Run the commands of the hosts side by side.

    Raises:
        RuntimeError: A command failed.
    """
    started = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment({"OMP_NUM_THREADS": "1"}), stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=LIMIT_SECONDS)[1][-3000:] for process in started]
        if any(process.returncode for process in started):
            raise RuntimeError("\n".join(said))
    finally:
        for process in started:
            process.kill()


def rate_of(folder: Path) -> float:
    return float(read_records(folder / "metrics.jsonl")[-1]["samples_per_second"])


def train(hyperparameters: dict[str, Any], data: str, run: str) -> None:
    """Train with each rank on one core: on this machine, or as a worker of torchrun on two hosts."""
    hp, folder = Hyperparameters(**hyperparameters), Path(run)
    settings = Settings(progress="off", wandb_mode="disabled", checkpoint_seconds=0.0)
    if "RANK" not in os.environ:
        run_training(hp, Path(data), folder, settings, threads=1)
    elif elastic.is_leader():
        run_training(hp, Path(data), folder, settings, launch=elastic.launch)
    else:
        elastic.follow()
