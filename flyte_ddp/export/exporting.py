"""Exporting a model as ONNX and .pt2 with golden requests, and comparing the ONNX with torch on all test samples."""

import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.images import ImageArrays
from flyte_ddp.datasets.prepared import ItemSet, PreparedSet, has_pictures, order_test_split
from flyte_ddp.errors import UnreachableError
from flyte_ddp.export.comparison import BATCH_SIZES, GOLDEN_BYTES, TOLERANCE, Comparison, choose_requests
from flyte_ddp.export.exporting_leaves import export_leaves_model
from flyte_ddp.export.graphs import ONNX, NotExportedError, write_graphs
from flyte_ddp.export.onnx_process import OnnxProcess
from flyte_ddp.export.served import ServedModel
from flyte_ddp.loading.cropping import crop_to_square
from flyte_ddp.loading.decoding import DecodingError, Pixels, decode_image
from flyte_ddp.loading.encoded import Encoded, map_samples
from flyte_ddp.loading.opening import open_image_reader
from flyte_ddp.loading.opening_items import open_items
from flyte_ddp.machine import count_cores
from flyte_ddp.models import artifacts
from flyte_ddp.order.random_state import keep_random_state
from flyte_ddp.settings import Settings

GOLDEN, CHECK = "golden.npz", "serve_check.py"

Image = NDArray[np.uint8]


class TorchLogits(NamedTuple):
    """Torch's logits on the test samples that can be decoded, one after the other: all may be gigabytes.

    Unused for inputs that are no images.
    """

    rows: Iterable[NDArray[np.float32]]  # [classes], or of any shape, of each sample, in the split's order
    samples: int
    spread: float  # the largest of all logits minus the smallest


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
    ``device``, cpu or cuda, is where torch computed its logits; it decides the tolerance.

    Raises UnreachableError if the storage of the test split does not answer; NotExportedError if the extra ``export``
    is not installed, or after any other exception.
    """
    settings = settings or Settings()
    with TemporaryDirectory(dir=folder) as name:  # so that files appear only if the comparison passes
        made = Path(name)
        try:
            loaded, sidecar = artifacts.load_model(*model)
            if isinstance(split, ItemSet) and not has_pictures(split):
                found, golden = export_leaves_model(loaded, sidecar, split, made, settings)
            else:
                served = ServedModel(loaded, sidecar).eval()
                write_onnx_and_pt2(served, made)
                of_classes = bool(sidecar["classes"]) and not sidecar.get("target_shape")
                found = Comparison(TOLERANCE[device] * logits.spread, of_classes)
                seed = int(sidecar.get("hyperparameters", {}).get("seed", 0))
                images = read_test_images(split, served.channels, settings, seed)
                golden = compare_logits(made / ONNX, served, images, logits, found)
            if found.passed:
                np.savez_compressed(made / GOLDEN, **golden)
                shutil.copyfile(Path(__file__).with_name(CHECK), made / CHECK)
                for path in made.iterdir():
                    path.rename(folder / path.name)
        except (NotExportedError, UnreachableError):
            raise
        except Exception as error:  # a full disk, or any error of the user's model
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [""]
            line = next((line for line in lines if "to be a constant" in line), lines[0])  # of a size that must not be
            raise NotExportedError(f"{type(cause).__name__}: {line[:200]}") from error
    return found


def write_onnx_and_pt2(served: ServedModel, folder: Path) -> None:
    shape = 2, served.height + 1, served.width + 2, served.channels  # two images, as exporters take 1 for a constant
    images = torch.arange(math.prod(shape)).remainder(251).to(torch.uint8).reshape(shape)
    sizes = {place: torch.export.Dim(name, min=min(place + 1, 2)) for place, name in enumerate("nhw")}
    write_graphs(served, images, sizes, folder, inputs=["images"], outputs=["logits"])


def compare_logits(
    path: Path, served: ServedModel, images: Iterator[Image], logits: TorchLogits, found: Comparison
) -> dict[str, Any]:
    """Run the ONNX at ``path`` on all images in a new process; add its differences from torch to ``found``.

    Returns golden requests: up to 16 images as ``image_<number>``, and torch's ``logits`` of them.
    """
    samples = logits.samples
    waiting: dict[int, list[tuple[Image, NDArray[np.float32]]]] = {size: [] for size in BATCH_SIZES}
    chosen, size_of_golden = choose_requests(samples), 0
    golden: dict[str, Image] = {}
    golden_logits, place = [], -1
    with OnnxProcess(path, count_cores()) as onnx:
        for place, (expected, image) in enumerate(zip(logits.rows, images, strict=False)):
            if place in chosen and (not golden or size_of_golden + image.nbytes <= GOLDEN_BYTES):
                golden[f"image_{place:09d}"], size_of_golden = image, size_of_golden + image.nbytes
                golden_logits.append(expected)
            of_one_size = place_on_common_canvas(image, served)
            for size, batch in waiting.items():
                batch.append((image if size == 1 else of_one_size, expected))
                if len(batch) == size or place + 1 == samples:
                    batch_images, of_torch = map(np.stack, zip(*batch, strict=True))
                    found.add_batch(
                        place + 1 - len(batch), onnx.compute_outputs({"images": batch_images})["logits"], of_torch
                    )
                    batch.clear()
    if place + 1 != samples or next(images, None) is not None:
        raise ValueError(f"the test split has other images now than the {samples} that torch has answered")
    return {**golden, "logits": np.stack(golden_logits), "tolerance": np.float64(found.tolerance)}


def read_test_images(data: PreparedSet, channels: int, settings: Settings, seed: int = 0) -> Iterator[Image]:
    """Yield the images of the test split that can be decoded, uint8 [H, W, channels], in the split's order.

    Images are neither cropped nor resized; grey ones become RGB if ``channels`` is 3. ``seed`` is for pictures on
    demand.
    """
    if isinstance(data, ImageArrays) or has_pictures(data):
        items = open_items(data)["test"]
        for sample in range(data.test_samples):
            with keep_random_state():
                pixels, _ = items.read_item(sample, seed, None)
            yield np.repeat(pixels, channels // pixels.shape[2], axis=2)
        return
    assert isinstance(data, EncodedSet)  # others are not exported
    order = order_test_split(data)
    with closing(open_image_reader(data.test_source, settings)) as images:

        def decode_or_none(_: int, found: Encoded) -> Pixels | None:
            try:
                return decode_image(found.content)
            except DecodingError:
                return None

        samples, threads = order.samples(slice(0, len(order))), settings.loaders or count_cores()
        ahead = 2 * threads  # of images that may be large
        decoded = map_samples(images, samples, threads, decode_or_none, ahead)
        yield from (image for image in decoded if image is not None)


def place_on_common_canvas(image: Image, served: ServedModel) -> Image:
    """Return an image of the size of all images of a batch, with the same logits as ``image``."""
    if not served.middle:
        return image
    side = served.height
    square = np.zeros((round(side / served.share), round(side / served.share), served.channels), dtype=np.uint8)
    start = (len(square) - side) // 2
    square[start : start + side, start : start + side] = crop_to_square(image, side, share=served.share)
    return square
