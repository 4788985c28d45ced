"""Same bits: whether the working tree and a git revision train the same weights and losses, in 14 configurations.

The SHA-256 of each model must be equal, and so must each loss, accuracy and learning rate in the metrics. Both sides
run at the same time, with the same Python and packages. The library is copied first, so its files may be changed
during the run.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import generated_images
from benchmarks.running import ROOT, environment, extract_revision

LIBRARY = "flyte_ddp"
SCRIPT = Path(__file__).with_name("same_bits_runs.py")
ZYGOTE = ROOT / "tests" / "helpers" / "zygote.py"
QUICK = 2  # of the configurations, the first ones, which need no processes of their own
COMPARED = re.compile(r"(\w+_)?(loss|accuracy)|learning_rate")  # fields of the records in metrics.jsonl
VARIABLES = {
    "WANDB_MODE": "disabled",
    "FLYTE_DDP_PROGRESS": "off",
    "FLYTE_DDP_LOADERS": "2",
    "FLYTE_DDP_TIMEOUT": "60",  # ends a run whose ranks wait for one another
}
COMMON = {"dataset": "digits", "epochs": 2, "precision": "fp32", "backend": "gloo", "log_interval": 1}
IMAGES = {"image_size": 32, "batch_size": 12, "learning_rate": 0.02}
# Plain hyperparameters, which both revisions must know; all others have each revision's own defaults.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "1 rank": {"num_ranks": 1},
    "adamw, warm-up, cosine, clipped": {
        "num_ranks": 1,
        "optimizer": "adamw",
        "learning_rate": 0.003,
        "weight_decay": 0.05,
        "schedule": "cosine",
        "warmup_steps": 5,
        "grad_clip_norm": 0.5,
    },
    "tutorial, 1 rank, 3 parts": {"num_ranks": 1, "model": "tutorial", "image_size": 16, "accumulation_steps": 3},
    "tutorial in bf16, shared_memory, 2 ranks": {
        "num_ranks": 2,
        "strategy": "shared_memory",
        "model": "tutorial",
        "image_size": 16,
        "precision": "bf16",
    },
    "ddp, 2 ranks, crop_flip": {"num_ranks": 2, "strategy": "ddp", "augment": "crop_flip"},
    "hooks, 3 ranks, label smoothing": {"num_ranks": 3, "strategy": "hooks", "label_smoothing": 0.1},
    "shared_memory, 3 ranks, 3 parts, clipped": {
        "num_ranks": 3,
        "strategy": "shared_memory",
        "accumulation_steps": 3,
        "grad_clip_norm": 0.1,
    },
    "ddp, 3 ranks, 3 parts": {"num_ranks": 3, "strategy": "ddp", "accumulation_steps": 3},
    "BatchNorm (shufflenet_v2_x0_5), 2 ranks": {
        "num_ranks": 2,
        "model": "shufflenet_v2_x0_5",
        "learning_rate": 0.02,
        "batch_size": 32,
        "max_steps": 8,
    },
    "dropout (squeezenet1_1), 3 ranks, hooks": {
        "num_ranks": 3,
        "strategy": "hooks",
        "model": "squeezenet1_1",
        "image_size": 17,
        "learning_rate": 0.02,
        "batch_size": 32,
        "max_steps": 8,
    },
    "own model from a file, 2 ranks, keep=ema": {
        "num_ranks": 2,
        "model": f"{SCRIPT.stem}:OwnModel",
        "ema_decay": 0.9,
        "keep": "ema",
    },
    "keep=best, early stopping, adam, 2 ranks": {
        "num_ranks": 2,
        "optimizer": "adam",
        "learning_rate": 0.03,
        "schedule": "constant",
        "epochs": 20,
        "keep": "best",
        "early_stop_patience": 1,
    },
    "shards, resized_crop, 2 ranks": {
        **IMAGES,
        "num_ranks": 2,
        "dataset": "shards:../shards/train.json",
        "shuffle_shards": 2,
        "augment": "resized_crop",
    },
    "image_folder, 3 ranks, 2 parts": {
        **IMAGES,
        "num_ranks": 3,
        "dataset": "image_folder:../images",
        "accumulation_steps": 2,
    },
}


def check(folder: Path, revision: str, *, quick: bool) -> bool:
    """Train all configurations with the library of both sides, print a line for each, return whether all are the same.

    Copies both libraries into ``folder``, and trains there, in a process for each side. Both processes are killed after
    an interrupt. With ``quick`` trains 3 steps of the first two configurations.

    Raises:
        SystemExit: git has no library at the revision.
        RuntimeError: A process ended early. The error has the end of the output.
    """
    there, here = folder / "revision", folder / "working-tree"
    extract_revision(revision, there, LIBRARY)
    shutil.copytree(ROOT / LIBRARY, here / LIBRARY, ignore=shutil.ignore_patterns("__pycache__"))
    generated_images.write_shards(folder / "shards", shards=4, samples_per_shard=10)
    generated_images.write_folder(folder / "images", 40)
    chosen = {name: COMMON | changes for name, changes in CONFIGURATIONS.items()}
    if quick:
        chosen = {name: chosen[name] | {"max_steps": 3} for name in [*chosen][:QUICK]}
    same = 0
    with ExitStack() as at_end:
        sides = []
        for side in (there, here):
            sides.append(at_end.enter_context(start_runs(side, [*chosen.values()])))
            at_end.callback(sides[-1].kill)
        for name in chosen:
            expected, found = (read_outcome(process, side) for process, side in zip(sides, (there, here), strict=True))
            difference = describe_difference(expected, found, revision)
            same += not difference
            print(f"  differs  {name}: {difference}" if difference else f"  same     {name}", flush=True)
    print(f"  {same} of {len(chosen)} configurations are the same at {revision} and here", flush=True)
    return same == len(chosen)


def start_runs(side: Path, configurations: list[dict[str, Any]]) -> subprocess.Popen[str]:
    """Start the process that trains the configurations in turn in ``side``, with the library there."""
    for script in (SCRIPT, ZYGOTE):
        shutil.copy(script, side)
    variables = environment(VARIABLES | {"FLYTE_DDP_RUNS": str(side / "runs")})
    with (side / "output.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, SCRIPT.name, json.dumps(configurations)],
            cwd=side,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )


def read_outcome(process: subprocess.Popen[str], side: Path) -> dict[str, Any]:
    """Wait for the outcome of the next configuration, without a time limit, and return the outcome.

    Raises:
        RuntimeError: The process ended without an outcome.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"exit code {process.wait()} of {side.name}\n{(side / 'output.txt').read_text()[-3000:]}")
    outcome: dict[str, Any] = json.loads(line)
    return outcome


def describe_difference(expected: Mapping[str, Any], found: Mapping[str, Any], revision: str) -> str:
    """Return the first difference between the outcomes of the revision and the working tree, or "" without any."""
    sides = {f"at {revision}": expected, "here": found}
    if errors := [f"failed {where}: {each['error']}" for where, each in sides.items() if "error" in each]:
        return "; ".join(errors)
    values = compared_values(found["records"])
    for place, value in compared_values(expected["records"]).items():
        if values.get(place) != value:
            return f"{place} is {value} at {revision}, {values.get(place)} here"
    if expected["model"] != found["model"]:
        return "the weights, though all records are the same"
    return ""


def compared_values(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the losses, accuracies and learning rates of metrics records by position, in the same order."""
    return {
        f"{field} of {record['kind']}" + (f" at step {record['step']}" if "step" in record else ""): value
        for record in records
        for field, value in record.items()
        if COMPARED.fullmatch(field)
    }
