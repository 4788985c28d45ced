"""Read NumPy's files, which may be damaged or made to do harm, with errors of one type and a bound on the memory."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class DamagedArraysError(ValueError):
    """A file is not one of NumPy's, or holds more than its reader takes."""


def map_array(path: Path) -> NDArray[Any]:
    """Return the memory-mapped array of an ``.npy`` file; raise DamagedArraysError, or OSError."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r")
    except OSError:
        raise
    except Exception as error:  # of Python's tokenizer and parser, which NumPy uses for the header, among others
        raise DamagedArraysError(f"{path.name}: {error}") from error
    return array


def read_arrays(file: Path | bytes, most_bytes: int) -> dict[str, NDArray[Any]]:
    """Return all arrays of an ``.npz`` file by name.

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
    except Exception as error:  # of zipfile, zlib, struct and NumPy's own parser
        raise DamagedArraysError(f"{type(error).__name__}: {error}") from error
    raise DamagedArraysError(f"it unpacks to {size:,} bytes, more than {most_bytes:,}")
