"""Writing a model as ONNX and .pt2, beside requests with their answers, and checking the former on all test samples."""

import io
import logging
import math
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.datasets.prepared import PreparedSet
from flyte_ddp.errors import UnreachableError, how_to_install
from flyte_ddp.export.answering import OnnxProcess
from flyte_ddp.export.requests import canvas, raw_images
from flyte_ddp.export.served import Served
from flyte_ddp.hardware import cores
from flyte_ddp.models import artifacts
from flyte_ddp.settings import Settings

ONNX, PT2, GOLDEN, CHECK = "model.onnx", "model.pt2", "golden.npz", "serve_check.py"
REQUESTS, GOLDEN_BYTES = 16, 32 * 2**20  # so many golden ones, or fewer if their images are large
BATCH_SIZES = (1, 7, 64)
TOLERANCE = {"cpu": 1e-3, "cuda": 5e-3}  # of the logits' range; a GPU's convolutions are in TF32, of 10 bits

Image = NDArray[np.uint8]


class Logits(NamedTuple):
    """What torch has answered to the test samples that can be decoded; never all in memory, as it may be gigabytes."""

    rows: Iterable[NDArray[np.float32]]  # [classes] of each sample, in the split's order
    samples: int
    spread: float  # the largest of all minus the smallest


@dataclass
class Comparison:
    """How far an exported model's logits are from those of torch.

    Args:
        tolerance: what a logit may differ by.
    """

    tolerance: float
    worst: float = 0.0  # difference
    others: set[int] = field(default_factory=set)  # samples of which it names another class, though torch's is clear

    @property
    def passed(self) -> bool:
        """Whether they are the same, for all that matters."""
        return self.worst <= self.tolerance and not self.others

    def add(self, first: int, found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        """Take the answers [n, classes] to the samples from the first on into account, and torch's to the same."""
        self.worst = max(self.worst, float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max()))
        second, best = np.sort(expected, axis=1)[:, -2:].T
        wrong = (found.argmax(axis=1) != expected.argmax(axis=1)) & (best - second > self.tolerance)
        self.others.update((first + np.flatnonzero(wrong)).tolist())


class NotExportedError(Exception):
    """There is no ONNX of this model: the extra is not installed, or the exporter cannot follow the model's code."""


def export(
    model: tuple[Path, Path],
    split: PreparedSet,
    logits: Logits,
    folder: Path,
    *,
    device: str = "cpu",
    settings: Settings | None = None,
) -> Comparison:
    """Writes ``model.onnx``, ``model.pt2``, ``golden.npz`` and ``serve_check.py`` into a folder.

    All are left out where the ONNX does not answer as torch does, and a .pt2 that torch cannot make.

    Args:
        model: ``model.pt`` and ``model.json``.
        split: the data set whose test samples it is checked on.
        logits: what torch answers to those that can be decoded.
        folder: there is one.
        device: on which it has: cpu or cuda.
        settings: for shards: where they are cached.

    Raises:
        NotExportedError: there is none.
    """
    settings = settings or Settings()
    with TemporaryDirectory(dir=folder) as name:  # so that what is right gets its place at once
        made = Path(name)
        try:
            served = Served(*artifacts.load_model(*model)).eval()
            write_graphs(served, made)
            found = Comparison(TOLERANCE[device] * logits.spread)
            golden = compare(made / ONNX, served, raw_images(split, served.channels, settings), logits, found)
            if found.passed:
                np.savez_compressed(made / GOLDEN, tolerance=found.tolerance, **golden)
                shutil.copyfile(Path(__file__).with_name(CHECK), made / CHECK)
                for path in made.iterdir():
                    path.rename(folder / path.name)
        except (NotExportedError, UnreachableError):
            raise
        except Exception as error:  # a full disk, or whatever the user's model comes up with
            raise NotExportedError(innermost(error)) from error
    return found


def innermost(error: BaseException) -> str:
    """Of an error, and those that it was made from, the first one in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line[:200]}"


def write_graphs(served: Served, folder: Path) -> None:
    """Writes the model for ONNX, and for torch without this library, where that then answers alike."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise NotExportedError(f"{error.name} is not installed: {how_to_install('export')}") from error
    shape = 2, served.height + 1, served.width + 2, served.channels  # two images, as exporters take 1 for a constant
    images = (torch.arange(math.prod(shape)).remainder(251).to(torch.uint8).reshape(shape),)
    with quietly(), torch.no_grad():
        program = followed(served, images)
        written: Any = torch.onnx.export(
            program, (), dynamo=True, input_names=["images"], output_names=["logits"], verbose=False
        )
        written.save(folder / ONNX, external_data=False)
        try:
            torch.export.save(program, folder / PT2)
            torch.testing.assert_close(torch.export.load(folder / PT2).module()(*images), served(*images))
        except Exception:  # it is an extra
            (folder / PT2).unlink(missing_ok=True)


def followed(served: Served, images: tuple[torch.Tensor]) -> torch.export.ExportedProgram:
    """The model's graph, for batches of any size with images of any size; by one of the two ways that torch has."""
    sizes = ({place: torch.export.Dim(name, min=min(place + 1, 2)) for place, name in enumerate("nhw")},)
    try:
        return torch.export.export(served, images, dynamic_shapes=sizes)
    except Exception:  # of code that makes a number of a size, such as len(images), which the other way understands
        return torch.export.export(served, images, dynamic_shapes=sizes, strict=True)


@contextmanager
def quietly() -> Iterator[None]:
    """Without the exporters' remarks, and graphs on standard error, which are for those who write them."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def compare(path: Path, served: Served, images: Iterator[Image], logits: Logits, found: Comparison) -> dict[str, Any]:
    """Asks a process without torch about all images: about each by itself, and in batches.

    Returns:
        The golden requests: a few images, evenly spread over the test split, and their logits.

    Raises:
        OSError: the process has ended.
    """
    samples = logits.samples
    waiting: dict[int, list[tuple[Image, NDArray[np.float32]]]] = {size: [] for size in BATCH_SIZES}
    spread, size_of_golden = {*np.linspace(0, samples - 1, REQUESTS, dtype=int).tolist()}, 0
    golden: dict[str, Image] = {}
    golden_logits, place = [], -1
    with OnnxProcess(path, cores()) as onnx:
        for place, (expected, image) in enumerate(zip(logits.rows, images, strict=False)):
            if place in spread and (not golden or size_of_golden + image.nbytes <= GOLDEN_BYTES):
                golden[f"image_{place:09d}"], size_of_golden = image, size_of_golden + image.nbytes
                golden_logits.append(expected)
            of_one_size = canvas(image, served)
            for size, batch in waiting.items():
                batch.append((image if size == 1 else of_one_size, expected))
                if len(batch) == size or place + 1 == samples:
                    asked, answers_of_torch = map(np.stack, zip(*batch, strict=True))
                    found.add(place + 1 - len(batch), onnx.answer(asked), answers_of_torch)
                    batch.clear()
    if place + 1 != samples or next(images, None) is not None:
        raise ValueError(f"the test split has other images now than the {samples} that torch has answered")
    return {**golden, "logits": np.stack(golden_logits)}
