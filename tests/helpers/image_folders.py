"""Small images in folders of their classes."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def pixels_of(seed: int, height: int = 9, width: int = 11) -> np.ndarray:
    """Return random RGB pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def stored(image: Image.Image, form: str, **options: object) -> bytes:
    """Return the content of a file of the image."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def image_bytes(form: str = "PNG", seed: int = 0) -> bytes:
    """Return the content of an image file."""
    return stored(Image.fromarray(pixels_of(seed)), form)


def image_files(*names: str) -> dict[str, bytes]:
    """Return the content of an image file for each name, all different."""
    forms = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "bmp": "BMP"}
    return {name: image_bytes(forms[name.rpartition(".")[2].lower()], seed) for seed, name in enumerate(names)}


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files into a folder, and return the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def all_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files in a folder, by name. Returns {} if the folder is missing."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if folder.exists() else {}
