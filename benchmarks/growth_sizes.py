"""The measurements of ``growth`` at a single size, each function in a separate process: processor seconds, or bytes.

Modules are imported by the functions that need them, so that memory counts from the function's start.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.running import most_memory

BATCH, SIDE = 512, 4  # samples of a batch; pixels of an image's side
BASE = {"dataset": "fashion_mnist", "num_ranks": 1}
SPACE = {
    "learning_rate": {"from": 0.001, "to": 1, "log": True},
    "momentum": {"from": 0.5, "to": 0.95},
    "batch_size": {"from": 32, "to": 256, "step": 32},
}


def count_seconds(act: Callable[[], object]) -> float:
    """Return the processor seconds of a call, in all threads."""
    began = time.process_time()
    act()
    return time.process_time() - began


def build_linear(num_classes: int, input_shape: tuple[int, int, int]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] * input_shape[2], num_classes))


def predict(rows: int, classes: int) -> float:
    """Return the seconds of a table of predictions for ``rows`` images. The first images are not counted."""
    import numpy as np
    import torch
    from PIL import Image

    from flyte_ddp.core.models.inputs import InputSpec
    from flyte_ddp.core.models.saving import save_model
    from flyte_ddp.core.models.sidecar import Digests, Sidecar
    from flyte_ddp.predict.predict import write_prediction_table

    spec = InputSpec(channels=1, height=SIDE, width=SIDE, mean=(0.5,), std=(0.5,))
    names = [f"class {place}" for place in range(classes)]
    sidecar = Sidecar(
        model="benchmarks.growth_sizes:build_linear",
        classes=names,
        input=spec.to_sidecar_input(),
        digests=Digests(weights=""),
    )
    state = {"1.weight": torch.randn(classes, SIDE * SIDE), "1.bias": torch.randn(classes)}
    pixels = np.random.default_rng(0).integers(0, 256, (rows, SIDE, SIDE), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for images, part in (("first", pixels[:10]), ("all", pixels)):
            (folder / images).mkdir()
            for place, image in enumerate(part):
                Image.fromarray(image).save(folder / images / f"{place:06}.png")
        model = save_model(folder / "model", state, sidecar)

        def write(images: str) -> None:
            output = folder / f"{images}.csv"
            write_prediction_table(*model, images=folder / images, dataset=None, output=output, batch_size=BATCH)

        write("first")
        return count_seconds(lambda: write("all"))


def evaluate(where: str, classes: int, batches: int) -> dict[str, float]:
    """Return the peak memory that an evaluation adds, in units of a batch's logits, and the seconds."""
    import torch

    from flyte_ddp.core.training.evaluate import compute_split_columns
    from flyte_ddp.objectives import Classification, Facts
    from flyte_ddp.release.evaluation import Evaluation

    torch.set_num_threads(1)
    objective = Classification(Facts(tuple(map(str, range(classes)))))
    samples, targets = batches * BATCH, torch.arange(BATCH) % classes

    class Split:
        def __len__(self) -> int:
            return samples

        def load_evaluation_batches(self, *_: int) -> Iterator[tuple[slice, tuple[Any, Any, None]]]:
            for start in range(0, samples, BATCH):
                yield slice(start, start + BATCH), (None, targets, None)

    def compute_logits(*_: Any) -> Any:
        return torch.rand(BATCH, classes)

    def compute_columns() -> None:
        if where == "training":
            compute_split_columns(compute_logits, Split(), BATCH, objective)  # type: ignore[arg-type]
        else:
            Evaluation.from_batches(objective, ((compute_logits(), targets, BATCH) for _ in range(batches)))

    torch.rand(4).double().log_softmax(0)
    before = most_memory()
    seconds = count_seconds(compute_columns)
    return {"memory": (most_memory() - before) / (4 * BATCH * classes), "seconds": seconds}


