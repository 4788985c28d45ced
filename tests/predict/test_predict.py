"""Predictions against the same computed with plain torch, numpy and Pillow."""

import base64
import io
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cli import ROOT
from PIL import Image
from predictions import predict_rows
from report_page import Page
from sidecars import make_sidecar

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models import saving
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.models.sidecar import MIDDLE
from flyte_ddp.datasets.images import image_arrays
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.objectives import Classification, Facts
from flyte_ddp.predict.answer_table import format_csv_cell, make_answer_columns, mark_rows_with_nan
from flyte_ddp.predict.predict import replace_folder_on_success, write_rows_and_masks

GREY = InputSpec(channels=1, height=16, width=16, mean=(0.3,), std=(0.4,))
RGB = InputSpec(channels=3, height=16, width=16, mean=(0.3, 0.4, 0.5), std=(0.2, 0.25, 0.3))
TABLE = Path("out/table.csv")  # in the working directory
CLASSES = ["shoe", 'a "quoted", name', "bag"]
SIZES = ("crop_share", "resize_dtype", "height", "width", "antialias")
USED_BY_THE_EXAMPLE = ("upright", "background", "mode", "scale", "mean", "std", *SIZES)

LINEAR = """
from torch import nn

def make(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0] * 16 * 16, num_classes))
"""


@pytest.fixture(autouse=True)
def linear_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's model that is simple enough to be computed here once more."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/model_of_test_predict.py").write_text(LINEAR)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.chdir(tmp_path)


