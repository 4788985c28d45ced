"""Decoding and cropping, against torchvision and Pillow."""

import io
import struct
import sys
import warnings
import zlib

import numpy as np
import pytest
import torch
import torchcodec.decoders
from PIL import Image
from torchvision.transforms import v2

from flyte_ddp.loading import cropping, decoding
from flyte_ddp.loading.decoding import DecodingError
from flyte_ddp.loading.facts import Facts

BOTH = pytest.mark.parametrize("decode", [decoding.decode_with_torchcodec, decoding.decode_with_pillow])
SAMPLES = np.arange(4000)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth, so that JPEG changes little of it."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("size", [(375, 500), (60, 640)])
def test_random_crops_are_distributed_as_torchvisions(size: tuple[int, int]) -> None:
    """Mean and spread of areas and ratios, and where the crops lie, over 4,000 draws of each."""
    height, width = size
    ours = np.array(
        [cropping.random_crop(row, height, width) for row in cropping.draw_crops(0, 3, SAMPLES)], dtype=float
    )
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
    others = (
        cropping.draw_crops(0, 2, SAMPLES),
        cropping.draw_crops(1, 1, SAMPLES),
        cropping.draw_crops(1, 2, SAMPLES + 1),
    )
    assert not any(np.any(draws == other) for other in others)
    assert abs(np.corrcoef(draws.T) - np.eye(draws.shape[1])).max() < 0.08


@pytest.mark.parametrize("mirrored", [False, True])
def test_resizing_is_torchvisions(mirrored: bool) -> None:
    pixels = np.array(picture(375, 500))
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    crop = cropping.Crop(20, 30, 200, 260, mirrored)
    expected = v2.functional.resized_crop(image, 20, 30, 200, 260, [96, 96], antialias=True)
    if mirrored:
        expected = v2.functional.horizontal_flip(expected)
    assert np.array_equal(cropping.resize_crop(pixels, crop, 96), expected.permute(1, 2, 0))


def test_the_evaluation_crop_is_the_usual_one() -> None:
    """Resize to 256, then the middle 224: here in one step, so that pixels differ a little."""
    pixels = np.array(picture(375, 500))
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    usual = v2.functional.center_crop(v2.functional.resize(image, [256], antialias=True), [224])
    ours = cropping.resize_crop(pixels, cropping.middle_crop(375, 500), 224)
    assert np.abs(ours.astype(float) - usual.permute(1, 2, 0).numpy()).mean() < 1.0


def turned(image: Image.Image, kind: str, orientation: int) -> bytes:
    """With a note that it is to be turned, as cameras make it."""
    note, buffer = Image.Exif(), io.BytesIO()
    note[0x0112] = orientation
    image.save(buffer, kind, exif=note)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        *(pytest.param(turned(picture(30, 40), "JPEG", number), id=f"turned {number}") for number in range(1, 9)),
        pytest.param(turned(picture(30, 40), "PNG", 6), id="turned PNG"),
        pytest.param(encoded(picture(30, 40).convert("CMYK"), "JPEG"), id="CMYK"),
        pytest.param(encoded(picture(30, 40).convert("P"), "PNG"), id="palette"),
        pytest.param(encoded(picture(30, 40).convert("LA"), "PNG"), id="transparent"),
    ],
)
def test_both_decoders_give_the_same_image(content: bytes) -> None:
    """So that a model sees what it was trained on where another one is installed."""
    ours, theirs = (
        decode(content).astype(int) for decode in (decoding.decode_with_torchcodec, decoding.decode_with_pillow)
    )
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1
    assert ours.std() > 10


def with_other_notes(content: bytes, tag: int, kind: int, count: int, value: bytes) -> bytes:
    """A turned JPEG whose EXIF data also say something that is of the wrong kind."""
    entries = struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0) + struct.pack(">HHI", tag, kind, count) + value
    notes = b"Exif\0\0MM\0*\0\0\0\x08\0\x02" + entries + bytes(4)
    return content[:2] + b"\xff\xe1" + struct.pack(">H", len(notes) + 2) + notes + content[2:]


