"""Read NumPy files, which may be damaged or malicious, with a single type of error and limited memory."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class DamagedArraysError(ValueError):
    """A file is no NumPy file, or holds more than the reader accepts."""


def map_array_file(path: Path) -> NDArray[Any]:
    """Open an ``.npy`` file as a memory-mapped array, read-only.

    Raises:
        DamagedArraysError: The file is damaged, or holds pickled objects.
        OSError: The file cannot be read.
    """
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r")
    except OSError:
        raise
    except Exception as error:  # NumPy parses the header with Python's tokenizer and parser, which raise many types
        raise DamagedArraysError(f"{path.name}: {error}") from error
    return array


def read_arrays(file: Path | bytes, most_bytes: int) -> dict[str, NDArray[Any]]:
    """Load all arrays of an ``.npz`` file into memory, by name.

    Raises:
        DamagedArraysError: The file is damaged, or unpacks to more than ``most_bytes``.
        OSError: The file cannot be read.
    """
    source = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        with zipfile.ZipFile(source) as packed:
            size = sum(each.file_size for each in packed.infolist())
        if size <= most_bytes:
            with np.load(source, allow_pickle=False) as arrays:
                return dict(arrays)
    except OSError:
        raise
    except Exception as error:  # of zipfile, zlib, struct and NumPy's parser
        raise DamagedArraysError(f"{type(error).__name__}: {error}") from error
    raise DamagedArraysError(f"the arrays unpack to {size:,} bytes, more than the allowed {most_bytes:,}")
