"""Writing a model as ONNX and .pt2, beside requests with their answers, and checking the former on all test samples."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.datasets.prepared import PreparedSet
from flyte_ddp.export.answering import OnnxProcess
from flyte_ddp.export.requests import canvas, raw_images
from flyte_ddp.export.served import Served
from flyte_ddp.models import artifacts
from flyte_ddp.settings import Settings

ONNX, PT2, GOLDEN, CHECK = "model.onnx", "model.pt2", "golden.npz", "serve_check.py"
REQUESTS = 16  # golden ones
BATCH_SIZES = (1, 7, 64)
TOLERANCE = {"cpu": 1e-3, "cuda": 5e-3}  # of the logits' range; a GPU's convolutions are in TF32, of 10 bits

Image = NDArray[np.uint8]


@dataclass
class Comparison:
    """How far an exported model's logits are from those of torch.

    Args:
        expected: [N, classes] torch's.
        tolerance: what a logit may differ by.
    """

    expected: NDArray[np.float32]
    tolerance: float
    worst: float = 0.0  # difference
    others: set[int] = field(default_factory=set)  # samples of which it names another class, though torch's is clear

    @property
    def passed(self) -> bool:
        """Whether they are the same, for all that matters."""
        return self.worst <= self.tolerance and not self.others

    def add(self, first: int, found: NDArray[np.float32]) -> None:
        """Takes the answers to the samples from the first on into account."""
        expected = self.expected[first : first + len(found)]
        self.worst = max(self.worst, float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max()))
        second, best = np.sort(expected, axis=1)[:, -2:].T
        wrong = (found.argmax(axis=1) != expected.argmax(axis=1)) & (best - second > self.tolerance)
        self.others.update((first + np.flatnonzero(wrong)).tolist())


class NotExportedError(Exception):
    """There is no ONNX of this model: the extra is not installed, or the exporter cannot follow the model's code."""


def export(
    model: tuple[Path, Path],
    split: PreparedSet,
    logits: NDArray[np.float32],
    folder: Path,
    *,
    device: str = "cpu",
    settings: Settings | None = None,
) -> Comparison:
    """Writes ``model.onnx``, ``model.pt2``, ``golden.npz`` and ``serve_check.py`` into a folder.

    An ONNX that does not answer as torch does, and a .pt2 that torch cannot make, are left out.

    Args:
        model: ``model.pt`` and ``model.json``.
        split: the data set whose test samples it is checked on.
        logits: [N, classes] what torch has answered to those that can be decoded.
        folder: there is one.
        device: on which it has: cpu or cuda.
        settings: for shards: where they are cached.

    Raises:
        NotExportedError: there is no ONNX.
    """
    settings, served = settings or Settings(), Served(*artifacts.load_model(*model)).eval()
    with_onnx = folder / ONNX
    example = next(raw_images(split, served.channels, settings))
    write_onnx(served, example, with_onnx)
    write_pt2(served, example, folder / PT2)
    found = Comparison(logits, TOLERANCE[device] * float(np.ptp(logits)))
    try:
        compare(with_onnx, served, raw_images(split, served.channels, settings), found)
    except OSError as error:  # of the process that answers
        with_onnx.unlink()
        raise NotExportedError(f"onnxruntime cannot run it: {error}") from error
    if not found.passed:
        with_onnx.unlink()
    else:
        write_golden(raw_images(split, served.channels, settings), logits, folder / GOLDEN)
        shutil.copyfile(Path(__file__).with_name(CHECK), folder / CHECK)
    return found


def write_onnx(served: Served, example: Image, path: Path) -> None:
    """Writes the model for ONNX."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise NotExportedError(f"{error.name} is not installed; pip install 'flyte-ddp[export]'") from error
    try:
        with quietly():
            program: Any = torch.onnx.export(
                served,
                pair(example),
                dynamo=True,
                dynamic_shapes=any_size(),
                input_names=["images"],
                output_names=["logits"],
                verbose=False,
            )
            program.save(path, external_data=False)
    except Exception as error:  # whatever the exporter, or the user's model under it, comes up with
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise NotExportedError(f"torch.onnx cannot follow the model: {type(error).__name__}: {line[:150]}") from error


def write_pt2(served: Served, example: Image, path: Path) -> None:
    """Writes the model for torch without this library, where torch can, and if it then answers alike."""
    images = pair(example)
    try:
        with quietly(), torch.no_grad():
            torch.export.save(torch.export.export(served, images, dynamic_shapes=any_size()), path)
            again = torch.export.load(path).module()
            torch.testing.assert_close(again(*images), served(*images))
    except Exception:  # as above
        path.unlink(missing_ok=True)


def pair(example: Image) -> tuple[torch.Tensor]:
    """A batch of two images, as exporters take 1 for a constant."""
    return (torch.from_numpy(np.stack([example] * 2)),)


def any_size() -> tuple[dict[int, Any]]:
    """Of the batch, and of its images."""
    return ({place: torch.export.Dim(name, min=min(place + 1, 2)) for place, name in enumerate("nhw")},)


@contextmanager
def quietly() -> Iterator[None]:
    """Without the exporters' remarks, which are for those who write them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def compare(path: Path, served: Served, images: Iterator[Image], found: Comparison) -> None:
    """Asks a process without torch about all images: about each by itself, and in batches.

    Raises:
        OSError: the process has ended.
    """
    waiting: dict[int, list[Image]] = {size: [] for size in BATCH_SIZES}
    with OnnxProcess(path) as onnx:
        for place, image in enumerate(images):
            for size, batch in waiting.items():
                batch.append(image if size == 1 else canvas(image, served))
                if len(batch) == size or place + 1 == len(found.expected):
                    found.add(place + 1 - len(batch), onnx.answer(np.stack(batch)))
                    batch.clear()


def write_golden(images: Iterator[Image], logits: NDArray[np.float32], path: Path) -> None:
    """Writes a few images, evenly spread over the test split, with their logits."""
    chosen = sorted({*np.linspace(0, len(logits) - 1, min(REQUESTS, len(logits)), dtype=int).tolist()})
    arrays: dict[str, Any] = {f"image_{place:09d}": image for place, image in enumerate(images) if place in chosen}
    np.savez_compressed(path, logits=logits[chosen], **arrays)
