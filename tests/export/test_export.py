"""Models as ONNX and .pt2, which answer as torch does wherever they are asked."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from encoded_runs import quiet
from onnx import numpy_helper
from PIL import Image

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.prepared import open_prepared
from flyte_ddp.export import exporting
from flyte_ddp.export.exporting import NotExportedError, TorchLogits, export_model
from flyte_ddp.export.onnx_process import OnnxProcess
from flyte_ddp.export.served import ServedModel, middle_square_side
from flyte_ddp.loading.cropping import crop_to_square, middle_crop
from flyte_ddp.models.artifacts import load_model, parse_input_spec
from flyte_ddp.models.images import prepare_images
from flyte_ddp.predict.saved_model import SavedModel
from flyte_ddp.release.evaluation import compute_logits_of_split
from flyte_ddp.run import Result, run_training
from flyte_ddp.settings import Settings

OWN_MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self, classes, inputs):
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(3), nn.Linear(inputs, classes)

    def forward(self, x):
        seen = self.norm(x.repeat(1, 3, 1, 1)).view(len(x), -1)
        return self.last(seen + x.view(len(x), -1).repeat(1, 3))

def model(num_classes, input_shape):
    return Model(num_classes, 3 * input_shape[1] * input_shape[2])
"""
QUIET = Settings(progress="off", wandb_mode="disabled", checkpoint_seconds=0.0)


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_training(
        Hyperparameters(num_ranks=1, epochs=3, image_size=16), digits, tmp_path_factory.mktemp("run"), QUIET
    )


def logits_of(model: Result, data: Path, settings: Settings = QUIET) -> np.ndarray:
    return np.stack([*compute_logits_of_split(SavedModel(model.model, model.sidecar, settings), open_prepared(data))])


def of_torch(logits: np.ndarray) -> TorchLogits:
    return TorchLogits(logits, len(logits), float(np.ptp(logits)))


