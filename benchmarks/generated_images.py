"""Generate images that resemble ImageNet's in size, in bytes and in the time that decoding takes."""

import functools
import io
from pathlib import Path

import numpy as np
from PIL import Image

from flyte_ddp.shards.packing import pack_samples

HEIGHT, WIDTH = 375, 500
CLASSES = [f"class{number}" for number in range(10)]
DIFFERENT = 500  # images; more of them are these again, under other names
QUALITY, STEEPNESS = 75, 1.4  # which make 37 KB of an image


@functools.cache
def jpeg(seed: int) -> bytes:
    """Return a JPEG of about 37 KB: coloured noise on all scales, like a photograph."""
    rng = np.random.default_rng(seed)
    frequencies = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None, :])
    frequencies[0, 0] = np.inf
    spectrum = rng.normal(size=(3, *frequencies.shape)) + 1j * rng.normal(size=(3, *frequencies.shape))
    brightness, *colours = np.fft.irfft2(spectrum / frequencies**STEEPNESS, s=(HEIGHT, WIDTH))
    planes = [brightness / brightness.std() + 0.3 * colour / colour.std() for colour in (*colours, -colours[0])]
    pixels = np.clip(128 + 50 * np.stack(planes, axis=-1), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def content(number: int) -> bytes:
    return jpeg(number % DIFFERENT)


def label(number: int) -> int:
    return number % len(CLASSES)


def write_shards(folder: Path, shards: int, samples_per_shard: int, different: int = DIFFERENT) -> Path:
    """Write shards of generated images, and return the path of the index.

    ``different`` is the number of distinct images.
    """

    def sample(number: int) -> tuple[str, dict[str, bytes]]:
        return f"{number:07d}", {".jpg": content(number % different), ".cls": str(label(number)).encode()}

    pack_samples(
        sample,
        shards * samples_per_shard,
        folder,
        classes=CLASSES,
        samples_per_shard=samples_per_shard,
        seed=None,
        progress="off",
    )
    return folder / "train.json"


def write_folder(folder: Path, images: int) -> Path:
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(images):
        (folder / CLASSES[label(number)] / f"{number:07d}.jpg").write_bytes(content(number))
    return folder
