"""Pack a folder of images or a published data set into shards."""

import io
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from flyte_ddp import catalog
from flyte_ddp.core.errors import UserError, unknown_name_error
from flyte_ddp.core.progress import Progress
from flyte_ddp.datasets.encoded.image_list import list_images
from flyte_ddp.datasets.fetching import fetch
from flyte_ddp.datasets.sample_arrays import open_arrays
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.shards.packing import Members, pack_samples


def pack_source(source: str, folder: Path, *, split: str = "train", **options: Any) -> ShardIndex:
    """Pack a source into shards and an index in ``folder``, and return the index.

    A published data set is first downloaded into a temporary folder, which is deleted at the end. Prints notes about a
    folder of images to stderr.

    Args:
        source: A name in ``catalog.DATASETS``, or a folder or prefix of images (``class/name.jpg``).
        folder: The folder for the shards and the index.
        split: "train" or "test" of a published data set. A folder of images is always "train".
        options: Keyword arguments of :func:`flyte_ddp.shards.packing.pack_samples`.

    Raises:
        UserError: The split or an option is unfit, the source cannot be read, or the files exist or cannot be written.
    """
    if not source:
        raise UserError(f"source={source!r}: give a folder of images (class/name.jpg), or the name of a data set")
    if split not in ("train", "test"):
        raise unknown_name_error("split", split, ("train", "test"))
    if source not in catalog.DATASETS:
        if split != "train":
            raise UserError(
                f"split={split!r}: a folder of images is one split; give the folder of the split that you want"
            )
        return pack_image_folder(source, folder, **options)
    with tempfile.TemporaryDirectory(prefix="flyte-ddp.") as data:
        arrays = open_arrays(fetch(source, "", Path(data) / source, progress="off"))
        images, labels = (getattr(arrays, f"{split}_{what}") for what in ("inputs", "targets"))
        width = len(str(len(images) - 1))

        def encode_sample_as_png(number: int) -> tuple[str, Members]:
            pixels, buffer = images[number], io.BytesIO()
            Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG")
            return f"{number:0{width}d}", {".png": buffer.getvalue(), ".cls": str(labels[number]).encode()}

        return pack_samples(encode_sample_as_png, len(images), folder, classes=arrays.classes, **options)


def pack_image_folder(address: str, folder: Path, **options: Any) -> ShardIndex:
    """Pack the images below ``address`` (``class/name.jpg``) into shards in ``folder``, and return the index.

    The bytes of the images stay unchanged. Prints notes about the images to stderr. ``options`` are keyword arguments
    of :func:`flyte_ddp.shards.packing.pack_samples`.

    Raises:
        UserError: An image cannot be read, an option is unfit, or the files exist or cannot be written.
    """
    images = list_images(address)
    for line in images.describe_images():
        Progress(options.get("progress", "auto")).print_note(line)
    keys = make_sample_keys(images.names)

    def make_sample(number: int) -> tuple[str, Members]:
        extension = images.names[number].rpartition(".")[2].lower()
        return keys[number], {f".{extension}": images.read_image(number), ".cls": str(images.labels[number]).encode()}

    return pack_samples(make_sample, len(images.names), folder, classes=images.classes, **options)


def make_sample_keys(names: Iterable[str]) -> list[str]:
    """Return a unique key for each file name (``class/name.jpg``), in order.

    A key is the path without the extension. Further dots of the last part become "%2E", and dots of folders stay. If a
    key exists already, "%2E" and the extension are added until the key is unique.
    """
    keys: dict[str, None] = {}
    for name in names:
        stem, _, extension = name.rpartition(".")
        place, _, last = stem.rpartition("/")  # a key in a tar file ends at the name's first dot
        key = f"{place}/{last.replace('.', '%2E')}"
        while key in keys:  # for example, a.png beside a.jpg
            key += f"%2E{extension}"
        keys[key] = None
    return list(keys)
