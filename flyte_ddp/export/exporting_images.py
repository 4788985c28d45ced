"""Exporting a model of images, which come in any size: the input ``images``, and the output ``logits``."""

import math
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.images import ImageArrays
from flyte_ddp.datasets.prepared import PreparedSet, has_pictures, order_test_split
from flyte_ddp.export.comparison import BATCH_SIZES, Batches, Comparison, compare_outputs
from flyte_ddp.export.graphs import ONNX, write_graphs
from flyte_ddp.export.served import ServedModel
from flyte_ddp.loading.cropping import crop_to_square
from flyte_ddp.loading.decoding import DecodingError, Pixels, decode_image
from flyte_ddp.loading.encoded import Encoded, map_samples
from flyte_ddp.loading.opening import open_image_reader
from flyte_ddp.loading.opening_items import open_items
from flyte_ddp.machine.resources import count_cores
from flyte_ddp.models import artifacts
from flyte_ddp.models.inputs import prepare_inputs
from flyte_ddp.objectives.segmentation import logits_of
from flyte_ddp.order.random_state import keep_random_state
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.settings import Settings

Image = NDArray[np.uint8]


def export_images_model(model: SavedModel, data: PreparedSet, folder: Path) -> tuple[Comparison, dict[str, Any]]:
    """Write ``model.onnx`` and ``model.pt2`` into a folder; return :func:`compare_outputs` on all test samples."""
    on_cpu, sidecar = artifacts.load_model(*model.files)
    served = ServedModel(on_cpu, sidecar).eval()
    write_onnx_and_pt2(served, folder)
    found = {"logits": Comparison(of_classes=bool(model.classes) and not sidecar.get("target_shape"))}
    seed = int(sidecar.get("hyperparameters", {}).get("seed", 0))
    batches = compute_batches(model, served, read_test_images(data, served.channels, model.settings, seed))
    return compare_outputs(folder / ONNX, batches, len(order_test_split(data)), found, model.device.type)


def write_onnx_and_pt2(served: ServedModel, folder: Path) -> None:
    shape = 2, served.height + 1, served.width + 2, served.channels  # two images, as exporters take 1 for a constant
    images = torch.arange(math.prod(shape)).remainder(251).to(torch.uint8).reshape(shape)
    sizes = {place: torch.export.Dim(name, min=min(place + 1, 2)) for place, name in enumerate("nhw")}
    write_graphs(served, images, sizes, folder, inputs=["images"], outputs=["logits"])


def compute_batches(model: SavedModel, served: ServedModel, images: Iterator[Image]) -> Batches:
    """Yield batches of BATCH_SIZES images each, and torch's logits of them; one image alone has its own size."""
    start = 0
    while found := [*islice(images, max(BATCH_SIZES))]:
        cropped = [crop_to_square(each, served.height, share=served.share) if served.middle else each for each in found]
        inputs = prepare_inputs(torch.from_numpy(np.stack(cropped)).to(model.device), model.spec)
        logits = logits_of(model.compute_outputs(inputs)).float().cpu().numpy()
        of_one_size = [place_on_canvas(each, served) if served.middle else each for each in cropped]
        for size in BATCH_SIZES:
            for first in range(0, len(found), size):
                part = slice(first, min(first + size, len(found)))
                batch = np.stack((found if size == 1 else of_one_size)[part])
                yield slice(start + part.start, start + part.stop), {"images": batch}, {"logits": logits[part]}
        start += len(found)


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


def place_on_canvas(cropped: Image, served: ServedModel) -> Image:
    """Return the size of all images of a batch around a cropped one: its logits are those of the whole image."""
    side = served.height
    square = np.zeros((round(side / served.share), round(side / served.share), served.channels), dtype=np.uint8)
    start = (len(square) - side) // 2
    square[start : start + side, start : start + side] = cropped
    return square
