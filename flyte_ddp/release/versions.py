"""Versions of a model in its registry: folders of files, named by the SHA-256 of the weights, and written once.

The list of files comes last. So a version whose writer was killed has none, and whoever writes it again goes on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import file_digest, replacing
from flyte_ddp.release.registry import Registry
from flyte_ddp.storage import ExistsError, MissingError

WEIGHTS, SIDECAR, MANIFEST = "model.pt", "model.json", "manifest.json"
DIGEST = re.compile(r"[0-9a-f]{64}")


class Version(NamedTuple):
    """A version that is complete."""

    name: str  # the SHA-256 of its weights
    manifest: str  # the SHA-256 of its list of files
    files: dict[str, str]  # the SHA-256 of each


def write(registry: Registry, files: Mapping[str, Path | bytes]) -> Version:
    """Writes a version; of one that is there, what is missing of it.

    Args:
        files: contents or paths by name, ``model.pt`` among them.

    Raises:
        UserError: the store cannot be written to, or a file there has been altered.
    """
    name = content_digest(files[WEIGHTS])
    with registry.explained("written"):
        stored = {file: written(registry.at("versions", name, file), content) for file, content in files.items()}
        if stored[WEIGHTS] != name:
            raise altered(registry, name, WEIGHTS)
        manifest = json.dumps({"files": dict(sorted(stored.items()))}, indent=1).encode() + b"\n"
        written(registry.at("versions", name, MANIFEST), manifest)
    return read(registry, name)


def written(address: str, content: Path | bytes) -> str:
    """Writes a file unless there is one, which then stays; returns the SHA-256 of what is there."""
    try:
        storage.retried(address, lambda to: storage.create(to, content))
    except ExistsError:  # by an earlier try, or by somebody with the same weights
        return storage.retried(address, stored_digest)
    return content_digest(content)


def stored_digest(address: str) -> str:
    """The SHA-256 of a file, wherever it is."""
    digest = hashlib.sha256()
    with storage.open_file(address) as found:
        for chunk in found.chunks:
            digest.update(chunk)
    return digest.hexdigest()


def content_digest(content: Path | bytes) -> str:
    """The SHA-256 of a file's content."""
    return file_digest(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()


def read(registry: Registry, name: str, manifest: str = "") -> Version:
    """The version of that name.

    Args:
        manifest: the SHA-256 that its list of files must have; empty: any.

    Raises:
        UserError: there is none, or its list of files was altered.
    """
    if not DIGEST.fullmatch(name):
        raise UserError(f"version {name!r}: must be the SHA-256 of its weights, 64 hexadecimal digits")
    address = registry.at("versions", name, MANIFEST)
    with registry.explained("read"):
        try:
            content = storage.retried(address, storage.read)
        except MissingError:
            raise UserError(
                f"registry {registry.address!r}: {registry.name} has no complete version {name}: there is no "
                f"{MANIFEST} in it; give another one, or write it again"
            ) from None
    if manifest and hashlib.sha256(content).hexdigest() != manifest:
        raise altered(registry, name, MANIFEST)
    try:
        files = {str(file): str(digest) for file, digest in json.loads(content)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        files = {}
    if files.get(WEIGHTS) != name or SIDECAR not in files:
        raise altered(registry, name, MANIFEST)
    return Version(name, hashlib.sha256(content).hexdigest(), files)


def fetch(registry: Registry, version: Version, folder: Path, files: tuple[str, ...] = (WEIGHTS, SIDECAR)) -> None:
    """Puts files of a version into a folder.

    Raises:
        UserError: one cannot be read, or was altered.
    """
    for file in files:
        address = registry.at("versions", version.name, file)

        def transfer(source: str, target: Path = folder / file) -> None:
            with storage.open_file(source) as found, replacing(target, durable=False) as local:
                for chunk in found.chunks:
                    local.write(chunk)

        with registry.explained("read"):
            storage.retried(address, transfer)
        if file_digest(folder / file) != version.files.get(file):
            raise altered(registry, version.name, file)


def altered(registry: Registry, version: str, file: str) -> UserError:
    """The error for a file that is not what was written."""
    return UserError(
        f"{registry.at('versions', version, file)}: is damaged or was altered; restore it, or promote another version"
    )
