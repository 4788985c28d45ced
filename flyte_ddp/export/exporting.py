"""Exporting a model as ONNX and .pt2 with golden requests, and comparing the ONNX with torch on all test samples."""

import io
import logging
import math
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.images import ImageArrays
from flyte_ddp.datasets.prepared import PreparedSet, order_test_split
from flyte_ddp.errors import UnreachableError, install_hint
from flyte_ddp.export.onnx_process import OnnxProcess
from flyte_ddp.export.served import ServedModel
from flyte_ddp.loading.cropping import crop_to_square
from flyte_ddp.loading.decoding import DecodingError, Pixels
from flyte_ddp.loading.encoded import Encoded, decode_or_refetch, map_samples
from flyte_ddp.loading.opening import open_image_reader
from flyte_ddp.machine import count_cores
from flyte_ddp.models import artifacts
from flyte_ddp.settings import Settings

ONNX, PT2, GOLDEN, CHECK = "model.onnx", "model.pt2", "golden.npz", "serve_check.py"
REQUESTS, GOLDEN_BYTES = 16, 32 * 2**20  # golden requests; fewer if their images are larger in all
BATCH_SIZES = (1, 7, 64)  # of several, as a graph may have taken the size of a batch for a constant
TOLERANCE = {"cpu": 1e-3, "cuda": 5e-3}  # of the logits' range; a GPU's convolutions are in TF32, of 10 bits

Image = NDArray[np.uint8]


class TorchLogits(NamedTuple):
    """Torch's logits on the test samples that can be decoded, one after the other: all may be gigabytes.

    Other outputs than logits are compared as they are.
    """

    rows: Iterable[NDArray[np.float32]]  # [classes], or of any shape, of each sample, in the split's order
    samples: int
    spread: float  # the largest of all logits minus the smallest


@dataclass
class Comparison:
    """How far an ONNX's logits are from torch's."""

    tolerance: float  # the largest difference of a logit that is allowed
    of_classes: bool = True  # whether the outputs are logits of which the largest is the sample's class
    worst: float = 0.0  # the largest difference so far
    # numbers of samples with another class than torch's, whose two largest logits differ by more than the tolerance
    others: set[int] = field(default_factory=set)

    @property
    def passed(self) -> bool:
        """Whether all differences are within the tolerance, and no sample has another class."""
        return self.worst <= self.tolerance and not self.others

    def add_batch(self, first_sample: int, onnx_logits: NDArray[np.float32], torch_logits: NDArray[np.float32]) -> None:
        """Add the ONNX's and torch's outputs [n, ...] of the samples from ``first_sample`` on to the comparison."""
        self.worst = max(self.worst, float(np.nan_to_num(np.abs(onnx_logits - torch_logits), nan=np.inf).max()))
        if not self.of_classes:
            return
        second, best = np.sort(torch_logits, axis=1)[:, -2:].T
        wrong = (onnx_logits.argmax(axis=1) != torch_logits.argmax(axis=1)) & (best - second > self.tolerance)
        self.others.update((first_sample + np.flatnonzero(wrong)).tolist())


class NotExportedError(Exception):
    """There is no ONNX of this model: the extra is not installed, or the exporter cannot follow the model's code."""


def export_model(
    model: tuple[Path, Path],
    split: PreparedSet,
    logits: TorchLogits,
    folder: Path,
    *,
    device: str = "cpu",
    settings: Settings | None = None,
) -> Comparison:
    """Export ``model.pt`` and ``model.json``, compare the ONNX with torch on all test samples; return the comparison.

    Writes ``model.onnx``, ``model.pt2``, ``golden.npz`` and ``serve_check.py`` into an existing folder: none of them if
    the comparison does not pass, and no .pt2 if torch cannot write or run it. Runs the code that ``model.json`` names.
    Reads the whole test split, downloading shards into the cache of ``settings``. Runs the ONNX in a new process.
    Silences torch's loggers, warnings and sys.stderr of this process while the exporters run. ``device``, cpu or cuda,
    is where torch computed its logits; it decides the tolerance. Raises UnreachableError if the storage of the test
    split does not answer; NotExportedError if the extra ``export`` is not installed, or after any other exception.
    """
    if not isinstance(split, (ImageArrays, EncodedSet)):
        raise NotExportedError("its inputs are no images")
    settings = settings or Settings()
    with TemporaryDirectory(dir=folder) as name:  # so that files appear only if the comparison passes
        made = Path(name)
        try:
            loaded, sidecar = artifacts.load_model(*model)
            served = ServedModel(loaded, sidecar).eval()
            write_onnx_and_pt2(served, made)
            of_classes = bool(sidecar["classes"]) and not sidecar.get("target_shape")
            found = Comparison(TOLERANCE[device] * logits.spread, of_classes)
            images = read_test_images(split, served.channels, settings)
            golden = compare_logits(made / ONNX, served, images, logits, found)
            if found.passed:
                np.savez_compressed(made / GOLDEN, tolerance=found.tolerance, **golden)
                shutil.copyfile(Path(__file__).with_name(CHECK), made / CHECK)
                for path in made.iterdir():
                    path.rename(folder / path.name)
        except (NotExportedError, UnreachableError):
            raise
        except Exception as error:  # a full disk, or any error of the user's model
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            line = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
            raise NotExportedError(f"{type(cause).__name__}: {line[:200]}") from error
    return found


