"""Pack data sets into shards: a folder of images, a data set by its name, or a map-style data set."""

import io
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flyte_ddp import catalog
from flyte_ddp.datasets.custom import convert_sample
from flyte_ddp.datasets.fetching import fetch
from flyte_ddp.datasets.image_folder import list_images
from flyte_ddp.datasets.images import open_arrays
from flyte_ddp.datasets.on_demand_set import require_samples
from flyte_ddp.errors import UserError, unknown_name_error
from flyte_ddp.progress import Progress
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.shards.packing import Members, pack_samples
from flyte_ddp.user_code.callables import SPEC, load_callable


def pack_source(source: str, folder: Path, *, split: str = "train", **options: Any) -> ShardIndex:
    """Pack a source into shards and their index in ``folder``; return the index.

    ``source`` is a name in ``catalog.DATASETS``; a folder or prefix of images, all of the split "train"; or
    ``package.module:callable``, which is called with "" and returns a pair (training set, test set) of map-style data
    sets. ``options`` are keyword arguments of :func:`flyte_ddp.shards.packing.pack_samples`.
    """
    if split not in ("train", "test"):
        raise unknown_name_error("split", split, ("train", "test"))
    if source in catalog.DATASETS:
        with tempfile.TemporaryDirectory(prefix="flyte-ddp.") as data:
            arrays = open_arrays(fetch(source, "", Path(data) / source, progress="off"))
            images, labels = (getattr(arrays, f"{split}_{what}") for what in ("images", "labels"))
            pairs = list(zip(images, labels.tolist(), strict=True))
            return pack_images(pairs, folder, classes=arrays.classes, **options)
    if SPEC.fullmatch(source):
        both = load_callable(source)("")
        if not isinstance(both, (tuple, list)) or len(both) != 2:
            raise UserError(f"{source}: returned {type(both).__name__}; must return a pair (train, test) of data sets")
        return pack_images(both[split == "test"], folder, **options)
    if split != "train":
        raise UserError(f"split={split!r}: a folder of images is one split; give the folder of the one that you want")
    return pack_image_folder(source, folder, **options)


def pack_image_folder(address: str, folder: Path, **options: Any) -> ShardIndex:
    """Pack the files ``class/name.jpg`` below a path or prefix unchanged into ``folder``; return the shards' index."""
    images = list_images(address)
    for line in images.describe_images():
        Progress(options.get("progress", "auto")).print_note(line)
    keys = make_sample_keys(images.names)

    def make_sample(number: int) -> tuple[str, Members]:
        extension = images.names[number].rpartition(".")[2].lower()
        return keys[number], {f".{extension}": images.read_image(number), ".cls": str(images.labels[number]).encode()}

    return pack_samples(make_sample, len(images.names), folder, classes=images.classes, **options)


def make_sample_keys(names: Iterable[str]) -> list[str]:
    """Return a different key for each file: its name without the extension, and with "%2E" for other dots."""
    keys: dict[str, None] = {}
    for name in names:
        stem, _, extension = name.rpartition(".")
        place, _, last = stem.rpartition("/")  # a key in a tar file ends at the name's first dot
        key = f"{place}/{last.replace('.', '%2E')}"
        while key in keys:  # as for a.png beside a.jpg
            key += f"%2E{extension}"
        keys[key] = None
    return list(keys)


def pack_images(samples: Any, folder: Path, *, classes: Sequence[str] = (), **options: Any) -> ShardIndex:
    """Pack a map-style data set of (image, label), such as torchvision's, as lossless PNG; return the shards' index."""
    from PIL import Image

    what = f"{type(samples).__name__} to pack"
    count = require_samples(what, samples)
    width = len(str(count - 1))
    one_at_a_time = threading.Lock()  # the user's data set need not be thread-safe

    def encode_sample_as_png(number: int) -> tuple[str, Members]:
        try:
            with one_at_a_time:
                pixels, label = convert_sample(f"{what}: item {number}", samples[number])
        except OSError as error:
            raise UserError(f"{what}: sample {number} cannot be read ({error})") from error
        if label.ndim or label.dtype.kind not in "iu":
            raise UserError(f"{what}: item {number} must have a whole-number label, which a shard's .cls holds")
        if pixels.shape[2] not in (1, 3, 4):
            raise UserError(f"{what}: image {number} has {pixels.shape[2]} channels; must have 1, 3 or 4")
        buffer = io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG")
        return f"{number:0{width}d}", {".png": buffer.getvalue(), ".cls": str(label).encode()}

    named = classes if len(classes) else getattr(samples, "classes", ())
    return pack_samples(encode_sample_as_png, count, folder, classes=[str(label) for label in named], **options)
