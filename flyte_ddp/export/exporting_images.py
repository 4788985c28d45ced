"""Exporting a model of images, which come in any size: the input ``images``, and the output ``logits``."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.images import ImageArrays
from flyte_ddp.datasets.prepared import PreparedSet, has_pictures, order_test_split
from flyte_ddp.export.comparison import BATCH_SIZES, Batches, Comparison, compare_outputs
from flyte_ddp.export.graphs import ONNX, write_onnx
from flyte_ddp.export.served import ServedModel
from flyte_ddp.loading.decoding import DecodingError, Pixels, decode_image
from flyte_ddp.loading.encoded import Encoded, map_samples
from flyte_ddp.loading.opening import open_image_reader
from flyte_ddp.loading.opening_items import open_items
from flyte_ddp.machine.resources import count_cores
from flyte_ddp.models import artifacts
from flyte_ddp.objectives.segmentation import logits_of
from flyte_ddp.order.random_state import keep_random_state
from flyte_ddp.predict.prediction_batches import SavedModel, read_test_split
from flyte_ddp.settings import Settings

Image = NDArray[np.uint8]
MOST_BYTES = 2**28  # of an image that is repeated


def export_images_model(model: SavedModel, data: PreparedSet, folder: Path) -> Comparison:
    """Write ``model.onnx`` into a folder; return :func:`compare_outputs` on all test samples."""
    on_cpu, sidecar = artifacts.load_model(*model.files)
    served = ServedModel(on_cpu, sidecar).eval()
    write_images_onnx(served, folder)
    found = {"logits": Comparison(of_classes=bool(model.classes) and not sidecar.get("target_shape"))}
    seed = int(sidecar.get("hyperparameters", {}).get("seed", 0))
    images = read_test_images(data, served.channels, model.settings, seed)
    batches = make_batches(images, compute_logits(model, data))
    return compare_outputs(folder / ONNX, batches, found, model.device.type)


def write_images_onnx(served: ServedModel, folder: Path) -> None:
    shape = 2, served.height + 1, served.width + 2, served.channels  # two images, as exporters take 1 for a constant
    images = torch.arange(math.prod(shape)).remainder(251).to(torch.uint8).reshape(shape)
    sizes = {place: torch.export.Dim(name, min=min(place + 1, 2)) for place, name in enumerate("nhw")}
    write_onnx(served, images, sizes, folder, inputs=["images"], outputs=["logits"])


def compute_logits(model: SavedModel, data: PreparedSet) -> Iterator[NDArray[np.float32]]:
    """Yield torch's logits of each decodable test sample, with the user's own ``sample`` as in the judgement."""
    for batch in read_test_split(model, data):
        if len(batch.inputs):
            yield from logits_of(model.compute_outputs(batch.inputs)).float().cpu().numpy()


def make_batches(images: Iterator[Image], logits: Iterator[NDArray[np.float32]]) -> Batches:
    """Yield each image alone, of its own size, with its logits, and the first repeated in the other BATCH_SIZES."""
    for place, (image, row) in enumerate(zip(images, logits, strict=True)):
        sizes = [size for size in BATCH_SIZES if size * image.nbytes <= MOST_BYTES] if place == 0 else []
        for size in sizes or BATCH_SIZES[:1]:
            repeated = {"images": np.repeat(image[None], size, 0)}, {"logits": np.repeat(row[None], size, 0)}
            yield [place] * size, *repeated


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