@pytest.mark.filterwarnings("ignore:Tag data larger than file")
@BOTH
@pytest.mark.parametrize(
    ("tag", "kind", "count", "value"),
    [
        pytest.param(0x0103, 2, 1, b"a\0\0\0", id="text for a number"),
        pytest.param(0x9003, 2, 999, b"\0\0\xff\xff", id="a text beyond the end"),
    ],
)
def test_what_else_the_exif_data_say_does_not_matter(decode, tag: int, kind: int, count: int, value: bytes) -> None:
    image = picture(30, 40)
    content = with_other_notes(encoded(image, "JPEG"), tag, kind, count, value)
    assert np.array_equal(decode(content), np.rot90(decode(encoded(image, "JPEG")), -1))


@BOTH
@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_pictures_are_turned_by_their_exif_data_only(decode, kind: str) -> None:
    """Not by XMP, which torchcodec and browsers do not look at, and not where the EXIF data are none."""
    for note in ({"xmp": b'<x:xmpmeta tiff:Orientation="6"/>'}, {"exif": b"Exif\0\0XX\0*\0\0\0\x08"}):
        buffer = io.BytesIO()
        picture(30, 40).save(buffer, kind, **note)
        assert decode(buffer.getvalue()).shape == (30, 40, 3)


def test_a_warning_comes_once_and_not_with_each_image() -> None:
    """As it would if warnings' filters were changed for a moment with each; in threads some changes would stay."""
    content = with_other_notes(encoded(picture(30, 40), "JPEG"), 0x9003, 2, 999, b"\0\0\xff\xff")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(5):
            decoding.decode_with_torchcodec(content)
    assert len(caught) <= 1


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_where_torchcodec_cannot_be_loaded_pillow_decodes(monkeypatch: pytest.MonkeyPatch, error: type) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("torchcodec"):
                raise error(f"no {name}")

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchcodec"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    decoding.choose_decoder.cache_clear()
    try:
        assert decoding.choose_decoder() is decoding.decode_with_pillow
        assert "torchcodec is not installed" in Facts("Pillow").describe()[0]
        assert np.array_equal(decoding.decode_image(encoded(picture(9, 7), "PNG")), np.array(picture(9, 7)))
    finally:
        decoding.choose_decoder.cache_clear()


JPEG, PNG = (encoded(picture(200, 300), kind) for kind in ("JPEG", "PNG"))


@BOTH
@pytest.mark.parametrize("content", [b"", b"no image", b"\xff\xd8\xff", JPEG[: len(JPEG) // 2], PNG[: len(PNG) // 2]])
def test_what_is_no_image_is_an_error(decode, content: bytes) -> None:
    with pytest.raises(DecodingError):
        decode(content)


def black_png(side: int) -> bytes:
    """A square of one bit a pixel: a few thousandths of a byte each, as they are compressed."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(bytes((side // 8 + 1) * side), 1)), (b"IEND", b"")
    parts = [
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@BOTH
def test_a_small_file_that_is_a_huge_image_is_refused(decode) -> None:
    """By both decoders, at the same size."""
    content = black_png(14_000)
    assert len(content) < 300_000
    with pytest.raises(DecodingError, match=r"Image size \(196000000 pixels\) exceeds limit of 178956970 pixels"):
        decode(content)
    assert decode(black_png(800)).shape == (800, 800, 3)


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_of_an_animation_only_the_first_image_is_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a small file's could be more than there is memory."""
    buffer = io.BytesIO()
    first, *others = (Image.new("RGB", (20, 30), colour) for colour in ("red", "green", "blue"))
    first.save(buffer, kind, save_all=True, append_images=others, lossless=True)
    asked: list[bytes] = []
    monkeypatch.setattr(torchcodec.decoders, "decode_image", lambda content, **_: asked.append(content))
    for decode in (decoding.decode_with_torchcodec, decoding.decode_with_pillow):
        assert np.array_equal(decode(buffer.getvalue()), np.array(first))
    assert asked == []
