"""Training on a GPU: steps against a bare loop's, pictures from shards, a killed run, and two ranks.

Each case is a separate process with a time limit, and the whole benchmark takes at most five minutes. If a case
fails, the others continue. The bare steps are in benchmarks/step_sides.py. No network is needed, because all data is
generated. With --quick, small models try all cases, also on a CPU. Without a GPU, only --quick is possible.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import generated_images, rendering
from benchmarks.chaos import same_weights
from benchmarks.measuring import Options, Result, Target, taken
from benchmarks.overhead import add_steps
from benchmarks.running import ROOT, call, environment, write_data
from benchmarks.step_sides import make_images
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.machine.resources import count_cores, count_gpus
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.run import run_training

WHOLE_SECONDS, CASE_SECONDS, LEAST_SECONDS = 300.0, 90.0, 10.0
RESNET50, SHARDS, DECODING = "ResNet-50, 224 px, batch 256", "ResNet-50 from shards", "decoding alone"
# Bounds of the time of our step over a bare step's. Large models keep 0.97 of its rate.
LARGE, DROPOUT, SMALL = 1 / 0.97, 1.03, 1.25
STEPS = {
    RESNET50: LARGE,
    "ViT-B/16, batch 128": LARGE,
    "GPT-2, 16 x 1,024 tokens": LARGE,
    "GPT-2, dropout in 24 layers": DROPOUT,
    "ResNet-18, 32 px, batch 512": SMALL,
    "small_cnn, batch 256": SMALL,
    "small_cnn, crop_flip, moving average": SMALL,
    "table of 50 columns, batch 1,024": SMALL,
    "GPT-2, compiled": LARGE,  # last, as the compiler takes longest
}
DIFFERENT = 64  # photos, whose making takes slow cores some seconds
RUN = {"validation_fraction": 0.0, "epochs": 1000, "log_interval": 1, "deterministic": True, "eval_interval": 1000}


class Check:
    """The cases, which add to the same result. Each case gets its time limit in seconds."""

    def __init__(self, options: Options, gpus: int) -> None:
        self.options, self.gpus, self.blocks = options, gpus, options.number(5)
        self.batch = 8 if options.quick else 256  # of ResNet-50
        self.order = {"blocks": self.blocks, **({"threads": 1} if options.quick else {})}
        self.result = Result(settings={**describe_device(gpus), "blocks": self.blocks})

    def list_cases(self) -> dict[str, Callable[[float], None]]:
        steps: dict[str, Callable[[float], None]] = {name: partial(self.time_steps, name) for name in STEPS}
        others = {DECODING: self.time_decoding, SHARDS: self.time_shards, "a run that is killed": self.kill_run}
        ranks = {} if self.gpus == 1 else {"two ranks": self.compare_ranks}
        return {RESNET50: steps.pop(RESNET50), **others, **ranks, **steps}

    def time_steps(self, name: str, limit: float) -> None:
        add_steps(self.result, self.options, self.order | {"case": name}, limit)
        ratio = self.result.ratio(f"{name}: ours / bare", f"{name}: ours", f"{name}: bare")
        self.add_target(f"{name}: time of a step, of a bare step's", ratio, at_most=STEPS[name])

    def time_decoding(self, limit: float) -> None:
        """Decode and crop photos in as many processes as a rank with a GPU has."""
        workers = max(1, count_cores() - 1)
        order = {"side": "decode and crop alone, processes", "workers": workers, "different": DIFFERENT, "epochs": 2}
        order |= {"images": workers * (10 if self.options.quick else 400)}
        found = call("benchmarks.image_loaders:measure_loader", order, limit=limit)
        self.result.add(DECODING, found["rate"], "images/s")

    def time_shards(self, limit: float) -> None:
        """Train from shards. The bound is the slower of a bare step and of bare decoding."""
        if not {f"{RESNET50}: bare", DECODING} <= {*self.result.series}:
            raise RuntimeError("nothing to compare with: bare steps or decoding alone were not measured")
        began, number = time.perf_counter(), 1 if self.options.quick else 16
        index = generated_images.write_shards(self.options.folder / "shards", number, 500, DIFFERENT)
        hp = {"dataset": f"shards:{index}", "test_dataset": f"shards:{index}"}
        order = self.order | {"case": SHARDS, "sides": ["ours"], "hp": hp}
        add_steps(self.result, self.options, order, limit - (time.perf_counter() - began))
        rate = self.batch * 1000 / self.result.median(f"{SHARDS}: ours")
        self.result.add(f"{SHARDS}: rate", rate, "images/s")
        share = rate / min(self.batch * 1000 / self.result.median(f"{RESNET50}: bare"), self.result.median(DECODING))
        self.add_target("ResNet-50 from shards: rate, of the smaller of a bare step's and decoding's", share, 0.9)

    def kill_run(self, limit: float) -> None:
        """Kill a run, and train it to the end. The weights must equal the weights of an undisturbed run."""
        hp: dict[str, Any] = {**RUN, "model": "resnet18", "batch_size": 512, "max_steps": 160, "num_ranks": 1}
        hp |= {"augment": "crop_flip", "ema_decay": 0.9}
        if self.options.quick:
            hp |= {"model": "small_cnn", "batch_size": 8, "max_steps": 400}
        end, checkpoints = time.perf_counter() + limit, self.options.folder / "killed" / "unfinished" / "checkpoints"
        command = [sys.executable, "-m", "benchmarks.child", "benchmarks.gpu:train", "/dev/null"]
        undisturbed, killed = (
            subprocess.Popen([*command, json.dumps(self.list_arguments(name, hp))], cwd=ROOT, env=environment({}))
            for name in ("undisturbed", "killed")
        )
        try:
            while not [*checkpoints.glob("*.ckpt")]:
                if killed.poll() is not None or time.perf_counter() > end:
                    raise RuntimeError("the killed run wrote no checkpoint")
                time.sleep(0.01)
            killed.kill()
            killed.wait()
            call("benchmarks.gpu:train", *self.list_arguments("killed", hp), limit=end - time.perf_counter())
            if undisturbed.wait(max(1.0, end - time.perf_counter())):
                raise RuntimeError("the undisturbed run failed")
        finally:
            undisturbed.kill()
            killed.kill()
        [*_, after] = [each["resumed_after_step"] for each in self.read_metrics("killed") if each["kind"] == "start"]
        equal = same_weights(*(self.options.folder / name for name in ("killed", "undisturbed")))
        self.add_target("a run that is killed: step after which it went on", after, 1, unit="steps")
        self.add_target("a run that is killed: weights are equal bit for bit", equal, 1, unit="%")

    def compare_ranks(self, limit: float) -> None:
        hp = {**RUN, "model": "small_cnn", "precision": "fp64", "batch_size": 32, "max_steps": 20}
        losses = []
        for ranks in (1, 2):
            name = f"{ranks} ranks"
            call("benchmarks.gpu:train", *self.list_arguments(name, {**hp, "num_ranks": ranks}), limit=limit / 2)
            losses.append([record["loss"] for record in self.read_metrics(name) if record["kind"] == "train"])
        difference = max(abs(one - two) for one, two in zip(*losses, strict=True))
        self.add_target("two ranks: largest difference of a loss", 1e9 * difference, at_most=1000, unit="billionths")

    def list_arguments(self, name: str, hp: dict[str, Any]) -> tuple[dict[str, Any], str, bool]:
        """Return the arguments with which ``train`` trains in the folder ``name``."""
        return hp, str(self.options.folder / name), self.options.quick

    def read_metrics(self, name: str) -> list[dict[str, Any]]:
        return read_records(self.options.folder / name / "metrics.jsonl")

    def add_target(
        self, what: str, value: float, at_least: float | None = None, *, at_most: float | None = None, unit: str = "x"
    ) -> None:
        self.result.targets.append(Target(what, float(value), unit, at_least, at_most))


def describe_device(gpus: int) -> dict[str, Any]:
    """Return the cards and the driver, as nvidia-smi names both, and the version of CUDA."""
    facts: dict[str, Any] = {"gpus": gpus, "cuda": torch.version.cuda}
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        facts["cards"] = "; ".join(subprocess.check_output(command, text=True).splitlines())
    return facts


def measure(options: Options) -> Result:
    gpus, patience = count_gpus(), 10 if options.quick else 1
    end = time.perf_counter() + patience * WHOLE_SECONDS
    if not gpus and not options.quick:
        raise SystemExit("gpu: this machine has no GPU; --quick runs the benchmark with small models on the CPU")
    check = Check(options, gpus)
    result, lost = check.result, []
    if gpus == 1:
        result.notes.append("two ranks: skipped, because the machine has one GPU")
    for name, case in check.list_cases().items():
        print(f"    {name}", flush=True)
        left = end - time.perf_counter()
        if left < LEAST_SECONDS:
            result.notes.append(f"{name}: skipped, because the limit of {WHOLE_SECONDS:.0f} s was reached")
        if left < LEAST_SECONDS or not taken(result, name, partial(case, min(patience * CASE_SECONDS, left)), tries=1):
            lost.append(name)
        options.keep(result)
    sides = ("ours", "bare", "ours / bare")
    done = [name for name in STEPS if f"{name}: ours / bare" in result.series]
    rows = [[name, *(f"{result.median(f'{name}: {side}'):.3f}" for side in sides)] for name in done]
    print(rendering.table(["case", "ours, ms", "bare, ms", "ours / bare"], rows))
    missed = [f"missed: {each.what}: {each.value:.3f}" for each in result.targets if each.met is False]
    print("\n".join((*result.notes, *missed)))
    if lost:
        raise RuntimeError(f"failed or skipped: {', '.join(lost)}")
    return result


def train(hp: dict[str, Any], run: str, quick: bool) -> None:
    """Train on generated images in the folder ``run``."""
    folder = Path(run)
    data = folder.with_name(f"{folder.name} data")
    if not data.exists():
        write_data(data, make_images(64 if quick else 10_240, 32, 3, 10))
    settings = Settings(progress="off", wandb_mode="disabled", checkpoint_seconds=0.2)
    run_training(Hyperparameters(**hp), data, folder, settings)
