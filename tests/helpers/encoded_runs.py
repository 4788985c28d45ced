"""Run short trainings on shards and image folders."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from training_runs import train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets import fetch, fingerprint
from flyte_ddp.run import Result

SIDE = 16
BASE = Hyperparameters(
    dataset="shards:to be replaced", epochs=2, batch_size=64, image_size=SIDE, shuffle_shards=3, precision="fp64",
    channels_last="off", num_ranks=1, log_interval=1, learning_rate=0.05, grad_clip_norm=0.0,
)  # fmt: skip


def quiet(folder: Path, **settings) -> Settings:
    return Settings(progress="off", wandb_mode="disabled", restarts=0, cache_folder=folder / "cache", **settings)


def train(hp: Hyperparameters, folder: Path, settings: Settings | None = None) -> Result:
    """Fetch the data set, train, and return the result."""
    name = fingerprint(hp.dataset, hp.data_source, hp.test_dataset)
    places = {"test_dataset": hp.test_dataset, "sample": hp.sample}
    data = fetch(hp.dataset, hp.data_source, folder / name, **places, progress="off")
    return train_in(folder / "run", hp, data, settings or quiet(folder))


def of(index: Path | str, **changes) -> Hyperparameters:
    return replace(BASE, dataset=f"shards:{index}", **changes)


def labelled(folder: Path, number: int = 30) -> Path:
    """Write images of many sizes into a folder for each class: red, green, blue. Return the parent folder."""
    random = np.random.default_rng(0)
    for index in range(number):
        colour = index % 3
        height, width = random.integers(20, 60, 2)
        pixels = random.integers(0, 60, (height, width, 3), dtype=np.uint8)
        pixels[..., colour] += 150
        path = folder / ("red", "green", "blue")[colour] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=95)
    return folder
