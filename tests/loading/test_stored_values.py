"""What stored values and transparency become, by both decoders."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from flyte_ddp.loading import decoding
from flyte_ddp.loading.decoding import DecodingError

BOTH = pytest.mark.parametrize("decode", [decoding.decode_with_torchcodec, decoding.decode_with_pillow])
COLOURS = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
ALPHA = np.linspace(0, 255, 12 * 16).reshape(12, 16, 1).round().astype(np.uint8)


def stored(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def on_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """The formula of the document."""
    return np.broadcast_to((colours * (alpha / 255) + 255 * (1 - alpha / 255)).round(), (12, 16, 3))


def shape_in_alpha(colour: int) -> np.ndarray:
    """A square of one colour; all around it is of the same colour, and transparent."""
    pixels = np.full((12, 16, 4), colour, np.uint8)
    pixels[..., 3] = 0
    pixels[3:9, 3:9, 3] = 255
    return pixels


RGBA = Image.fromarray(np.concatenate([COLOURS, ALPHA], 2))
GREY_ALPHA = Image.fromarray(np.concatenate([COLOURS[..., :1], ALPHA], 2), "LA")
BLACK_SHAPE = Image.fromarray(shape_in_alpha(0))
SHAPE_ON_WHITE = np.where(shape_in_alpha(0)[..., 3:] == 255, 0, 255).repeat(3, axis=2)


@BOTH
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(stored(RGBA, "PNG"), on_white(COLOURS, ALPHA), id="RGBA PNG"),
        pytest.param(stored(RGBA, "WEBP", lossless=True, exact=True), on_white(COLOURS, ALPHA), id="RGBA WebP"),
        pytest.param(stored(GREY_ALPHA, "PNG"), on_white(COLOURS[..., :1], ALPHA), id="LA PNG"),
        pytest.param(stored(BLACK_SHAPE, "AVIF", quality=100), SHAPE_ON_WHITE, id="AVIF"),
        pytest.param(stored(BLACK_SHAPE.quantize(4), "PNG"), SHAPE_ON_WHITE, id="palette PNG"),
        pytest.param(stored(BLACK_SHAPE, "GIF"), SHAPE_ON_WHITE, id="GIF"),
        pytest.param(stored(RGBA.convert("RGB"), "PNG"), COLOURS, id="opaque"),
        pytest.param(
            stored(Image.merge("RGBA", [*Image.fromarray(COLOURS).split(), Image.new("L", (16, 12), 255)]), "PNG"),
            COLOURS,
            id="an alpha channel without effect",
        ),
    ],
)
def test_what_is_transparent_is_on_white(decode, content: bytes, expected: np.ndarray) -> None:
    pixels = decode(content)
    assert (pixels.shape, pixels.dtype) == ((12, 16, 3), np.uint8)
    assert np.abs(pixels - expected).max() <= 1


def png(depth: int, colour_type: int, row: bytes, transparent: bytes = b"") -> bytes:
    """A row of pixels, one of whose colours may be transparent: Pillow writes few of these."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour_type]
    header = struct.pack(">IIBBBBB", len(row) * 8 // (depth * channels), 1, depth, colour_type, 0, 0, 0)
    colour = chunk(b"tRNS", transparent) if transparent else b""
    parts = chunk(b"IHDR", header), colour, chunk(b"IDAT", zlib.compress(b"\0" + row)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@BOTH
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (png(2, 0, b"\x1b", b"\0\2"), [0, 85, 255, 255]),
        (png(4, 0, b"\x05\xaf", b"\0\5"), [0, 255, 170, 255]),
        (png(8, 0, bytes([0, 5, 10, 255]), b"\0\5"), [0, 255, 10, 255]),
        (png(16, 0, struct.pack(">4H", 0, 5000, 5001, 65535), struct.pack(">H", 5000)), [0, 255, 19, 255]),
        (png(8, 2, bytes([1, 1, 1, 2, 2, 2, 1, 2, 1, 9, 9, 9]), struct.pack(">3H", 2, 2, 2)), [1, 255, (1, 2, 1), 9]),
        (png(16, 2, struct.pack(">6H", *[300] * 3, *[600] * 3), struct.pack(">3H", *[600] * 3)), [1, 255]),
    ],
    ids=["grey 2", "grey 4", "grey 8", "grey 16", "colour 8", "colour 16"],
)
def test_the_transparent_colour_of_a_png_of_any_depth_is_white(decode, content: bytes, expected: list) -> None:
    colours = np.array([[*grey] if isinstance(grey, tuple) else [grey] * 3 for grey in expected])
    assert np.array_equal(decode(content)[0], colours)


def tiff(shape: tuple[int, int], bits: int, form: int, content: bytes) -> bytes:
    """Grey values without a sign (form 1), with one (2) or floating-point (3): Pillow writes few of these."""
    height, width = shape
    tags = (256, width), (257, height), (258, bits), (259, 1), (262, 1), (273, 134), (277, 1), (278, height)
    tags = *tags, (279, len(content)), (339, form)
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + content


SIXTEEN_BITS = (np.arange(12 * 16) * 340).astype(np.uint16).reshape(12, 16)
PAIRS = (SIXTEEN_BITS >> 4).reshape(-1, 2).tolist()  # of 12 bits each, which are stored in three bytes
TWELVE_BITS = tiff((12, 16), 12, 1, b"".join((first << 12 | second).to_bytes(3) for first, second in PAIRS))


@BOTH
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(stored(Image.fromarray(SIXTEEN_BITS), "TIFF"), SIXTEEN_BITS >> 8, id="TIFF"),
        pytest.param(stored(Image.fromarray(SIXTEEN_BITS), "PPM"), SIXTEEN_BITS >> 8, id="PGM"),
        pytest.param(TWELVE_BITS, SIXTEEN_BITS >> 8, id="TIFF of 12 bits"),
    ],
)
def test_of_whole_numbers_without_a_sign_the_upper_8_bits_count(decode, content: bytes, expected: np.ndarray) -> None:
    assert np.array_equal(decode(content), expected[..., None].repeat(3, axis=2))


@BOTH
@pytest.mark.parametrize(
    ("colour_type", "channels", "opaque"), [(0, 1, False), (2, 3, False), (4, 1, True), (6, 3, True)]
)
def test_of_all_values_of_16_bits_in_a_png_the_upper_8_count(
    decode, colour_type: int, channels: int, opaque: bool
) -> None:
    """Whichever decoder is installed, a run sees the same pixels: to torchcodec a quarter of them are a level off."""
    values = np.arange(2**16)
    stored = np.stack([values] * channels + [np.full(2**16, 65535)] * opaque, axis=1).astype(">u2")
    assert np.array_equal(decode(png(16, colour_type, stored.tobytes()))[0], (values >> 8)[:, None].repeat(3, axis=1))


@BOTH
@pytest.mark.parametrize("kind", ["u4", "i2", "f4"])
def test_numbers_of_no_known_range_are_refused_by_name(decode, kind: str) -> None:
    """A scan of -1024 to 3071 or of 0 to 2^31: whatever is clipped or cut off would be lost without a word."""
    values = np.linspace(0, 3000, 12 * 16).reshape(12, 16).astype(kind)
    said = "floating-point numbers" if kind == "f4" else "32-bit or signed integers"
    content = tiff((12, 16), 8 * values.itemsize, {"u": 1, "i": 2, "f": 3}[kind[0]], values.tobytes())
    with pytest.raises(DecodingError, match=f"its pixels are {said}, of no known range; store 8 or 16 bits"):
        decode(content)
