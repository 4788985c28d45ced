"""Warnings of pictures that are equal as the model gets them."""

import html
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from encoded_runs import BASE, notes, quiet, train
from PIL import Image

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.packing import pack_image_folder
from flyte_ddp.run import run_training


def save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def one_picture(folder: Path, number: int, others: int) -> Path:
    """So many files in two classes, all with the same pixels but the first few."""
    pixels = np.indices((20, 24, 3)).sum(0).astype(np.uint8)
    for index in range(number):
        picture = np.rot90(pixels) + np.uint8(index) if index < others else pixels
        save(picture, folder / ("a", "b")[index % 2] / f"{index:02d}.png")
    return folder


@pytest.mark.slow
def test_mostly_equal_pictures_are_a_warning(tmp_path: Path, capfd) -> None:
    folder = one_picture(tmp_path / "images", 32, 4)
    pack_image_folder(str(folder), tmp_path / "packed", per_shard=8, progress="off")
    address = f"{tmp_path}/packed/train.json"
    hp = replace(BASE, dataset=f"shards:{address}", max_steps=1, augment="resized_crop", validation_fraction=0.0)
    result = train(hp, tmp_path / "out", replace(quiet(tmp_path, loaders=1), progress="lines"))
    said = [line for line in capfd.readouterr().err.splitlines() if "are equal as the model gets them" in line]
    [warning] = said
    assert [line for line in notes(result) if "are equal" in line] == said
    assert warning in html.unescape(result.report.read_text())


@pytest.mark.slow
def test_equal_arrays_are_a_warning(tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank's part of a batch is a sample."""
    (tmp_path / "blank.py").write_text(
        "import numpy as np\n"
        "from flyte_ddp import image_arrays\n"
        "def make(_):\n"
        "    images, labels = np.zeros((300, 8, 8), np.uint8), np.arange(300) % 2\n"
        "    return image_arrays(images, labels, images, labels, classes=['a', 'b'])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    data = fetch("blank:make", "", tmp_path / "blank", progress="off")
    hp = Hyperparameters(dataset="blank:make", num_ranks=2, batch_size=14, accumulation_steps=7, max_steps=10)
    run_training(hp, data, tmp_path / "run", replace(quiet(tmp_path), progress="lines"))
    assert capfd.readouterr().err.count("64 of the first 64 pictures are equal") == 1