@pytest.fixture(scope="module")
def exported(trained: Result, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    files = trained.model, trained.sidecar
    found = export_model(files, open_prepared(digits), of_torch(logits_of(trained, digits)), folder)
    assert found.passed
    assert 0 < found.worst < 1e-4
    return folder


def checked(folder: Path) -> subprocess.CompletedProcess[str]:
    """What serve_check.py says, in a process that has no torch."""
    blocked = folder / "blocked/torch"
    blocked.mkdir(parents=True, exist_ok=True)
    (blocked / "__init__.py").write_text("raise ImportError('no torch here')")
    command = [sys.executable, str(folder / "serve_check.py")]
    environment = {**os.environ, "PYTHONPATH": str(blocked.parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_requests_of_a_version_are_answered_alike_without_torch(exported: Path) -> None:
    assert {path.name for path in exported.iterdir()} >= {"model.onnx", "model.pt2", "golden.npz", "serve_check.py"}
    assert len((exported / "serve_check.py").read_text().splitlines()) <= 25
    ended = checked(exported)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("16 requests; logits differ by ")


def test_a_damaged_bias_is_caught(exported: Path, trained: Result, digits: Path, tmp_path: Path) -> None:
    """By the requests, and by the comparison on all samples: a tenth of the logits' range on one class is enough."""
    logits = logits_of(trained, digits)
    model = onnx.load(exported / "model.onnx")
    [bias] = [one for one in model.graph.initializer if list(one.dims) == [10] and "bias" in one.name]
    values = numpy_helper.to_array(bias).copy()
    values[3] += 0.1 * np.ptp(logits)
    bias.CopyFrom(numpy_helper.from_array(values, bias.name))
    for name in ("serve_check.py", "golden.npz"):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    onnx.save(model, tmp_path / "model.onnx")
    assert checked(tmp_path).returncode == 1
    found = exporting.Comparison(1e-3 * float(np.ptp(logits)))
    served = ServedModel(*load_model(trained.model, trained.sidecar))
    images = open_prepared(digits).test_images
    exporting.compare_logits(tmp_path / "model.onnx", served, iter(images), of_torch(logits), found)
    assert not found.passed
    assert found.worst == pytest.approx(0.1 * np.ptp(logits), rel=1e-3)
    truth = logits.argmax(axis=1) != (logits + 0.1 * np.ptp(logits) * np.eye(10)[3]).argmax(axis=1)
    assert found.others
    assert found.others <= set(np.flatnonzero(truth).tolist())


def test_what_does_not_answer_alike_is_not_handed_out(trained: Result, digits: Path, tmp_path: Path) -> None:
    wrong = logits_of(trained, digits) + 1
    found = export_model((trained.model, trained.sidecar), open_prepared(digits), of_torch(wrong), tmp_path)
    assert not found.passed
    assert not [*tmp_path.iterdir()], "the .pt2 is of the same graph"


def test_the_pt2_answers_as_the_model(exported: Path, trained: Result) -> None:
    model, sidecar = load_model(trained.model, trained.sidecar)
    images = torch.randint(0, 256, (5, 13, 21, 1), dtype=torch.uint8)
    served = torch.export.load(exported / "model.pt2").module()
    with torch.no_grad():
        expected = model(prepare_images(images, parse_input_spec(sidecar)))
        torch.testing.assert_close(served(images), expected, rtol=1e-4, atol=1e-5)


def depends_on_values(self: ServedModel, images: torch.Tensor) -> torch.Tensor:
    return images.float() if images.sum().item() > 7 else images


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("where", "name", "fault", "said"),
    [
        (ServedModel, "forward", depends_on_values, r"^\w+: .*Could not guard on data-dependent expression"),
        (np, "savez_compressed", full_disk, r"OSError: .*No space left on device"),
    ],
)
def test_what_cannot_be_exported_is_no_error_of_the_run(
    where: Any,
    name: str,
    fault: Any,
    said: str,
    trained: Result,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(NotExportedError, match=said):
        export_model(
            (trained.model, trained.sidecar), open_prepared(digits), of_torch(logits_of(trained, digits)), tmp_path
        )
    assert not [*tmp_path.iterdir()]
    assert not capfd.readouterr().err, "torch's loggers are silent"


def test_a_process_that_cannot_import_torch_answers(exported: Path, tmp_path: Path) -> None:
    with OnnxProcess(exported / "model.onnx", 1) as onnxruntime:
        assert onnxruntime.compute_logits(np.zeros((2, 9, 9, 1), np.uint8)).shape == (2, 10)
        maps = Path(f"/proc/{onnxruntime.process.pid}/maps").read_text()
        assert "onnxruntime" in maps
        assert "libtorch" not in maps
    broken = tmp_path / "model.onnx"
    broken.write_bytes(b"no model")
    with OnnxProcess(broken, 1) as onnxruntime, pytest.raises(OSError, match="onnxruntime cannot run it: "):
        onnxruntime.compute_logits(np.zeros((2, 9, 9, 1), np.uint8))


def test_a_users_own_model_that_takes_views(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As training gives it: in memory, an image's channels are one after the other."""
    (tmp_path / "mine_with_views.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    hp = Hyperparameters(num_ranks=1, epochs=1, model="mine_with_views:model")
    model = run_training(hp, digits, tmp_path / "run", QUIET)
    (tmp_path / "exported").mkdir()
    logits = logits_of(model, digits)
    found = export_model((model.model, model.sidecar), open_prepared(digits), of_torch(logits), tmp_path / "exported")
    assert found.passed
    assert checked(tmp_path / "exported").returncode == 0


def test_golden_requests_of_large_images_are_few(trained: Result, digits: Path, tmp_path: Path) -> None:
    logits = logits_of(trained, digits)
    found = exporting.Comparison(np.inf)
    served, images = ServedModel(*load_model(trained.model, trained.sidecar)), open_prepared(digits).test_images
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "GOLDEN_BYTES", 3 * images[0].nbytes)
        exporting.write_graphs(served.eval(), tmp_path)
        golden = exporting.compare_logits(tmp_path / "model.onnx", served, iter(images), of_torch(logits), found)
    assert [*golden] == ["image_000000000", "image_000000019", "image_000000039", "logits"]
    np.testing.assert_array_equal(golden["image_000000039"], images[39])
    np.testing.assert_array_equal(golden["logits"], logits[[0, 19, 39]])


def test_answers_to_other_images_are_no_check(trained: Result, digits: Path, tmp_path: Path) -> None:
    more = np.concatenate([logits_of(trained, digits)] * 2)
    with pytest.raises(NotExportedError, match=r"has other images now than the 594 that torch has answered$"):
        export_model((trained.model, trained.sidecar), open_prepared(digits), of_torch(more), tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_middles_side_is_pythons() -> None:
    assert all(middle_square_side(size) == middle_crop(size, 2 * size).height for size in range(1, 3000))


@pytest.mark.parametrize("side", [32, 224])
@pytest.mark.parametrize("size", [(375, 500), (500, 333), (256, 256), (73, 64), (17, 9), (28, 90), (2, 2), (1200, 801)])
def test_pixels_are_those_that_training_evaluates(side: int, size: tuple[int, int]) -> None:
    """torch's own resizing of bytes, by another way: at most one pixel in a thousand is one off."""
    random = np.random.default_rng(sum(size))
    rough = Image.fromarray(random.integers(0, 256, (size[0] // 8 + 2, size[1] // 8 + 2, 3), dtype=np.uint8))
    image = np.array(rough.resize(size[::-1], Image.Resampling.BICUBIC))
    takes = {"channels": 3, "height": side, "width": side, "mean": [0.0] * 3, "std": [1 / 255] * 3, "crop": "middle"}
    served = ServedModel(torch.nn.Identity(), {"input": takes})
    with torch.no_grad():
        found = served(torch.from_numpy(image)[None])[0].permute(1, 2, 0).round().numpy().astype(int)
    differences = np.abs(found - crop_to_square(image, side).astype(int))
    assert differences.max() <= 1
    assert (differences > 0).mean() <= 1e-3


@pytest.mark.slow
def test_images_of_many_sizes(tmp_path: Path) -> None:
    """A model that takes the middle of photos: each as it is, and in batches; some cannot be decoded."""
    random = np.random.default_rng(0)
    for number in range(90):
        height, width = random.integers(20, 60, 2).tolist()
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shade = np.full((height, width, 3), 60 + 100 * (number % 2))
        Image.fromarray((shade + random.integers(-50, 50, (height, width, 3))).astype(np.uint8)).save(path)
    (tmp_path / "images/a/bad.png").write_bytes(b"no image")
    dataset, settings = f"image_folder:{tmp_path / 'images'}", quiet(tmp_path)
    data = fetch(dataset, "", tmp_path / "data", test_dataset=dataset, progress="off")
    hp = Hyperparameters(dataset=dataset, test_dataset=dataset, image_size=32, num_ranks=1, epochs=2, bad_samples=2)
    model = run_training(hp, data, tmp_path / "run", settings)
    logits = logits_of(model, data, settings)
    assert len(logits) == 90
    (tmp_path / "exported").mkdir()
    files = model.model, model.sidecar
    found = export_model(files, open_prepared(data), of_torch(logits), tmp_path / "exported", settings=settings)
    assert found.passed, found
    ended = checked(tmp_path / "exported")
    assert ended.returncode == 0, ended.stderr
