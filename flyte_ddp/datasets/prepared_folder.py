"""The folder of a prepared data set: arrays, and a description of the content in ``dataset.json``."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.checks.arrays import map_array_file
from flyte_ddp.core.checks.forms import check_form
from flyte_ddp.core.checks.parsing import parse_json
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import atomic_write, file_digest, get_file_version, list_files
from flyte_ddp.datasets.prepared_set import WEIGHTS, PreparedSet

DESCRIPTION = "dataset.json"
FILES = "files"  # key in DESCRIPTION of the SHA-256 of each other file
VERIFIED = "verified.json"  # the version of each file when the file was last hashed
TEST_DIGEST = "test_digest"  # key in DESCRIPTION of the SHA-256 of the test split alone
FORM = {
    "name": str,
    "classes": [str],
    "digest": str,
    f"{TEST_DIGEST}?": str,
    f"{FILES}?": {str: str},
    "data_source?": str,
    "weighted?": bool,
}
FORMAT = {"format": 3}  # version of prepared folders: increase it when the same source gives other content


def write_prepared_set(data: PreparedSet, folder: Path, origin: Mapping[str, str]) -> None:
    """Write a data set into an existing folder: arrays, other files, ``verified.json``, and ``dataset.json`` last.

    ``origin`` holds further entries of ``dataset.json``, such as ``data_source``.
    """
    arrays = data.list_arrays()
    for name, array in arrays.items():
        write_array(folder / f"{name}.npy", array)
    data.write_other_files(folder)
    digest, test_digest = data.compute_digests()
    of_all = {**FORMAT, "name": data.name, "classes": data.classes, "digest": digest, TEST_DIGEST: test_digest}
    content = {**data.describe_content(), "weighted": WEIGHTS in arrays, **origin}
    own = (folder / DESCRIPTION, folder / VERIFIED)
    files = {str(path.relative_to(folder)): path for path in list_files(folder) if path not in own}
    digests = {name: file_digest(path) for name, path in files.items()}
    write_json(folder / VERIFIED, {name: get_file_version(path) for name, path in files.items()})
    write_json(folder / DESCRIPTION, {**of_all, **content, FILES: digests}, indent=1)


def verify_files(folder: Path, digests: Mapping[str, str]) -> None:
    """Raise a UserError if a file is missing or has changed since the folder was prepared.

    Each version of a file is hashed once, and the result is kept in ``verified.json``. If the folder is read-only, each
    call hashes the files again that changed since ``verified.json`` was written. ``digests`` holds the SHA-256 (hex) of
    each file by name.
    """
    known: Any = {}
    with suppress(OSError, ValueError):
        found = parse_json((folder / VERIFIED).read_bytes())
        check_form(found, {str: [int]}, VERIFIED)
        known = found
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


def read_description(folder: Path) -> dict[str, Any]:
    """Return the content of ``dataset.json`` in a prepared folder. Raises UserError if missing or damaged."""
    if not (folder / DESCRIPTION).exists():
        raise UserError(f"{folder}: is not a prepared data set: {DESCRIPTION} is missing; fetch a data set into it")
    with translate_damage_to_user_error(folder):
        description = parse_json((folder / DESCRIPTION).read_bytes())
        check_form(description, FORM, DESCRIPTION)
        return dict(description)


@contextmanager
def open_folder(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the content of ``dataset.json``, and the fields that all stored sets have, as keyword arguments.

    The fields are ``name``, ``digest``, ``classes`` and ``sample_weights``. Files are not compared with their digests.

    Raises:
        UserError: Reading fails here or in the block, because the folder is damaged.
    """
    description = read_description(folder)
    with translate_damage_to_user_error(folder):
        weights = read_array(folder, f"{WEIGHTS}.npy") if description["weighted"] else None
        fields = {"name": description["name"], "digest": description["digest"], "sample_weights": weights}
        yield description, fields | {"classes": tuple(description["classes"])}


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
