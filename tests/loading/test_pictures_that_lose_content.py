"""Runs on pictures whose content is not in their red, green and blue, and on pictures that have none."""

import csv
import html
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from encoded_runs import BASE, notes, quiet, train
from PIL import Image

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, open_prepared
from flyte_ddp.datasets.packing import pack_image_folder
from flyte_ddp.export.exporting_images import read_test_images
from flyte_ddp.predict.predict import write_prediction_table
from flyte_ddp.run import run_training
from flyte_ddp.validation.profiling import compute_profile


def bar(number: int) -> np.ndarray:
    """Where a picture of 24 x 24 pixels is opaque: in a bar that stands (even numbers) or lies."""
    opaque = np.zeros((24, 24), dtype=bool)
    opaque[3 + number % 13 :][:5] = True
    return opaque if number % 2 else opaque.T


def save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def shapes(folder: Path, number: int) -> Path:
    """Black pictures of bars on black: only their alpha channels differ."""
    for index in range(number):
        pixels = np.zeros((24, 24, 4), dtype=np.uint8)
        pixels[bar(index), 3] = 255
        save(pixels, folder / ("standing", "lying")[index % 2] / f"{index:02d}.png")
    return folder


@pytest.mark.slow
def test_what_only_an_alpha_channel_shows_is_learnt_and_predicted(tmp_path: Path, capfd) -> None:
    """Exports are checked with decoded images, which are those of the formula; validation decodes, too."""
    folder, tests = shapes(tmp_path / "images", 60), shapes(tmp_path / "tests", 20)
    hp = replace(BASE, dataset=f"image_folder:{folder}", test_dataset=f"image_folder:{tests}", batch_size=10, epochs=8)
    result = train(hp, tmp_path / "out", replace(quiet(tmp_path), progress="lines"))
    assert result.test_accuracy == 1.0
    assert "are equal" not in capfd.readouterr().err
    where = {"images": tests, "dataset": None, "output": tmp_path / "table.csv"}
    with write_prediction_table(result.model, result.sidecar, **where).open() as file:
        assert all(row["id"].startswith(f"{row['prediction']}/") for row in csv.DictReader(file))
    prepared = fetch(hp.dataset, "", tmp_path / "prepared", test_dataset=hp.test_dataset, progress="off")
    order = [*range(1, 20, 2), *range(0, 20, 2)]  # lying, standing
    expected = [np.where(bar(number), 0, 255)[..., None].repeat(3, axis=2) for number in order]
    assert np.array_equal(list(read_test_images(open_prepared(prepared), 3, quiet(tmp_path))), expected)
    assert compute_profile(prepared).test.statistics["colour modes"] == {"RGBA": 20}


def one_picture(folder: Path, number: int, others: int) -> Path:
    """So many files in two classes, all with the same pixels but the first few."""
    pixels = np.indices((20, 24, 3)).sum(0).astype(np.uint8)
    for index in range(number):
        picture = np.rot90(pixels) + np.uint8(index) if index < others else pixels
        save(picture, folder / ("a", "b")[index % 2] / f"{index:02d}.png")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "others"), [("shards", 4), ("stream", 0)])
def test_mostly_equal_pictures_are_a_warning(kind: str, others: int, tmp_path: Path, capfd) -> None:
    folder = one_picture(tmp_path / "images", 32, others)
    pack_image_folder(str(folder), tmp_path / "packed", per_shard=8, progress="off")
    address = f"{tmp_path}/packed/train.json"
    hp = replace(BASE, dataset=f"{kind}:{address}", max_steps=1, augment="resized_crop", validation_fraction=0.0)
    if kind == "stream":
        hp = replace(hp, test_dataset=f"shards:{address}", batch_size=8)
    result = train(hp, tmp_path / "out", replace(quiet(tmp_path, loaders=1), progress="lines"))
    said = [line for line in capfd.readouterr().err.splitlines() if "are equal as the model gets them" in line]
    [warning] = said
    assert [line for line in notes(result) if "are equal" in line] == said
    assert others or warning.startswith("warning: 32 of the first 32 pictures are equal")
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
