"""User-defined functions that augment and decode samples, named in tests as ``own_loading:...``."""

import io
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

Pair = tuple[Any, Any]
V2 = v2.Compose([v2.RandomResizedCrop(8, scale=(0.5, 1.0)), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4)])


def draws_of_all(image: np.ndarray, target: Any) -> Pair:
    """Write draws of Python, NumPy and torch into the first three pixels."""
    of_numpy = np.random.randint(256)  # noqa: NPY002
    drawn = random.randrange(256), of_numpy, int(torch.randint(256, ()))
    image.reshape(-1)[:3] = drawn
    return image, target


def torchvision_pipeline(image: np.ndarray, target: Any) -> Pair:
    return V2(v2.functional.to_image(image)), target


def flip(image: np.ndarray, mask: np.ndarray) -> Pair:
    """Mirror image and mask by torchvision, which handles masks."""
    return v2.RandomHorizontalFlip()(v2.functional.to_image(image), tv_tensors.Mask(mask))


def leave_pid(image: np.ndarray, target: Any) -> Pair:
    """Write the process id into the folder of temporary files, and ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = Path(os.environ["TMPDIR"], "started")
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    return image, target


class Fake:
    """Draws like Albumentations: from a separate generator, which is seeded by ``set_random_seed`` only."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def set_random_seed(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def __call__(self, *, image: np.ndarray, mask: Any) -> dict[str, Any]:
        if np.ndim(mask) and self.generator.random() < 0.5:
            image, mask = image[:, ::-1], mask[:, ::-1]
        return {"image": image ^ self.generator.integers(256, dtype=np.uint8), "mask": mask}


PIPELINE = Fake()


def albumentations_pipeline(image: np.ndarray, mask: Any) -> Pair:
    changed = PIPELINE(image=image, mask=mask)
    return changed["image"], changed["mask"]


class Stateful:
    """A class with one object in each process."""

    def __init__(self) -> None:
        self.pipeline = Fake()

    def __call__(self, image: np.ndarray, target: Any) -> Pair:
        return self.pipeline(image=image, mask=target)["image"], target


def fail(image: np.ndarray, target: Any) -> Pair:
    raise ZeroDivisionError("the augmentation's own words")


def too_small(image: np.ndarray, target: Any) -> Pair:
    return image[1:], target


def float_picture(image: np.ndarray, target: Any) -> Pair:
    return Image.fromarray(image[..., 0].astype(np.float32)), target


def floats(image: np.ndarray, target: Any) -> Pair:
    return image / 255, target


def another_class(image: np.ndarray, target: Any) -> Pair:
    return image, target + 10


def half_a_class(image: np.ndarray, target: Any) -> Pair:
    return image, target / 2


def mask_image(image: np.ndarray, target: Any) -> Pair:
    return np.ma.masked_equal(image, image.max()), target


def mask_target(image: np.ndarray, target: Any) -> Pair:
    return image, np.ma.masked_equal([target, 1], target)


def only_the_image(image: np.ndarray, target: Any) -> Any:
    return image


def members(sample: dict[str, Any]) -> Pair:
    """Return an image, and labels from JSON."""
    return Image.open(io.BytesIO(sample[".png"])), np.array(json.loads(sample[".json"])["labels"], np.float32)


def half_labels(sample: dict[str, Any]) -> Pair:
    """As ``members``, with 0.5 for each positive label."""
    image, labels = members(sample)
    return image, labels / 2


def class_of(sample: dict[str, Any]) -> Pair:
    """Return an image, and a class from JSON."""
    return Image.open(io.BytesIO(sample[".png"])), json.loads(sample[".json"])["labels"].index(1)


def with_mask(sample: dict[str, Any]) -> Pair:
    return Image.open(io.BytesIO(sample[".png"])), np.load(io.BytesIO(sample[".npy"]))


def number_in_name(sample: dict[str, Any]) -> Pair:
    """Return an image, and the number in a name such as red/7.jpg."""
    assert sample.keys() == {".jpg", "__key__"}
    return Image.open(io.BytesIO(sample[".jpg"])), float(sample["__key__"].rpartition("/")[2])


def wait_for_go(sample: dict[str, Any]) -> Pair:
    """As ``number_in_name`` with a class. Waits for the file ``go`` in the folder of temporary files."""
    folder = Path(os.environ["TMPDIR"])
    if not (folder / "go").exists():
        (folder / "waits").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    image, number = number_in_name(sample)
    return image, int(number) % 3


class Shared:
    """The pipeline is an attribute of the class, not of the object."""

    pipeline = Fake()

    def __call__(self, image: np.ndarray, target: Any) -> Pair:
        return self.pipeline(image=image, mask=target)["image"], target


def noisy(sample: dict[str, Any]) -> Pair:
    """Decode, and draw from all three generators."""
    draws = [random.randrange(256), np.random.randint(256), int(torch.randint(256, ()))]  # noqa: NPY002
    return np.broadcast_to(np.uint8(draws), (8, 8, 3)).copy(), len(sample["__key__"]) % 2