def write_onnx_and_pt2(served: ServedModel, folder: Path) -> None:
    """Write ``model.onnx`` into a folder, and ``model.pt2`` if torch can write, load and run it with the same logits.

    Silences torch's loggers, warnings and sys.stderr meanwhile. Raises NotExportedError if the extra ``export`` is not
    installed; exporters' exceptions go through.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise NotExportedError(f"{error.name} is not installed: {install_hint('export')}") from error
    shape = 2, served.height + 1, served.width + 2, served.channels  # two images, as exporters take 1 for a constant
    images = (torch.arange(math.prod(shape)).remainder(251).to(torch.uint8).reshape(shape),)
    sizes = ({place: torch.export.Dim(name, min=min(place + 1, 2)) for place, name in enumerate("nhw")},)
    with silence_torch(), torch.no_grad():
        try:
            program = torch.export.export(served, images, dynamic_shapes=sizes)
        except Exception:  # of code that makes a number of a size, such as len(images), which the other way understands
            program = torch.export.export(served, images, dynamic_shapes=sizes, strict=True)
        written: Any = torch.onnx.export(
            program, (), dynamo=True, input_names=["images"], output_names=["logits"], verbose=False
        )
        written.save(folder / ONNX, external_data=False)
        try:
            torch.export.save(program, folder / PT2)
            torch.testing.assert_close(torch.export.load(folder / PT2).module()(*images), served(*images))
        except Exception:  # a version needs no .pt2
            (folder / PT2).unlink(missing_ok=True)


@contextmanager
def silence_torch() -> Iterator[None]:
    """Silence torch's loggers, Python warnings and sys.stderr of the whole process in the block; imports torch._dynamo.

    Exporters try several ways, and log a traceback for each failure, which is hidden. If all fail, they raise.
    """
    import torch._dynamo  # noqa: F401  # makes its loggers

    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    nothing = logging.Filter("none of torch's loggers")  # lets through what a logger of that name logs
    for handler in handlers:
        handler.addFilter(nothing)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # some graphs are printed
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(nothing)


def compare_logits(
    path: Path, served: ServedModel, images: Iterator[Image], logits: TorchLogits, found: Comparison
) -> dict[str, Any]:
    """Run the ONNX at ``path`` on all images in a new process; add its differences from torch to ``found``.

    Sends each image alone and in batches of BATCH_SIZES (1, 7, 64); waits without a timeout. Returns golden requests:
    up to 16 images, evenly spread over the test split, as ``image_<number>``, and torch's ``logits`` of them. Keeps
    these and 64 images in memory. Raises OSError if the process ends, ValueError if images and logits differ in number.
    """
    samples = logits.samples
    waiting: dict[int, list[tuple[Image, NDArray[np.float32]]]] = {size: [] for size in BATCH_SIZES}
    spread, size_of_golden = {*np.linspace(0, samples - 1, REQUESTS, dtype=int).tolist()}, 0
    golden: dict[str, Image] = {}
    golden_logits, place = [], -1
    with OnnxProcess(path, count_cores()) as onnx:
        for place, (expected, image) in enumerate(zip(logits.rows, images, strict=False)):
            if place in spread and (not golden or size_of_golden + image.nbytes <= GOLDEN_BYTES):
                golden[f"image_{place:09d}"], size_of_golden = image, size_of_golden + image.nbytes
                golden_logits.append(expected)
            of_one_size = place_on_common_canvas(image, served)
            for size, batch in waiting.items():
                batch.append((image if size == 1 else of_one_size, expected))
                if len(batch) == size or place + 1 == samples:
                    batch_images, of_torch = map(np.stack, zip(*batch, strict=True))
                    found.add_batch(place + 1 - len(batch), onnx.compute_logits(batch_images), of_torch)
                    batch.clear()
    if place + 1 != samples or next(images, None) is not None:
        raise ValueError(f"the test split has other images now than the {samples} that torch has answered")
    return {**golden, "logits": np.stack(golden_logits)}


def read_test_images(data: PreparedSet, channels: int, settings: Settings) -> Iterator[Image]:
    """Yield the images of the test split that can be decoded, uint8 [H, W, channels], in the split's order.

    Images are neither cropped nor resized; grey ones become RGB if ``channels`` is 3. Encoded images are read and
    decoded by threads; remote shards are downloaded into the cache. Raises UserError if the data cannot be read.
    """
    if isinstance(data, ImageArrays):
        for image in data.test_images:
            yield np.repeat(image, channels // image.shape[2], axis=2)
        return
    assert isinstance(data, EncodedSet)  # others are not exported
    order = order_test_split(data)
    with closing(open_image_reader(data.test_source, settings)) as images:

        def decode_or_none(sample: int, found: Encoded) -> Pixels | None:
            try:
                return decode_or_refetch(images, sample, found)[0]
            except DecodingError:
                return None

        samples, threads = order.samples(slice(0, len(order))), settings.loader_threads or count_cores()
        ahead = 2 * threads  # of images that may be large
        decoded = map_samples(images, samples, threads, decode_or_none, ahead)
        yield from (image for image in decoded if image is not None)


def place_on_common_canvas(image: Image, served: ServedModel) -> Image:
    """Return an image with the same logits as ``image``, in the size that all images of a batch have.

    For a model that crops the middle, returns a black square with its resized middle; for others the image itself.
    """
    if not served.middle:
        return image
    side = served.height
    square = np.zeros((round(side / served.share), round(side / served.share), served.channels), dtype=np.uint8)
    start = (len(square) - side) // 2
    square[start : start + side, start : start + side] = crop_to_square(image, side, share=served.share)
    return square