def save(folder: Path, spec: InputSpec, seed: int = 0) -> tuple[Path, Path]:
    """Random weights, whose predictions differ from image to image."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(len(CLASSES), spec.channels * 16 * 16, generator=generator) / 20
    state = {"1.weight": weight, "1.bias": torch.randn(len(CLASSES), generator=generator)}
    sidecar = make_sidecar(spec, "model_of_test_predict:make", classes=CLASSES)
    return saving.save_model(folder, state, sidecar)


def expected_scores(paths: tuple[Path, Path], images: np.ndarray[Any, Any], spec: InputSpec) -> torch.Tensor:
    """Softmax for images [N, H, W, C] of the model's size, in numpy's fp64."""
    state = {name: value.double().numpy() for name, value in torch.load(paths[0], weights_only=True).items()}
    normal = (images / 255.0 - np.array(spec.mean)) / np.array(spec.std)
    logits = normal.transpose(0, 3, 1, 2).reshape(len(images), -1) @ state["1.weight"].T + state["1.bias"]
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    return torch.tensor(scores / scores.sum(axis=1, keepdims=True), dtype=torch.float32)


def predict(model: tuple[Path, Path], **options: Any) -> list[dict[str, str]]:
    """Predict ``images`` or a ``dataset``, and return the rows of the table."""
    return predict_rows(*model, **{"output": TABLE, **options})


def scores_of(rows: list[dict[str, str]]) -> torch.Tensor:
    return torch.tensor([[float(row[f"score_{name}"]) for name in CLASSES] for row in rows])


def check_predictions(rows: list[dict[str, str]], scores: torch.Tensor) -> None:
    assert torch.allclose(scores_of(rows), scores, atol=1e-5)
    assert [row["prediction"] for row in rows] == [CLASSES[k] for k in scores.argmax(1)]
    assert torch.allclose(torch.tensor([float(row["score"]) for row in rows]), scores.max(1).values, atol=1e-5)
    assert len({row["prediction"] for row in rows}) > 1, "one prediction for all would hide an error"


def noise(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def blocks(count: int, channels: int) -> np.ndarray[Any, Any]:
    """Images [count, 16, 16, channels] of four even quarters each, which differ more than noise does."""
    return noise(count, 2, 2, channels).repeat(8, axis=1).repeat(8, axis=2)


@pytest.fixture
def grey_model(tmp_path: Path) -> tuple[Path, Path]:
    return save(tmp_path / "model", GREY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    return tmp_path / "images"


def write_dataset(folder: Path, channels: int, count: int = 23) -> Path:
    folder.mkdir()
    arrays = [blocks(count, channels), np.arange(count) % 3] * 2
    write_prepared_set(image_arrays(*arrays, CLASSES, name="noise"), folder, {"source": "a test"})
    return folder


def test_a_folder_is_predicted_file_by_file_in_the_order_of_paths(grey_model, folder: Path) -> None:
    names = ["b.png", "c.TIFF", "d.pgm", "a/second.bmp", "a/first.PNG", "a/deep/er.gif", "comma, and.png"]
    names.append(os.fsdecode(b"n\xf6n.png"))
    images = blocks(len(names), 1)
    for name, image in zip(names, images, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[:, :, 0]).save(folder / name)
    (folder / "labels.txt").write_text("not an image, and not named like one")
    (folder / "._b.png").write_text("what macOS leaves behind")
    os.mkfifo(folder / "a" / "pipe.png")

    rows = predict(grey_model, images=folder, batch_size=4)
    order = sorted(range(len(names)), key=lambda k: names[k].split("/"))
    assert [row["id"] for row in rows] == [names[k] for k in order]
    assert list(rows[0]) == ["id", "prediction", "score", *(f"score_{name}" for name in CLASSES)]
    check_predictions(rows, expected_scores(grey_model, images[order], GREY))
    assert sorted(path.name for path in TABLE.parent.iterdir()) == ["table.csv", "table.html"]


@pytest.mark.parametrize(("channels", "spec"), [(1, GREY), (3, RGB), (1, RGB)], ids=["grey", "rgb", "grey as rgb"])
def test_a_data_set_is_predicted_with_truths(tmp_path: Path, channels: int, spec: InputSpec) -> None:
    paths = save(tmp_path / "model", spec)
    dataset = write_dataset(tmp_path / "dataset", channels)
    rows = predict(paths, dataset=dataset, batch_size=5)
    assert [row["id"] for row in rows] == [str(k) for k in range(23)]
    assert [row["truth"] for row in rows] == [CLASSES[k % 3] for k in range(23)]
    check_predictions(rows, expected_scores(paths, np.repeat(blocks(23, channels), spec.channels // channels, 3), spec))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """100, of many sizes and shapes, grey, in colour and partly transparent, some taken sideways by a camera."""
    folder, paths = tmp_path_factory.mktemp("photos"), []
    random = np.random.default_rng(5)
    for index in range(100):
        sides = random.integers(17, 300, 2) if index % 3 else random.integers(9, 60, 2)
        coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        photo = coarse.resize(tuple(sides.tolist()), Image.Resampling.BICUBIC)
        fine = random.integers(-20, 21, (photo.height, photo.width, 3))
        photo = Image.fromarray((np.asarray(photo) + fine).clip(0, 255).astype(np.uint8))
        photo = photo.convert("L") if index % 10 == 7 else photo
        if index % 10 == 3:  # an odd number: a PNG
            photo.putalpha(coarse.convert("L").resize(photo.size, Image.Resampling.BICUBIC))
        turned = Image.Exif()
        turned[0x0112] = (1, 6, 3, 8)[index % 4]
        paths.append(folder / f"{index:03d}.{'png' if index % 2 else 'jpg'}")
        photo.save(paths[-1], quality=90, exif=turned)
    return paths


@pytest.mark.parametrize("kind", ["photos", "grey"])
@pytest.mark.slow
def test_outside_this_package_ten_lines_prepare_an_image(kind: str, photos, tmp_path: Path, monkeypatch) -> None:
    """With the numbers in the sidecar alone: photos of any size, grey and in colour, get the same predictions."""
    crop, spec = MIDDLE if kind == "photos" else "", GREY if kind == "grey" else RGB
    spec = replace(spec, crop_share=224 / 232)  # not the usual 7/8
    saved = save(tmp_path / "model", spec)
    sidecar = json.loads(saved[1].read_text())
    sidecar["input"] = spec.to_sidecar_input(crop).to_json_value()
    saved[1].write_text(json.dumps(sidecar))
    rows = predict(saved, images=photos[0].parent)
    [code] = re.findall(r"```python\n(import json\n.*?)```", (ROOT / "docs/model.md").read_text(), re.DOTALL)
    program: dict[str, Any] = {}
    monkeypatch.chdir(saved[0].parent)
    exec(compile(code, "model.md", "exec"), program)
    state = torch.load(saved[0], weights_only=True)

    def scores(prepare: Callable[[Path], torch.Tensor]) -> torch.Tensor:
        inputs = torch.cat([prepare(path) for path in photos])
        assert inputs.shape == (100, spec.channels, 16, 16)
        return torch.softmax(inputs.flatten(1) @ state["1.weight"].T + state["1.bias"], dim=1)

    found = scores(program["prepare"])
    assert [row["id"] for row in rows] == [path.name for path in photos]
    assert [row["prediction"] for row in rows] == [CLASSES[best] for best in found.argmax(1)]
    assert torch.allclose(scores_of(rows), found, atol=0.002 if kind == "photos" else 1e-5)

    # What people do who are not told: all of the image, without antialiasing, gives other predictions.
    takes = program["takes"]
    program["takes"] = takes | {"crop_share": None, "antialias": False, "upright": False}
    assert (scores(program["prepare"]).argmax(1) != found.argmax(1)).sum() > 5
    assert set(takes) == {*USED_BY_THE_EXAMPLE, "channels", "crop", "interpolation"}
    assert takes["interpolation"] == "bilinear"
    assert all(f'takes["{name}"]' in code for name in USED_BY_THE_EXAMPLE)


def test_the_page_of_two_classes_begins_with_the_highest_scores(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Each with its own picture, over several batches, with a file among them that cannot be decoded."""
    monkeypatch.setitem(globals(), "CLASSES", ["no", "yes"])
    files, images = save(tmp_path / "model", GREY), blocks(40, 1)
    for number, image in enumerate(images):
        Image.fromarray(image[:, :, 0]).save(folder / f"{number:02}.png")
    (folder / "00.png").write_bytes(b"no image")
    rows = predict(files, images=folder, batch_size=7, bad_samples=1)
    scores = expected_scores(files, images, GREY)[:, 1]
    scores[0] = -1
    first = scores.argsort(descending=True)[:24].tolist()
    page = Page(TABLE.with_suffix(".html").read_text())
    assert page.texts("h2")[1] == "The 24 with the highest score of 'yes'"
    shown = page.pieces("mistake")
    assert [parts[-1] for parts in shown] == [f"{number:02}.png" for number in first]
    assert [parts[1] for parts in shown] == [rows[number]["prediction"] for number in first]
    percents = [float(next(part for part in parts if "score" in part).split()[1]) for parts in shown]
    assert percents == pytest.approx([100 * scores[number].item() for number in first], abs=0.006)
    assert len({*percents}) > 20
    for source, number in zip(page.attributes("src"), first, strict=True):
        stored = np.array(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("L"))
        stored = stored[:: len(stored) // 16, :: len(stored) // 16]
        assert np.abs(stored.astype(int) - images[number][:, :, 0]).max() <= 1
    assert [row["id"] for row in rows] == [f"{number:02}.png" for number in range(40)]


def test_what_is_no_image_leaves_no_table(grey_model, folder: Path, tmp_path: Path) -> None:
    for name, message in (
        ("x.heic", r"images: none of its 1 files is an image; add \.jpg"),
        ("notes.png", r"notes\.png cannot be decoded: unknown image format; .*or raise bad_samples$"),
    ):
        (folder / name).write_text("not an image")
        with pytest.raises(UserError, match=message):
            predict(grey_model, images=folder)
    with pytest.raises(UserError, match="nowhere: must be a folder"):
        predict(grey_model, images=tmp_path / "nowhere")
    assert list(tmp_path.glob("out/*")) == []


def test_undecodable_images_are_named_and_do_not_stop_the_others(
    grey_model: tuple[Path, Path], folder: Path, capfd
) -> None:
    images = blocks(4, 1)
    for name, image in zip("defg", images, strict=True):
        Image.fromarray(image[:, :, 0]).save(folder / f"{name}.png")
    (folder / "notes.png").write_text("not an image")
    (folder / "b.png").write_bytes(b"")
    (folder / "c.png").write_bytes((folder / "d.png").read_bytes()[:60])
    names = ["b.png", "c.png", "d.png", "e.png", "f.png", "g.png", "notes.png"]
    options = {"images": folder, "batch_size": 2}
    with pytest.raises(UserError, match=r"\.png cannot be decoded: .*; 3 samples .* more than bad_samples=2"):
        predict(grey_model, **options, bad_samples=2)
    assert not TABLE.exists()
    rows = predict(grey_model, **options, bad_samples=3)
    assert [row["id"] for row in rows] == names
    bad = [row for row in rows if row["id"] in ("b.png", "c.png", "notes.png")]
    assert all(value == "" for row in bad for name, value in row.items() if name != "id")
    check_predictions([row for row in rows if row not in bad], expected_scores(grey_model, images, GREY))
    said = capfd.readouterr().err
    assert "no prediction for 3 image(s), which cannot be decoded: " in said
    assert f"{folder}/b.png (unknown image format)" in said
    sidecar = json.loads(grey_model[1].read_text()) | {"hyperparameters": {"bad_samples": 3}}
    grey_model[1].write_text(json.dumps(sidecar))
    assert predict(grey_model, **options) == rows, "by default as many are allowed as in training"
    for name in "defg":
        (folder / f"{name}.png").unlink()
    with pytest.raises(UserError, match="none of the 3 samples can be decoded; repair them"):
        predict(grey_model, **options)


def test_other_answers_in_a_later_batch_are_refused() -> None:
    """One column less would leave cells empty."""
    answers = iter([{"a": [1], "b": [2]}, {"a": [1]}])
    predictor: Any = SimpleNamespace(predict_batch=lambda *_: next(answers))
    batch: Any = SimpleNamespace(ids=["x"], decoded=[True])
    with pytest.raises(UserError, match=r"columns are id, a, b in one batch, .*id, a in another"):
        write_rows_and_masks(io.StringIO(), [batch, batch], predictor, Path())


def test_settings_that_are_refused(grey_model: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"images": None}, "give exactly one"),
        ({"dataset": folder}, "give exactly one"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
    ):
        with pytest.raises(UserError, match=words):
            predict(grey_model, **{"images": folder, **options})
    with pytest.raises(UserError, match="take both files from the same run"):
        predict((grey_model[0], save(tmp_path / "other", GREY, seed=1)[1]), images=folder)
    assert not TABLE.exists()


