"""The folder of a prepared data set: the content of ``dataset.json``, arrays, and the check of all files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.checks.arrays import map_array_file
from flyte_ddp.core.checks.parsing import parse_json
from flyte_ddp.core.checks.records import JsonRecord
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import atomic_write, file_digest, get_file_version

DESCRIPTION = "dataset.json"
VERIFIED = "verified.json"  # the version of each file when the file was last hashed
WEIGHTS = "train_weights"  # name of the weights of training samples among the arrays
FORMAT = 3  # version of prepared folders: increase it when the same source gives other content


@dataclass(frozen=True, kw_only=True)
class Description(JsonRecord):
    """The content of ``dataset.json``."""

    format: int = 0
    name: str
    classes: tuple[str, ...]
    digest: str  # SHA-256 (hex) of the content
    test_digest: str = ""  # of the test split alone
    weighted: bool = False  # whether training samples have weights
    source: str = ""  # where the data were read
    data_source: str = ""  # hyperparameters
    test_dataset: str = ""
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 (hex) of each other file
    content: Mapping[str, Any] = field(default_factory=dict, metadata={"prefix": ""})  # entries of this kind of set


def verify_files(folder: Path, digests: Mapping[str, str]) -> None:
    """Raise a UserError if a file is missing or has changed since the folder was prepared.

    Each version of a file is hashed once, and the result is kept in ``verified.json``. If the folder is read-only, each
    call hashes the files again that changed since ``verified.json`` was written. ``digests`` holds the SHA-256 (hex) of
    each file by name.
    """
    known: Any = {}
    with suppress(OSError, ValueError, TypeError):
        known = dict(parse_json((folder / VERIFIED).read_bytes()))
    versions = {name: [*(get_file_version(folder / name) or ())] for name in digests}
    if known == versions:
        return
    for name, digest in digests.items():
        if versions[name] != known.get(name) and (not versions[name] or file_digest(folder / name) != digest):
            problem = f"{name} has changed since it was prepared" if versions[name] else f"{name} is missing"
            raise damaged_set_error(folder, problem)
    with suppress(OSError):
        write_json(folder / VERIFIED, versions)


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=indent).encode())  # json.dump encodes in Python, which is slow


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write a contiguous array as an ``.npy`` file, which replaces an older file when complete."""
    with atomic_write(path) as file:  # numpy.save's error for a full disk has no errno
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


def read_description(folder: Path) -> Description:
    """Return the content of ``dataset.json`` in a prepared folder. Raises UserError if missing or damaged."""
    if not (folder / DESCRIPTION).exists():
        raise UserError(f"{folder}: is not a prepared data set: {DESCRIPTION} is missing; fetch a data set into it")
    with translate_damage_to_user_error(folder):
        return Description.from_json_value(parse_json((folder / DESCRIPTION).read_bytes()), DESCRIPTION)


def read_weights(folder: Path, description: Description) -> NDArray[np.float64] | None:
    return read_array(folder, f"{WEIGHTS}.npy") if description.weighted else None


def read_array(folder: Path, name: str) -> NDArray[Any]:
    return map_array_file(folder / name)


@contextmanager
def translate_damage_to_user_error(folder: Path) -> Iterator[None]:
    """Turn errors of reading ``folder`` in the block into a UserError that reports damage."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged_set_error(folder, error) from error


def damaged_set_error(folder: Path, problem: object) -> UserError:
    return UserError(f"{folder}: the prepared data set is damaged ({problem}); delete the folder and fetch it again")
