"""Decoding by simplejpeg, torchcodec and Pillow, against each other and against what was stored."""

import itertools
import struct
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import simplejpeg
import torchcodec.decoders
from image_folders import stored
from PIL import Image

from flyte_ddp.datasets.encoded import decoding
from flyte_ddp.datasets.encoded.decoding import DecodingError

DECODERS = decoding.decode_with_torchcodec, decoding.decode_with_pillow
BOTH = pytest.mark.parametrize("decode", DECODERS)
COLOURS = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
ALPHA = np.linspace(0, 255, 12 * 16).reshape(12, 16, 1).round().astype(np.uint8)
# Smooth, so that JPEG changes little of it.
PICTURE = Image.fromarray(COLOURS[:4, :5]).resize((40, 30), Image.Resampling.BICUBIC)


def turned(kind: str, orientation: int) -> bytes:
    """With a note that it is to be turned, as cameras make it."""
    note = Image.Exif()
    note[0x0112] = orientation
    return stored(PICTURE, kind, exif=note)


JPEG, PNG = (stored(PICTURE, kind) for kind in ("JPEG", "PNG"))


def with_entry(kind: int, count: int) -> bytes:
    """A JPEG whose EXIF data say that it is to be turned, in an entry of the wrong type or count."""
    notes = b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + struct.pack(">HHIHH", 0x0112, kind, count, 6, 0) + bytes(4)
    return JPEG[:2] + b"\xff\xe1" + struct.pack(">H", len(notes) + 2) + notes + JPEG[2:]


ALIKE = {
    **{f"turned {number}": turned("JPEG", number) for number in range(1, 9)},
    "turned PNG": turned("PNG", 6),
    **{f"turned by type {kind}": with_entry(kind, count) for kind, count in ((1, 1), (2, 1), (3, 0), (4, 1), (7, 1))},
    "CMYK": stored(PICTURE.convert("CMYK"), "JPEG"),
    "palette": stored(PICTURE.convert("P"), "PNG"),
    "transparent": stored(PICTURE.convert("LA"), "PNG"),
}


def test_an_incomplete_header_is_not_known_to_be_upright() -> None:
    content = turned("JPEG", 1)
    assert decoding.is_upright(content)
    assert not any(decoding.is_upright(content[:length]) for length in range(200))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged EXIF data
@pytest.mark.parametrize("content", ALIKE.values(), ids=ALIKE)
def test_both_decoders_give_the_same_image(content: bytes) -> None:
    """So that a model sees what it was trained on where another one is installed."""
    ours, theirs = (decode(content).astype(int) for decode in DECODERS)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1
    assert ours.std() > 10


@BOTH
@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_pictures_are_turned_by_their_exif_data_only(decode, kind: str) -> None:
    """Not by XMP, which torchcodec and browsers do not look at, and not where the EXIF data are none."""
    for note in ({"xmp": b'<x:xmpmeta tiff:Orientation="6"/>'}, {"exif": b"Exif\0\0XX\0*\0\0\0\x08"}):
        assert decode(stored(PICTURE, kind, **note)).shape == (30, 40, 3)


@BOTH
def test_exif_data_after_xmp_turn_a_picture(decode) -> None:
    """torchcodec looks for them in the first APP1 segment alone, where programs that edit photos may put XMP data."""
    content = turned("JPEG", 6)
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>"
    after = content[:2] + b"\xff\xe1" + struct.pack(">H", len(xmp) + 2) + xmp + content[2:]
    assert decode(after).shape == (40, 30, 3)
    assert np.abs(decode(after).astype(int) - decode(content).astype(int)).max() <= 1


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_where_no_other_decoder_can_be_loaded_pillow_decodes(monkeypatch: pytest.MonkeyPatch, error: type) -> None:
    others = "torchcodec", "simplejpeg"

    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith(others):
                raise error(f"no {name}")

    for name in [name for name in sys.modules if name.partition(".")[0] in others]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    decoding.can_import.cache_clear()
    try:
        assert np.array_equal(decoding.decode_image(PNG), np.array(PICTURE))
        assert np.array_equal(decoding.decode_image(JPEG), decoding.decode_with_pillow(JPEG))
    finally:
        decoding.can_import.cache_clear()