def draw_sweep(trials: int) -> float:
    """Return the seconds for drawing all waves of tpe.

    Each wave is drawn from the finished trials, as in a pod.
    """
    import optuna  # noqa: F401

    from flyte_ddp.config import Hyperparameters
    from flyte_ddp.sweep.halving import plan_rung
    from flyte_ddp.sweep.space import Sweep

    sweep = Sweep(space=SPACE, trials=trials, sampler="tpe", rungs=1)  # type: ignore[arg-type]
    base = Hyperparameters(**BASE)  # type: ignore[arg-type]

    def draw() -> None:
        done: list[Any] = []
        while new := plan_rung(sweep, base, "data", done):
            done += [SimpleNamespace(**vars(each) | {"loss": abs(each.hp.learning_rate - 0.03)}) for each in new]

    plan_rung(sweep, base, "data", [])  # imports
    return count_seconds(draw)


def record_windows(before: int) -> float:
    """Return the seconds of a new window of a champion that has so many."""
    from flyte_ddp.monitor.records import record_window
    from flyte_ddp.monitor.window import ColumnChange, Window

    columns = [ColumnChange(f"column {place}", 0.5, 0.01, moved=False) for place in range(20)]

    def make(number: int) -> Window:
        return Window("v", f"s3://in/{number}", "2026-11-28T00:00:00Z", "me", f"{number}", 100, 0, columns, "loss", 0.9)

    with tempfile.TemporaryDirectory() as folder:
        registry, [entry] = fill_registry(folder, 1)
        for number in range(before):
            window = make(number)
            found = record_window(registry, entry, window) if number < 2 else None
            if found is None:  # the same files, without what record_window reads
                write_window(registry, entry, window, number + 1)
        return count_seconds(lambda: [record_window(registry, entry, make(before + place)) for place in range(10)]) / 10


def write_window(registry: Any, entry: Any, window: Any, number: int) -> None:
    from flyte_ddp.monitor.records import digest_author, digest_samples

    content = window.to_json(indent=1).replace('"number": 0', f'"number": {number}').encode()
    folder = Path(registry.address_of("monitor", f"{entry.number:08}"))
    (folder / f"{number:08}.json").write_bytes(content)
    (folder / f"samples/{number:08}-{digest_samples(window)}-{digest_author(window)}").write_bytes(b"\n")


def fill_registry(folder: str, entries: int) -> tuple[Any, list[Any]]:
    from flyte_ddp.release.registry import Registry

    registry, log = Registry(folder, "model"), list[Any]()
    values = {"action": "promote", "version": "a" * 64, "manifest": "b" * 64, "best": "a" * 64}
    for _ in range(entries):
        log.append(registry.append_entry(log[-1] if log else None, by="me", reason="growth", **values))
    return registry, log


def read_registry(entries: int) -> dict[str, float]:
    """Return the seconds for reading a log, and for finding the champion."""
    with tempfile.TemporaryDirectory() as folder:
        registry, _ = fill_registry(folder, entries)
        registry.read_log()
        log = count_seconds(registry.read_log)
        return {"log": log, "champion": count_seconds(lambda: [registry.read_champion() for _ in range(10)]) / 10}


def note_memory(folder: str) -> None:
    """Write a rank's proportional share of the memory, when all ranks have joined."""
    import torch
    from torch import distributed

    from flyte_ddp import current_rank

    current_rank().join()
    distributed.all_reduce(torch.ones(1))
    [kilobytes] = re.findall(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    Path(folder, str(distributed.get_rank())).write_text(kilobytes)
    distributed.barrier()


def rest(ranks: int) -> dict[str, float]:
    """Return the mean MiB of ranks that have joined and do nothing, and the most that their launcher has had."""
    from flyte_ddp import run_ranks

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(note_memory, folder, num_ranks=ranks)
        shares = [int(path.read_text()) / 1024 for path in Path(folder).iterdir()]
    return {"rank": sum(shares) / ranks, "launcher": most_memory() / 2**20}
