"""The prepared folder: what is refused, what is measured, what is opened."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as numpy_arrays

from flyte_ddp.core.errors import UserError
from flyte_ddp.datasets import image_arrays, open_arrays, open_prepared
from flyte_ddp.datasets import images as module
from flyte_ddp.datasets.images import channel_mean_and_std
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.datasets.sample_arrays import PARTS, arrays_sha256


def small(**changes: Any) -> dict[str, Any]:
    """Arguments that are right, but for the changes."""
    random = np.random.default_rng(0)
    arguments: dict[str, Any] = {
        "train_images": random.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8),
        "train_labels": np.arange(6) % 3,
        "test_images": random.integers(0, 256, (4, 4, 5, 3), dtype=np.uint8),
        "test_labels": np.arange(4) % 3,
        "classes": ["a", "b", "c"],
    }
    return {**arguments, **changes}


def blank(*shape: int) -> Any:
    return np.zeros(shape, dtype=np.uint8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_images": blank(6, 4, 5, 3).astype(np.float32)}, "train_images: must be uint8.*float32"),
        ({"train_images": blank(6, 4)}, r"\[N, H, W, C\].*got \[6, 4\]"),
        ({"test_images": blank(4, 0, 5, 3)}, r"test_images:.*got \[4, 0, 5, 3\]"),
        ({"train_images": blank(6, 3, 32, 32)}, r"looks like \[N, C, H, W\]"),
        ({"test_images": blank(4, 5, 4, 3)}, r"train_images is uint8 \[4, 5, 3\], and of test_images uint8 \[5, 4"),
        ({"train_labels": np.zeros(6)}, "train_labels: must be whole numbers, got float64"),
        ({"train_labels": [0] * 5}, r"one label for each of the 6 images, got shape \[5\]"),
        ({"train_labels": [0, 1, 2, 3, 0, 0]}, r"label 3 of sample 3 .*must be 0\.\.2"),
        ({"test_labels": [0, -1, 0, 0]}, r"test_labels: label -1 of sample 1 .*must be 0\.\.2"),
        ({"train_images": np.ma.masked_equal(blank(6, 4, 5, 3), 0)}, "train_images: has masked values"),
        ({"test_labels": np.ma.masked_equal([0, 1, 2, 0], 0)}, "test_labels: has masked values"),
        ({"test_labels": np.full(4, 2**63, np.uint64)}, r"test_labels: has 9223372036854775808: .* below 2\*\*63"),
        ({"classes": []}, r"classes=\(\): each class needs a name"),
    ],
)
def test_wrong_arrays_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        image_arrays(**small(**changes))


def test_tensors_lists_and_grey_images_are_taken() -> None:
    given_images = small()["train_images"][..., 0].transpose(0, 2, 1).copy().transpose(0, 2, 1)  # in another order
    made = image_arrays(torch.from_numpy(given_images), [0, 1, 2, 0, 1, 2], blank(1, 4, 5), np.uint8([2]), range(3))  # type: ignore[arg-type]
    assert made.train_inputs.shape == (6, 4, 5, 1)
    assert made.train_inputs.flags.c_contiguous
    np.testing.assert_array_equal(made.train_inputs[..., 0], given_images)
    assert made.train_targets.dtype == made.test_targets.dtype == np.int64
    assert made.classes == ("0", "1", "2")
    named = image_arrays(**small(classes=np.array(["a", "b", "c"]))).classes
    assert (named, {type(name) for name in named}) == (("a", "b", "c"), {str})  # as JSON and fingerprints need them


def test_written_arrays_are_opened_unchanged(tmp_path: Path) -> None:
    made = image_arrays(**small(), name="flowers")
    write_prepared_set(made, tmp_path, {"source": "a field"})
    opened = open_arrays(tmp_path)
    for name in PARTS:
        array = getattr(opened, name)
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, getattr(made, name))
    assert (opened.name, opened.classes, opened.mean, opened.std) == ("flowers", ("a", "b", "c"), made.mean, made.std)
    assert opened.digest == arrays_sha256(made) == arrays_sha256(opened)


@settings(max_examples=60, deadline=None)
@given(
    images=numpy_arrays(np.uint8, st.tuples(*(st.integers(1, 6),) * 3, st.integers(1, 4))),
    chunk_bytes=st.integers(1, 200),
)
def test_the_normalisation_is_exact_whatever_the_chunks(images: Any, chunk_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", chunk_bytes)
        mean, std = channel_mean_and_std(images)
    for channel in range(images.shape[3]):
        values = [Fraction(int(value), 255) for value in images[..., channel].ravel()]
        average = sum(values) / len(values)
        variance = sum((value - average) ** 2 for value in values) / len(values)
        assert mean[channel] == float(average)
        assert std[channel] == pytest.approx(float(variance) ** 0.5 if variance else 1.0, rel=4e-16)


@pytest.mark.parametrize("key", ["dataset.json", "cut json", '"digest"', '"format"'])
def test_a_damaged_description_is_an_error(tmp_path: Path, key: str) -> None:
    write_prepared_set(image_arrays(**small()), tmp_path, {})
    description = tmp_path / "dataset.json"
    text = description.read_text()
    description.write_text(text[:-5] if key == "cut json" else text.replace(key, '"other"'))
    if key == "dataset.json":
        description.unlink()
    said = {"dataset.json": "is not a prepared data set", '"format"': "was prepared by another release"}
    with pytest.raises(UserError, match=said.get(key, "damaged")):
        open_prepared(tmp_path)