def photo(height: int, width: int) -> Image.Image:
    """All colours, smooth with a little noise."""
    small = np.random.default_rng(height).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    smooth = np.array(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    noise = np.random.default_rng(width).integers(-9, 10, smooth.shape)
    return Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))


PHOTO = photo(61, 83)
SUBSAMPLED = {name: simplejpeg.encode_jpeg(np.array(PHOTO), colorsubsampling=name) for name in ("440", "411")}
PLAIN = {
    **{f"{h} x {w}": stored(photo(h, w), "JPEG") for h, w in ((1, 1), (8, 8), (1, 40), (33, 1), (375, 500))},
    **{
        f"quality {quality}, subsampling {subsampling}, progressive {progressive}": stored(
            PHOTO, "JPEG", quality=quality, subsampling=subsampling, progressive=progressive
        )
        for quality, subsampling, progressive in itertools.product((30, 75, 95), (0, 1, 2), (False, True))
    },
    **SUBSAMPLED,
    "grey": stored(PHOTO.convert("L"), "JPEG"),
    "RGB": stored(PHOTO, "JPEG", keep_rgb=True),
    "restart markers": stored(PHOTO, "JPEG", restart_marker_blocks=3),
    "optimised": stored(PHOTO, "JPEG", optimize=True),
    "profile": stored(PHOTO, "JPEG", icc_profile=bytes(3000)),
    "upright by EXIF": turned("JPEG", 1),
    "upright by XMP": stored(PHOTO, "JPEG", xmp=b'<x:xmpmeta tiff:Orientation="6"/>'),
    "bytes behind": JPEG + bytes(9),
}


@pytest.mark.parametrize("content", PLAIN.values(), ids=PLAIN)
def test_of_a_plain_jpeg_all_decoders_give_the_same_bits(content: bytes) -> None:
    ours = decoding.decode_plain_jpeg(content)
    assert ours is not None
    for decode in (*DECODERS, decoding.decode_image):
        assert np.array_equal(decode(content), ours)


def decoded_or_error(decode: Callable[[bytes], np.ndarray], content: bytes) -> object:
    try:
        pixels = decode(content)
    except DecodingError as error:
        return str(error)
    return pixels.shape, pixels.tobytes()


def with_bytes(content: bytes, found: bytes, others: bytes) -> bytes:
    assert found in content
    return content.replace(found, others, 1)


