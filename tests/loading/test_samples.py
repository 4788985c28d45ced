"""A user's own augmentation and decoding, in loader processes: draws, masks, mistakes, and processes that end."""

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import own_loading
import pytest
import torch
from cli import HELPERS, ROOT

from flyte_ddp.core.errors import UserCodeError, UserError
from flyte_ddp.core.loading.arrays import open_array_batches
from flyte_ddp.core.loading.split import TargetSpec
from flyte_ddp.core.loading.user_functions import Augmentation, UserFunction, list_seedable_transforms
from flyte_ddp.core.loading.worker_sources import WorkerImages
from flyte_ddp.core.loading.workers import LoaderPool, pickle_with_mapped_files
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.order.sampling import take_slice
from flyte_ddp.datasets import SampleArrays
from flyte_ddp.datasets.items import ItemImages, Items

CPU = torch.device("cpu")
DRAWING = ("draws_of_all", "torchvision_pipeline", "albumentations_pipeline", "Stateful", "Shared")
FAILING = {
    "fail": "augment='own_loading:fail' on sample 3: ZeroDivisionError: the augmentation's own words",
    "too_small": r"augment='own_loading:too_small' returned \[7, 8, 1\] as the image of sample 3: must be \[8, 8, 1\]",
    "float_picture": "augment='own_loading:float_picture': the image of sample 3 cannot be converted to 8 bits",
    "floats": r"the image of sample 3 is float64 \[8, 8, 1\]; must be a PIL image or uint8, an array",
    "another_class": r"returned 13 as the target of sample 3: must be 0..9 with 10 classes",
    "half_a_class": r"returned float64 \[\] as the target of sample 3: must be int64 \[\]",
    "only_the_image": r"returned a ndarray for sample 3: must return \(image, target\)",
    "not_there": "has no 'not_there'",
    "mask_image": "the image of sample 3: has masked values",
    "mask_target": "the target of sample 3: has masked values",
}


@pytest.fixture(autouse=True)
def helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own code is looked for in the working directory."""
    monkeypatch.chdir(HELPERS)


def arrays(samples: int = 40, channels: int = 1) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (samples, 8, 8, channels), dtype=np.uint8), np.arange(samples) % 10


def array_images(
    images: np.ndarray, targets: np.ndarray, own: UserFunction, *, seed: int, classes: int, image_size: int
) -> ItemImages:
    kind = TargetSpec(targets.dtype, targets.shape[1:], classes)
    items = Items(SampleArrays("", images, targets, images, targets), "train")
    height, width, channels = images.shape[1:]
    spec = InputSpec(channels, height, width, (0.5,) * channels, (0.5,) * channels)
    return ItemImages(items, spec, kind, seed, augmentation=Augmentation("none", seed, own), image_size=image_size)


def loader_of(name: str, targets: np.ndarray | None = None, **sizes: Any) -> ItemImages:
    images, classes = arrays()
    own = UserFunction("augment", f"own_loading:{name}")
    return array_images(
        images, classes if targets is None else targets, own, **{"seed": 5, "classes": 10, "image_size": 0, **sizes}
    )


def two_epochs(loader: ItemImages, pool: LoaderPool | None, ranks: int) -> torch.Tensor:
    """Return the images of two epochs in batches of 16, each of which the ranks share."""
    source, order, found = WorkerImages(loader, pool, CPU), np.random.default_rng(1).permutation(40), []
    for epoch in range(2):
        batches = [order[start : start + 16] for start in range(0, 40, 16)]
        parts = [take_slice(batch, rank, ranks) for batch in batches for rank in range(ranks)]
        for part in parts:
            source.begin_batch(part, epoch)
        found += [source.load_batch(part, epoch) for part in parts]
    return torch.cat([batch.inputs for batch in found]).view(2, 40, 8, 8, 1)


@pytest.mark.slow
def test_draws_depend_on_the_sample_and_the_epoch_alone() -> None:
    """Reported of others: equal seeds in all workers, an epoch that they do not see, a transform's own generator."""
    expected = {}
    for workers in (0, 3):
        loaders = {name: loader_of(name) for name in DRAWING}
        pool = LoaderPool([*loaders.values()], workers) if workers else None
        for name, loader in loaders.items():
            for ranks in (1, 3):
                images = two_epochs(loader, pool, ranks)
                assert torch.equal(images, expected.setdefault(name, images)), (name, workers, ranks)
        if pool:
            pool.close()
    for name, (first, second) in expected.items():
        assert not torch.equal(first, second), name
    drawn = expected["draws_of_all"].flatten(2)[..., :3]  # of Python, NumPy and torch
    for generator in range(3):
        values = drawn[..., generator].flatten().tolist()
        assert len({*values}) > 50  # of 80 draws of 256 values


def test_the_ranks_own_generators_go_on_as_if_nothing_had_been_loaded() -> None:
    import random

    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002

    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(1)
    expected = [draw(), draw()]
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(1)
    first = draw()
    WorkerImages(loader_of("draws_of_all"), None, CPU).load_batch(np.arange(3), 0)
    assert [first, draw()] == expected