def test_channels_that_the_model_does_not_take_are_refused(grey_model, folder: Path, tmp_path: Path) -> None:
    colour = write_dataset(tmp_path / "colour", 3)
    with pytest.raises(UserError, match=r"data set 'noise' has images of 3 channels, .*the model accepts 1 x 16 x 16"):
        predict(grey_model, dataset=colour)
    Image.fromarray(noise(16, 16)).save(folder / "fine.png")
    four = save(tmp_path / "four", InputSpec(channels=4, height=16, width=16, mean=(0.5,) * 4, std=(0.5,) * 4))
    with pytest.raises(UserError, match=r"has images of 1 or 3 channels, .*the model accepts 4 x 16 x 16"):
        predict(four, images=folder)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (16777217.0, "16777217"),
        (np.int64(2**53 + 1), "9007199254740993"),
        (float(np.float32(0.1)), "0.1"),
        (0.1, "0.1"),
        (0.1234567890123, "0.1234567890123"),
        (math.nan, ""),
    ],
)
def test_all_digits_of_a_number_are_in_the_table(value: Any, text: str) -> None:
    assert format_csv_cell("prediction", value) == text


def test_masks_of_an_older_table_do_not_stay_beside_a_table_without_any(tmp_path: Path) -> None:
    for names in (["old.png"], ["a.png", "b.png"], []):
        with replace_folder_on_success(tmp_path / "masks") as new:
            for name in names:
                (new / name).touch()
        assert sorted(path.name for path in tmp_path.rglob("*.png")) == names
    assert not (tmp_path / "masks").exists()


def test_outputs_that_are_no_numbers_are_no_answer() -> None:
    """The likeliest class of NaN would be the first one."""
    outputs = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [3.0, 1.0]])
    undefined = mark_rows_with_nan(outputs, 3)
    assert undefined.tolist() == [False, True, False]
    model = SimpleNamespace(objective=Classification(Facts(("a", "b"))), sidecar=make_sidecar())
    answers = make_answer_columns(model, outputs, None, undefined)
    assert answers["prediction"] == ["b", "", "a"]
    assert math.isnan(answers["score"][1])