NOT_PLAIN = {
    **{
        name: content
        for name, content in ALIKE.items()
        if name.startswith("turned") and name[-4:] not in ("ed 1", "PNG")
    },
    "CMYK": ALIKE["CMYK"],
    "turned, name damaged": with_bytes(turned("JPEG", 6), b"Exif", b"EXIF"),
    "turned, byte order damaged": with_bytes(turned("JPEG", 6), b"MM\0*", b"Mm\0*"),
    "fill bytes": with_bytes(JPEG, b"\xff\xdb", b"\xff\xff\xdb"),
    "truncated": JPEG[: len(JPEG) // 2],
    "no end": JPEG[:-2],
    "bytes between segments": with_bytes(JPEG, b"\xff\xc4", b"\0\0\xff\xc4"),
    "unusual subsampling": with_bytes(JPEG, b"\x01\x22\x00", b"\x01\x14\x00"),
    "12 bits": with_bytes(JPEG, b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),
    "huge": with_bytes(JPEG, struct.pack(">HH", 30, 40), struct.pack(">HH", 14_000, 14_000)),
}


@pytest.mark.parametrize("content", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_other_jpegs_are_as_torchcodec_and_pillow_decode_or_refuse_them(content: bytes) -> None:
    assert decoding.decode_plain_jpeg(content) is None
    assert decoded_or_error(decoding.decode_image, content) == decoded_or_error(
        decoding.decode_with_torchcodec, content
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged EXIF data
def test_damaged_jpegs_are_as_torchcodec_and_pillow_decode_or_refuse_them() -> None:
    rng, plain, refused = np.random.default_rng(0), 0, 0
    sources = [stored(PICTURE, "JPEG", progressive=True), turned("JPEG", 1), turned("JPEG", 6), *SUBSAMPLED.values()]
    for number in range(400):
        content = bytearray(sources[number % len(sources)])
        place = int(rng.integers(2, 300 if number % 3 else len(content)))
        match number % 4:
            case 0:
                del content[place:]
            case 1:
                del content[place : place + int(rng.integers(1, 9))]
            case 2:
                content[place:place] = rng.bytes(int(rng.integers(1, 9)))
            case 3:
                content[place] ^= 1 << int(rng.integers(8))
        ours, theirs = (
            decoded_or_error(decode, bytes(content))
            for decode in (decoding.decode_image, decoding.decode_with_torchcodec)
        )
        assert ours == theirs, bytes(content).hex()
        plain += content[:3] == JPEG[:3] and decoding.decode_plain_jpeg(bytes(content)) is not None
        refused += isinstance(theirs, str)
    assert plain > 20
    assert refused > 100


def test_a_jpeg_above_pillows_limit_warns_as_pillow_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 - 1)
    with pytest.warns(Image.DecompressionBombWarning):
        assert decoding.decode_image(JPEG).shape == (30, 40, 3)


@BOTH
@pytest.mark.parametrize("content", [b"", b"no image", b"\xff\xd8\xff", JPEG[: len(JPEG) // 2], PNG[: len(PNG) // 2]])
def test_what_is_no_image_is_an_error(decode, content: bytes) -> None:
    with pytest.raises(DecodingError):
        decode(content)


def png(size: tuple[int, int], depth: int, colour_type: int, rows: bytes, transparent: bytes = b"") -> bytes:
    """Rows of pixels, one of whose colours may be transparent: Pillow writes few of these."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", *size, depth, colour_type, 0, 0, 0)
    colour = chunk(b"tRNS", transparent) if transparent else b""
    parts = chunk(b"IHDR", header), colour, chunk(b"IDAT", zlib.compress(rows, 1)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@BOTH
def test_a_small_file_that_is_a_huge_image_is_refused(decode) -> None:
    huge, small = (png((side, side), 1, 0, bytes((side // 8 + 1) * side)) for side in (14_000, 800))
    assert len(huge) < 300_000
    with pytest.raises(DecodingError, match=r"Image size \(196000000 pixels\) exceeds limit of 178956970 pixels"):
        decode(huge)
    assert decode(small).shape == (800, 800, 3)


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_of_an_animation_only_the_first_image_is_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a small file's could be more than there is memory."""
    first, *others = (Image.new("RGB", (20, 30), colour) for colour in ("red", "green", "blue"))
    content = stored(first, kind, save_all=True, append_images=others, lossless=True)
    asked: list[bytes] = []
    monkeypatch.setattr(torchcodec.decoders, "decode_image", lambda content, **_: asked.append(content))
    for decode in DECODERS:
        assert np.array_equal(decode(content), np.array(first))
    assert asked == []


def on_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """The formula of the document."""
    return np.broadcast_to((colours * (alpha / 255) + 255 * (1 - alpha / 255)).round(), (12, 16, 3))


# A black square; all around it is black, too, and transparent.
IN_SQUARE = np.pad(np.ones((6, 6, 1)), ((3, 3), (3, 7), (0, 0)))
BLACK_SHAPE = Image.fromarray(np.concatenate([np.zeros((12, 16, 3)), 255 * IN_SQUARE], 2).astype(np.uint8))
SHAPE_ON_WHITE = np.where(IN_SQUARE, 0, 255).repeat(3, axis=2)
RGBA = Image.fromarray(np.concatenate([COLOURS, ALPHA], 2))
GREY_ALPHA = Image.merge("LA", [*map(Image.fromarray, (COLOURS[..., 0], ALPHA[..., 0]))])
OPAQUE_ALPHA = Image.fromarray(np.concatenate([COLOURS, np.full_like(ALPHA, 255)], 2))


@BOTH
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(stored(RGBA, "PNG"), on_white(COLOURS, ALPHA), id="RGBA PNG"),
        pytest.param(stored(GREY_ALPHA, "PNG"), on_white(COLOURS[..., :1], ALPHA), id="LA PNG"),
        pytest.param(stored(BLACK_SHAPE, "AVIF", quality=100), SHAPE_ON_WHITE, id="AVIF"),
        pytest.param(stored(BLACK_SHAPE.quantize(4), "PNG"), SHAPE_ON_WHITE, id="palette PNG"),
        pytest.param(stored(RGBA.convert("RGB"), "PNG"), COLOURS, id="opaque"),
        pytest.param(stored(OPAQUE_ALPHA, "PNG"), COLOURS, id="an alpha channel without effect"),
    ],
)
def test_what_is_transparent_is_on_white(decode, content: bytes, expected: np.ndarray) -> None:
    pixels = decode(content)
    assert (pixels.shape, pixels.dtype) == ((12, 16, 3), np.uint8)
    assert np.abs(pixels - expected).max() <= 1


def tiff(bits: int, form: int, content: bytes) -> bytes:
    """12 x 16 grey values without a sign (form 1), with one (2) or floating-point (3): Pillow writes few of these."""
    tags = (256, 16), (257, 12), (258, bits), (259, 1), (262, 1), (273, 134), (277, 1), (278, 12)
    tags = *tags, (279, len(content)), (339, form)
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + content


SIXTEEN_BITS = (np.arange(12 * 16) * 340).astype(np.uint16).reshape(12, 16)
TIFF, PGM = (stored(Image.fromarray(SIXTEEN_BITS), kind) for kind in ("TIFF", "PPM"))


@BOTH
@pytest.mark.parametrize("content", [TIFF, PGM], ids=["TIFF", "PGM"])
def test_of_whole_numbers_without_a_sign_the_upper_8_bits_count(decode, content: bytes) -> None:
    assert np.array_equal(decode(content), (SIXTEEN_BITS >> 8)[..., None].repeat(3, axis=2))


@BOTH
@pytest.mark.parametrize(
    ("colour_type", "channels", "opaque"), [(0, 1, False), (2, 3, False), (4, 1, True), (6, 3, True)]
)
def test_of_all_values_of_16_bits_in_a_png_the_upper_8_count(
    decode, colour_type: int, channels: int, opaque: bool
) -> None:
    """Whichever decoder is installed, a run sees the same pixels: to torchcodec a quarter of them are a level off."""
    values = np.arange(2**16)
    row = np.stack([values] * channels + [np.full(2**16, 65535)] * opaque, axis=1).astype(">u2").tobytes()
    pixels = decode(png((2**16, 1), 16, colour_type, b"\0" + row))
    assert np.array_equal(pixels[0], (values >> 8)[:, None].repeat(3, axis=1))


@BOTH
@pytest.mark.parametrize("kind", ["u4", "i2", "f4"])
def test_numbers_of_no_known_range_are_refused_by_name(decode, kind: str) -> None:
    """A scan of -1024 to 3071 or of 0 to 2^31: whatever is clipped or cut off would be lost without a word."""
    values = np.linspace(0, 3000, 12 * 16).reshape(12, 16).astype(kind)
    said = "floating-point numbers" if kind == "f4" else "32-bit or signed integers"
    content = tiff(8 * values.itemsize, {"u": 1, "i": 2, "f": 3}[kind[0]], values.tobytes())
    with pytest.raises(DecodingError, match=f"its pixels are {said}, .*range is unknown"):
        decode(content)
