"""Cropping and resizing, against torchvision."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from flyte_ddp.datasets.encoded import cropping

SAMPLES = np.arange(4000)
SMALL = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
PIXELS = np.array(Image.fromarray(SMALL).resize((500, 375), Image.Resampling.BICUBIC))
IMAGE = torch.from_numpy(PIXELS).permute(2, 0, 1)


@pytest.mark.parametrize("size", [(375, 500), (60, 640)])
def test_random_crops_are_distributed_as_torchvisions(size: tuple[int, int]) -> None:
    """Mean and spread of areas and ratios, and where the crops lie, over 4,000 draws of each."""
    height, width = size
    draws = cropping.draw_crops(0, 3, SAMPLES)
    ours = np.array([cropping.random_crop(row, height, width) for row in draws], dtype=float)
    torch.manual_seed(0)
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    made = [v2.RandomResizedCrop.make_params(v2.RandomResizedCrop(224), [image]) for _ in SAMPLES]
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in made], dtype=float)
    for figures in (lambda c: c[:, 2] * c[:, 3], lambda c: c[:, 3] / c[:, 2], lambda c: c[:, 0], lambda c: c[:, 1]):
        here, there = figures(ours), figures(theirs)
        error = there.std() / np.sqrt(len(SAMPLES))
        assert abs(here.mean() - there.mean()) < 5 * error + 1e-9
        assert abs(here.std() - there.std()) < 5 * error + 1e-9
    assert 0.45 < ours[:, 4].mean() < 0.55
    assert (ours[:, 0] + ours[:, 2]).max() <= height
    assert (ours[:, 1] + ours[:, 3]).max() <= width


def test_a_crop_is_a_function_of_seed_epoch_and_sample() -> None:
    draws = cropping.draw_crops(1, 2, SAMPLES)
    assert np.array_equal(draws[17:19], cropping.draw_crops(1, 2, SAMPLES[17:19]))
    for other in ((0, 2, SAMPLES), (1, 1, SAMPLES), (1, 2, SAMPLES + 1)):
        assert not np.any(draws == cropping.draw_crops(*other))
    assert abs(np.corrcoef(draws.T) - np.eye(draws.shape[1])).max() < 0.08


@pytest.mark.parametrize("mirrored", [False, True])
def test_resizing_is_torchvisions(mirrored: bool) -> None:
    crop = cropping.Crop(20, 30, 200, 260, mirrored)
    expected = v2.functional.resized_crop(IMAGE, 20, 30, 200, 260, [96, 96], antialias=True)
    if mirrored:
        expected = v2.functional.horizontal_flip(expected)
    assert np.array_equal(cropping.resize_crop(PIXELS, crop, 96), expected.permute(1, 2, 0))
