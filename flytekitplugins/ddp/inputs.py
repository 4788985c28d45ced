"""Inputs of a task: values that identify a run, and one download for all ranks of a host."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flytekit.models.literals import LiteralMap
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.calls import compute_value_digest, make_comparable_value
from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.files import hold_lock

Remote = (FlyteFile, FlyteDirectory)  # types whose values are downloaded when first opened


def identify_inputs(inputs: Mapping[str, Any], literals: LiteralMap | None, ignored: tuple[str, ...]) -> JsonObject:
    """Return JSON values by input name that are equal for equal inputs. Inputs in ``ignored`` are omitted.

    The value of an input is the hash of the input's Flyte literal, if ``literals`` are known and have a hash. Otherwise
    a file's value is the file's address, and any other input stands for itself.
    """
    hashes = {name: literal.hash for name, literal in literals.literals.items()} if literals else {}
    counted = {name: value for name, value in inputs.items() if name not in ignored}
    return {
        name: hashes.get(name) or make_comparable_value(each, replace_file_or_module) for name, each in counted.items()
    }


def replace_file_or_module(value: Any) -> Any:
    """Return a Flyte file's address, a torch module's digest, or a dataclass's fields by name.

    Pydantic models are treated like dataclasses. Any other value is returned unchanged.
    """
    if isinstance(value, Remote):
        return str(value.remote_source or value.path)
    if hasattr(value, "state_dict") and not isinstance(value, type):  # all attempts get the same weights from Flyte
        return [make_comparable_value(value), compute_value_digest(value.state_dict())]
    return {name: getattr(value, name) for name in list_fields(value)} or value


def iterate_files(value: Any) -> Iterator[Any]:
    """Yield each Flyte file and folder in a value, including nested lists, mappings and dataclasses."""
    if isinstance(value, Remote):
        yield value
        return
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for each in (*parts, *(getattr(value, name) for name in list_fields(value))):
        yield from iterate_files(each)


def list_fields(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value)]
    return [*getattr(type(value), "model_fields", ())]


def share_downloads(value: Any) -> None:
    """Make each remote file in ``value`` download only once on this host.

    The first process that opens the file downloads the file, and other processes wait. Changes the file objects in
    place, and downloads nothing yet.
    """
    for file in iterate_files(value):
        if file.remote_source:
            path = file.path if isinstance(file, FlyteDirectory) else file._local_path
            file._downloader = partial(download_once, file._downloader, Path(path))


def download_once(download: Callable[[], Any], path: Path) -> None:
    """Call ``download`` unless a process of this host has downloaded ``path``. Waits for a process that downloads now.

    Writes a lock file beside ``path``.
    """
    with hold_lock(path.parent, f".{path.name}.lock") as lock:
        if not os.fstat(lock.fileno()).st_size:
            download()
            lock.write(b"complete")