def test_transforms_that_seed_themselves_are_found() -> None:
    assert list_seedable_transforms(own_loading.albumentations_pipeline) == [own_loading.PIPELINE]
    stateful = own_loading.Stateful()
    assert list_seedable_transforms(stateful) == [stateful.pipeline]
    assert list_seedable_transforms(own_loading.Shared()) == [own_loading.Shared.pipeline]
    inner = own_loading.Fake()
    assert list_seedable_transforms(lambda image, target: inner(image=image, mask=target)) == [inner]
    assert list_seedable_transforms(inner) == [inner]
    assert list_seedable_transforms(own_loading.draws_of_all) == []


def test_only_training_is_augmented() -> None:
    source = WorkerImages(loader_of("draws_of_all"), None, CPU)
    images, classes = arrays()
    found = source.load_batch(np.arange(40), None)
    assert np.array_equal(found.inputs, images)
    assert np.array_equal(found.targets, classes)


def bright(images: torch.Tensor) -> torch.Tensor:
    return (images[..., 0] > 127).to(torch.uint8)


def test_masks_move_with_their_images() -> None:
    """By torchvision, which knows what a mask is; by a pipeline with keywords; by the built-in shifts."""
    images, _ = arrays()
    masks = bright(torch.from_numpy(images)).numpy()
    found = WorkerImages(loader_of("flip", masks, classes=2), None, CPU).load_batch(np.arange(40), 0)
    assert torch.equal(bright(found.inputs), found.targets)
    mirrored = (found.inputs.numpy() != images).any(axis=(1, 2, 3)).sum()
    assert 8 < mirrored < 32
    source = open_array_batches(CPU, images, masks, keep_types=True, augmentation=Augmentation("crop_flip", 3))
    shifted = source.load_batch(np.arange(40), 0)
    covered = shifted.targets != 255
    assert torch.equal(bright(shifted.inputs)[covered], shifted.targets[covered])
    assert (shifted.inputs[..., 0][~covered] == 0).all()
    assert 0 < (~covered).sum() < 0.3 * covered.numel()


@pytest.mark.slow
def test_mistakes_are_told_with_the_sample() -> None:
    """In the rank and by a loader process alike."""
    loaders = {name: loader_of(name) for name in FAILING}
    pool = LoaderPool([*loaders.values()], 1)
    for name, text in FAILING.items():
        for each in (None, pool):
            kind = UserCodeError if name == "fail" else UserError
            with pytest.raises(kind, match=text) as raised:
                WorkerImages(loaders[name], each, CPU).load_batch(np.array([3]), 0)
            if name == "fail":
                notes = "".join(getattr(raised.value, "__notes__", ()))
                assert "in fail\n    raise ZeroDivisionError" in notes or each is None
                assert isinstance(raised.value.__cause__, ZeroDivisionError) or each is not None
    pool.close()


def test_arrays_in_files_are_sent_by_their_names(tmp_path: Path) -> None:
    images, classes = arrays(4000)
    np.save(tmp_path / "images.npy", images)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    loader = array_images(mapped, classes, UserFunction("augment", "a:b"), seed=1, classes=10, image_size=0)
    content = pickle_with_mapped_files(loader)
    assert len(content) < len(pickle.dumps(classes)) + 2000
    assert np.array_equal(pickle.loads(content).items.data.train_inputs, images)
    assert np.array_equal(pickle.loads(pickle_with_mapped_files(mapped[5:9])), images[5:9])


def test_the_document_s_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but for Albumentations itself, in whose place is a fake that is called and seeded as it is."""
    printed = (ROOT / "docs/loader-processes.md").read_text().partition("# augmentations.py\n")[2]
    (tmp_path / "augmentations.py").write_text(printed.partition("```")[0])
    fake = types.ModuleType("albumentations")
    fake.Compose = lambda _: own_loading.Fake()  # type: ignore[attr-defined]
    fake.ShiftScaleRotate = fake.HorizontalFlip = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "albumentations", fake)
    monkeypatch.delitem(sys.modules, "augmentations", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    colours = np.random.default_rng(0).integers(0, 2, (40, 32, 32, 1), dtype=np.uint8).repeat(3, axis=3) * 200
    masks = colours[..., 0] // 200

    def augmented(name: str, targets: np.ndarray, size: int = 0) -> tuple[np.ndarray, np.ndarray]:
        own = UserFunction("augment", f"augmentations:{name}")
        loader = array_images(colours, targets, own, seed=1, classes=2, image_size=size)
        found, again = (WorkerImages(loader, None, CPU).load_batch(np.arange(40), 0) for _ in range(2))
        assert torch.equal(found.inputs, again.inputs)
        return found.inputs.numpy(), found.targets.numpy()

    assert augmented("torchvision_photos", masks[:, 0, 0], 224)[0].shape == (40, 224, 224, 3)
    _, found = augmented("albumentations", masks)
    assert (found != masks).any(axis=(1, 2)).sum() in range(8, 33)
    images, found = augmented("torchvision_masks", masks)
    assert np.mean((images[..., 0] > 100) == (found == 1)) > 0.95
    assert (found == 255).any()
