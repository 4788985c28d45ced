"""A killed rank: the time to the next new step, and the repeated steps, on all launchers and by torchrun.

A run of 2 ranks trains the tutorial's network, or a model whose weights and momentum have 400 MB. At a moment after
the 20th step, rank 0 or rank 1 gets SIGKILL. The time ends with the first step that no rank had done before.
``torchrun --max-restarts`` runs a plain loop with generated pictures, which saves every 10 steps. The first run of
each kind trains to the end. The final weights are compared with the weights of an undisturbed run.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos import same_weights
from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.own_functions import ENGINES
from benchmarks.own_loop import open_launcher
from benchmarks.recovery_ranks import BATCH
from benchmarks.running import ROOT, descendants, environment, fashion_mnist, process_name, run_command
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.runs.run_folder import UNFINISHED
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.run import run_training

STEPS = {"tutorial": 80, "wide": 40}
MODELS = {"tutorial": "tutorial", "wide": "benchmarks.recovery_ranks:wide"}
NAMES = {"tutorial": "tutorial", "wide": "400 MB state"}
FIRST_STEP, LAST_STEP = 20, 30  # between which a rank is killed
LIMIT_SECONDS = 120.0
SHARE = 0.3  # of torchrun's time
SEED = 0

Steps = list[tuple[int, float]]  # each step that was done, and when


def measure(options: Options) -> Result:
    data, moments = fashion_mnist(options.folder), random.Random(SEED)
    at = {repeat: moments.randrange(FIRST_STEP, LAST_STEP) for repeat in range(options.number(10) + 1)}
    result = Result(settings={"batch_size": BATCH, "steps": STEPS})
    nets = ["tutorial"] if options.quick else [*NAMES]

    def recover(net: str, side: str, rank: int, repeat: int) -> None:
        folder = options.folder / f"{net}-{side}-{rank}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        begin: Callable[..., Any] = begin_torchrun if side == "torchrun" else partial(begin_ours, side, data)
        is_whole = side != "torchrun" and repeat == 0
        with begin(net, folder) as process:
            try:
                seconds, twice = kill_and_measure(process, folder, rank, at[repeat])
                if is_whole and process.wait(LIMIT_SECONDS):
                    raise RuntimeError((folder / "output.txt").read_text()[-3000:])
            finally:
                end(process)
        label = f"{NAMES[net]}, rank {rank} killed: {side}"
        result.add(label, seconds, "s")
        result.add(f"{label}: steps done twice", twice, "steps")
        if is_whole:
            result.add(f"{NAMES[net]}: same weights", same_weights(folder / "run", options.folder / net / "run"), "")

    for net in nets:
        (options.folder / net).mkdir()
        request = json.dumps(["spawn", net, str(data), str(options.folder / net)])
        run_command([sys.executable, "-m", "benchmarks.recovery", request], environment({}))
        for rank in (1, 0):
            sides = {side: partial(recover, net, side, rank) for side in ("torchrun", *ENGINES)}
            interleaved(options, result, sides, options.number(10))
    for net in nets:
        for engine in ENGINES:
            for rank in (1, 0):
                label = f"{NAMES[net]}, rank {rank} killed: {engine}"
                bare = f"{NAMES[net]}, rank {rank} killed: torchrun"
                ratio = result.ratio(f"{label} / torchrun", label, bare)
                result.targets.append(Target(f"{label}, of torchrun's time", ratio, "x", at_most=SHARE))
                longest = 3.0 if net == "tutorial" else None
                result.targets.append(
                    Target(f"{label}: to the next new step", result.median(label), "s", None, longest)
                )
                twice = max(result.values(f"{label}: steps done twice"))
                result.targets.append(Target(f"{label}: most steps done twice", twice, "steps", at_most=0))
        same = result.values(f"{NAMES[net]}: same weights")
        result.targets.append(Target(f"{NAMES[net]}: same weights", sum(same) / len(same), "%", at_least=1.0))
        for rank in (1, 0):
            label = f"{NAMES[net]}, rank {rank} killed: torchrun"
            result.targets.append(Target(f"{label}: to the next new step", result.median(label), "s"))
    return result


def begin_ours(launcher: str, data: Path, net: str, folder: Path) -> subprocess.Popen[bytes]:
    return begin(
        [sys.executable, "-m", "benchmarks.recovery", json.dumps([launcher, net, str(data), str(folder)])], folder
    )


def begin_torchrun(net: str, folder: Path) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    torchrun += ["--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.1"]
    command = [*torchrun, str(ROOT / "benchmarks/recovery_ranks.py"), net, str(folder), "100000"]
    # With the store that torch shares by default, restarted workers may look for gloo's addresses of the earlier ones.
    return begin(command, folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def begin(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment(variables), stdout=output, stderr=output)


def end(process: subprocess.Popen[bytes]) -> None:
    for pid in [*descendants(process.pid), process.pid]:
        if process.poll() is None:
            os.kill(pid, signal.SIGKILL)


def kill_and_measure(process: subprocess.Popen[bytes], folder: Path, rank: int, at: int) -> tuple[float, int]:
    """Kill a rank after step ``at``, and return the seconds to the next new step, and the repeated steps."""
    wait_for_step(process, folder, at)
    if (folder / f"rank {rank}").exists():  # torchrun's
        victim = int((folder / f"rank {rank}").read_text())
    else:
        [victim] = [pid for pid in descendants(process.pid) if process_name(pid) == f"rank {rank}"]
    killed = time.time()
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.05)
    before = max(step for step, when in read_steps(folder) if when < killed + 0.04)
    wait_for_step(process, folder, before + 1)
    after = [(step, when) for step, when in read_steps(folder) if when > killed + 0.04]
    first = next(when for step, when in after if step > before)
    return first - killed, sum(step <= before for step, when in after if when < first)


def wait_for_step(process: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not any(done >= step for done, _ in read_steps(folder)):  # seldom: the ranks use all cores
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError((folder / "output.txt").read_text()[-3000:])
        time.sleep(0.02)


def read_steps(folder: Path) -> Steps:
    if (folder / "steps").exists():
        words = [line.split() for line in (folder / "steps").read_text().splitlines()]
        return [(int(step), float(when)) for step, when in words]
    for run in (folder / "run" / UNFINISHED, folder / "run"):
        if (run / "metrics.jsonl").exists():
            records = read_records(run / "metrics.jsonl")
            return [(record["step"], record["time"]) for record in records if record.get("kind") == "train"]
    return []


def main(request: str) -> None:
    """Train on a launcher until the run ends."""
    launcher, net, data, folder = json.loads(request)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    hp = Hyperparameters(
        dataset="fashion_mnist",
        model=MODELS[net],
        batch_size=BATCH[net],
        num_ranks=2,
        backend="gloo",
        precision="fp32",
        learning_rate=0.001,
        log_interval=1,
        eval_interval=1000,
        validation_fraction=0.0,
        epochs=1000,
        max_steps=STEPS[net],
    )
    with open_launcher(launcher) as (launch, _):
        run_training(
            hp, Path(data), Path(folder, "run"), Settings(progress="off", wandb_mode="disabled"), launch=launch
        )


if __name__ == "__main__":
    main(sys.argv[1])
