"""Models as ONNX, which answer as torch does wherever they are asked."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
import torch
from encoded_runs import quiet
from onnx import numpy_helper
from PIL import Image
from sidecars import make_sidecar
from training_runs import train_in

from flyte_ddp.catalog import TORCHVISION_WEIGHTS
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.models.sidecar import ImageInput
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.encoded.cropping import crop_to_square, middle_crop
from flyte_ddp.datasets.prepared import open_prepared
from flyte_ddp.datasets.prepared_set import PreparedSet
from flyte_ddp.export import exporting
from flyte_ddp.export.exporting import Comparison, export_onnx_if_equal
from flyte_ddp.export.graphs import ServedImages, compute_middle_square_side
from flyte_ddp.export.onnx_process import OnnxProcess
from flyte_ddp.predict.prediction_batches import SavedModel, read_test_batches

OWN_MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self, classes, inputs):
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(3), nn.Linear(inputs, classes)

    def forward(self, x):
        return self.last(self.norm(x).view(len(x), -1) + x.view(len(x), -1))

def model(num_classes, input_shape):
    return Model(num_classes, 3 * input_shape[1] * input_shape[2])
"""
QUIET = Settings(progress="off", wandb_mode="disabled", checkpoint_seconds=0.0)


class Trained(NamedTuple):
    """A run's model and its data set."""

    model: SavedModel
    data: PreparedSet

    def export(self, folder: Path) -> Comparison:
        return export_onnx_if_equal(self.model, self.data, folder)


def train(hp: Hyperparameters, data: Path, folder: Path, settings: Settings = QUIET) -> Trained:
    run = train_in(folder, hp, data, settings)
    return Trained(SavedModel(run.model, run.sidecar, settings), open_prepared(data))


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(Hyperparameters(num_ranks=1, epochs=1, image_size=16), digits, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    found = trained.export(folder)
    assert found.passed
    assert 0 < found.worst < 1e-4
    return folder


def test_a_damaged_bias_is_caught(exported: Path, trained: Trained, tmp_path: Path) -> None:
    """A tenth of the logits' range on one class is enough."""
    logits = outputs_of(trained)
    step = 0.1 * np.ptp(logits)
    model = onnx.load(exported / "model.onnx")
    [bias] = [one for one in model.graph.initializer if list(one.dims) == [10] and "bias" in one.name]
    values = numpy_helper.to_array(bias).copy()
    values[3] += step
    bias.CopyFrom(numpy_helper.from_array(values, bias.name))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "write_onnx", lambda *given: shutil.copy(tmp_path / "model.onnx", given[-1]))
        found = trained.export(tmp_path)
    assert not found.passed
    assert found.worst == pytest.approx(step, rel=1e-3)


def outputs_of(trained: Trained) -> np.ndarray:
    batches = read_test_batches(trained.model, trained.data)
    return np.concatenate([trained.model.compute_outputs(batch.inputs).numpy() for batch in batches])


def test_a_process_that_cannot_import_torch_answers(exported: Path, tmp_path: Path) -> None:
    images = np.zeros((2, 9, 9, 1), np.uint8)
    with OnnxProcess(exported / "model.onnx", 1) as onnxruntime:
        assert onnxruntime.compute_batch_outputs({"images": images})["logits"].shape == (2, 10)
        maps = Path(f"/proc/{onnxruntime.process.pid}/maps").read_text()
        assert "onnxruntime" in maps
        assert "libtorch" not in maps
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with OnnxProcess(tmp_path / "model.onnx", 1) as broken, pytest.raises(OSError, match="cannot run the model"):
        broken.compute_batch_outputs({"images": images})


def test_the_middles_side_is_pythons() -> None:
    shares = {side / shorter for known in TORCHVISION_WEIGHTS.values() for _, side, shorter in known.values()}
    assert 224 / 256 in shares
    for share in shares:
        for size in range(1, 1000):
            assert compute_middle_square_side(size, share) == middle_crop(size, 2 * size, share).height


@pytest.mark.parametrize(("side", "share"), [(32, 224 / 256), (224, 224 / 232)])
@pytest.mark.parametrize("size", [(375, 500), (500, 333), (256, 256), (17, 9), (28, 90), (2, 2)])
def test_pixels_are_those_that_training_evaluates(side: int, share: float, size: tuple[int, int]) -> None:
    """torch's own resizing of bytes, by another way: at most one pixel in a thousand is one off."""
    random = np.random.default_rng(sum(size))
    rough = Image.fromarray(random.integers(0, 256, (size[0] // 8 + 2, size[1] // 8 + 2, 3), dtype=np.uint8))
    image = np.array(rough.resize(size[::-1], Image.Resampling.BICUBIC))
    sizes = {"channels": 3, "height": side, "width": side}
    takes = ImageInput(**sizes, mean=[0.0] * 3, std=[1 / 255] * 3, crop="middle", crop_share=share)
    served = ServedImages(torch.nn.Identity(), replace(make_sidecar(), input=takes))
    with torch.no_grad():
        found = served({"images": torch.from_numpy(image)[None]})["logits"][0].permute(1, 2, 0).round().numpy()
    differences = np.abs(found - crop_to_square(image, side, share=share))
    assert differences.max() <= 1
    assert (differences > 0).mean() <= 1e-3


@pytest.mark.slow
@pytest.mark.exhaustive
def test_images_of_many_sizes_and_a_users_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model takes the middle of photos, and views of them; some cannot be decoded.

    In memory, an image's channels are one after the other, as training gives them.
    """
    (tmp_path / "mine_with_views.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    random = np.random.default_rng(0)
    for number in range(60):
        height, width = random.integers(20, 60, 2).tolist()
        path = tmp_path / "images" / ("ant", "bee")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shade = np.full((height, width, 3), 60 + 100 * (number % 2))
        Image.fromarray((shade + random.integers(-50, 50, (height, width, 3))).astype(np.uint8)).save(path)
    (tmp_path / "images/ant/bad.png").write_bytes(b"no image")
    dataset, settings = f"image_folder:{tmp_path / 'images'}", quiet(tmp_path)
    data = fetch(dataset, "", tmp_path / "data", test_dataset=dataset, progress="off")
    own = {"model": "mine_with_views:model", "image_size": 32, "num_ranks": 1, "epochs": 2, "bad_samples": 2}
    hp = Hyperparameters(dataset=dataset, test_dataset=dataset, **own)
    trained = train(hp, data, tmp_path / "run", settings)
    found = trained.export(tmp_path)
    assert found.passed, found
