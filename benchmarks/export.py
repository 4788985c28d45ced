"""Export: seconds to write a model as ONNX and .pt2, and images/s while it is checked on a test split.

Each image is asked about three times: alone, in batches of 7 and of 64. The bound is torch itself, with the resizing
of the evaluation.
"""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks import generated_images
from benchmarks.measuring import Options, Result, Target, interleaved
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.prepared import open_prepared, order_test_split
from flyte_ddp.export import exporting_images
from flyte_ddp.export.comparison import Comparison, compare_outputs
from flyte_ddp.export.graphs import ONNX
from flyte_ddp.export.onnx_process import OnnxProcess
from flyte_ddp.export.served import ServedModel
from flyte_ddp.machine import count_cores
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

QUIET = Settings(progress="off", wandb_mode="disabled", checkpoint_seconds=0.0)
PHOTOS = "ResNet18, photos"


def measure(options: Options) -> Result:
    """A small network on arrays, and ResNet18 on photos of 500 x 375 pixels."""
    images, side = (64, 32) if options.quick else (256, 224)
    index = generated_images.write_shards(options.folder / "photos", 4, images // 4)
    shards = f"shards:{index}"
    trained = {
        "small_cnn, 28 x 28": Hyperparameters(dataset="digits" if options.quick else "fashion_mnist"),
        PHOTOS: Hyperparameters(dataset=shards, test_dataset=shards, model="resnet18", image_size=side),
    }
    sides = {}
    for name, hp in trained.items():
        folder = options.folder / name.split(",")[0]
        data = fetch(hp.dataset, "", folder / "data", test_dataset=hp.test_dataset, progress="off")
        run = run_training(
            Hyperparameters.from_dict({**hp.to_dict(), "max_steps": 1, "num_ranks": 1}), data, folder, QUIET
        )
        sides[name] = SavedModel(run.model, run.sidecar, QUIET), open_prepared(data)
    result = Result(settings={"photos": images, "side": side, "threads": count_cores()})

    def exported(name: str, _: int) -> None:
        model, split = sides[name]
        with TemporaryDirectory() as folder:
            served = ServedModel(model.module, model.sidecar).eval()
            with timed() as took:
                exporting_images.write_onnx_and_pt2(served, Path(folder))
            result.add(f"{name}: graphs written", took[0], "s")
            outputs, samples = {"logits": Comparison()}, len(order_test_split(split))
            with timed() as took:
                images = exporting_images.read_test_images(split, served.channels, QUIET)
                batches_of_images = exporting_images.compute_batches(model, served, images)
                worst = compare_outputs(Path(folder, ONNX), batches_of_images, samples, outputs)[0]
            assert worst.passed
            result.add(f"{name}: checked", samples / took[0], "images/s")
            if name == PHOTOS:
                batches(served, Path(folder, ONNX), result)

    interleaved(options, result, {name: functools.partial(exported, name) for name in sides}, options.number(5))
    result.ratio("photos: onnxruntime / torch", "photos: onnxruntime", "photos: torch")
    result.targets.append(
        Target("ResNet18 on photos: rate of onnxruntime, of torch's", result.median("photos: onnxruntime / torch"), "x")
    )
    return result


def batches(served: ServedModel, onnx: Path, result: Result) -> None:
    """Batches of 64 photos, resized and answered by onnxruntime and by torch."""
    photos = np.random.default_rng(0).integers(0, 256, (64, 375, 500, 3), dtype=np.uint8)
    with OnnxProcess(onnx, count_cores()) as process, torch.no_grad():
        process.compute_outputs({"images": photos})
        with timed() as took:
            process.compute_outputs({"images": photos})
        result.add("photos: onnxruntime", len(photos) / took[0], "images/s")
        served(torch.from_numpy(photos))
        with timed() as took:
            served(torch.from_numpy(photos))
        result.add("photos: torch", len(photos) / took[0], "images/s")


@contextmanager
def timed() -> Iterator[list[float]]:
    """Gives the seconds that it took, once that is over."""
    took: list[float] = []
    began = time.perf_counter()
    yield took
    took.append(time.perf_counter() - began)
