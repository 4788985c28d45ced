"""Versions of a model in its registry: folders of files, named by the SHA-256 of the weights, and written once.

The list of files comes last. So a version whose writer was killed has none, and whoever writes it again goes on. A
later judgement of the same weights that promotes them is a revision: a folder ``2`` in the version's, and so on. An
entry of the log names the revision that became champion by the digest of its list.
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
LISTED = re.compile(rf"(?:([0-9]+)/)?{re.escape(MANIFEST)}")


class Version(NamedTuple):
    """A version that is complete, in one of its revisions."""

    name: str  # the SHA-256 of its weights
    folder: str  # in the registry
    manifest: str  # the SHA-256 of its list of files
    files: dict[str, str]  # the SHA-256 of each


def write(registry: Registry, files: Mapping[str, Path | bytes]) -> Version:
    """Writes a version, or what is missing of it; a revision of one that is there with other files.

    Args:
        files: contents or paths by name, ``model.pt`` among them. The first one must differ between judgements: by it a
            writer sees that a folder is another one's.

    Raises:
        UserError: the store cannot be written to, or the weights there have been altered.
    """
    digests = {file: content_digest(content) for file, content in files.items()}
    manifest = json.dumps({"files": dict(sorted(digests.items()))}, indent=1).encode() + b"\n"
    name, expected = digests[WEIGHTS], digests | {MANIFEST: content_digest(manifest)}
    number, differing = 1, ""
    while True:
        folder = revision_folder(name, number)
        with registry.explained("written"):
            for file, content in {**files, MANIFEST: manifest}.items():
                if written(registry.at(folder, file), content) != expected[file]:
                    differing = file
                    break
            else:
                return Version(name, folder, expected[MANIFEST], digests)
        if differing == WEIGHTS:
            raise altered(registry, folder, WEIGHTS)
        number += 1


def revision_folder(name: str, number: int) -> str:
    """Where in the registry a revision of a version is; the first one is in the version's folder itself."""
    return f"versions/{name}" if number == 1 else f"versions/{name}/{number}"


def written(address: str, content: Path | bytes) -> str:
    """Writes a file unless there is one, which then stays; returns the SHA-256 of what is there."""
    try:
        storage.retried(address, lambda to: storage.create(to, content))
    except ExistsError:  # by an earlier try, or by somebody with the same weights
        return stored_digest(address)
    return content_digest(content)


def stored_digest(address: str) -> str:
    """The SHA-256 of a file, wherever it is; empty if it is not there."""

    def of(address: str) -> str:
        digest = hashlib.sha256()
        with storage.open_file(address) as found:
            for chunk in found.chunks:
                digest.update(chunk)
        return digest.hexdigest()

    try:
        return storage.retried(address, of)
    except MissingError:
        return ""


def content_digest(content: Path | bytes) -> str:
    """The SHA-256 of a file's content."""
    return file_digest(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()


def read(registry: Registry, name: str, manifest: str = "") -> Version:
    """The version of that name, all of whose files are there.

    Args:
        manifest: the SHA-256 that its list of files must have; empty: that of the newest revision.

    Raises:
        UserError: there is none, its list of files was altered, or a file is missing.
    """
    if (found := find(registry, name, manifest)) is None:
        raise UserError(
            f"registry {registry.address!r}: {registry.name} has no complete version {name}: there is no {MANIFEST} "
            "in it; give another one, or write it again"
        )
    return found


def find(registry: Registry, name: str, manifest: str = "") -> Version | None:
    """The same; None if there is none."""
    if not DIGEST.fullmatch(name):
        raise UserError(f"version {name!r}: must be the SHA-256 of its weights, 64 hexadecimal digits")
    place = registry.at(revision_folder(name, 1))
    with registry.explained("read"):
        try:
            there = {entry.name for entry in storage.retried(place, lambda of: [*storage.list_files(of)])}
        except MissingError:
            there = set()
        numbers = sorted((int(found[1] or 1) for found in map(LISTED.fullmatch, there) if found), reverse=True)
        folders = [revision_folder(name, number) for number in numbers]
        lists = {folder: storage.retried(registry.at(folder, MANIFEST), storage.read) for folder in folders}
    if not lists:
        return None
    for folder, content in lists.items():
        if manifest in ("", content_digest(content)):
            return complete(registry, Version(name, folder, content_digest(content), files_in(content)), there)
    raise UserError(
        f"{place}: has no {MANIFEST} with the SHA-256 {manifest[:12]}..., which was altered or deleted; restore it, or "
        "promote another version"
    )


def files_in(manifest: bytes) -> dict[str, str]:
    """The SHA-256 of each file in a list; of none if it is no such list."""
    try:
        return {str(file): str(digest) for file, digest in json.loads(manifest)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def complete(registry: Registry, version: Version, there: set[str]) -> Version:
    """The version, if its files are among those that are there.

    Raises:
        UserError: one is missing, or the list was altered.
    """
    if version.files.get(WEIGHTS) != version.name or SIDECAR not in version.files:
        raise altered(registry, version.folder, MANIFEST)
    within = version.folder.removeprefix(revision_folder(version.name, 1)).lstrip("/")
    for file in version.files:
        if (f"{within}/{file}" if within else file) not in there:
            raise UserError(f"{registry.at(version.folder, file)}: is missing; restore it, or promote another version")
    return version


def check_content(registry: Registry, version: Version) -> None:
    """Reads all files of a version.

    Raises:
        UserError: one cannot be read, or was altered.
    """
    for file, digest in version.files.items():
        with registry.explained("read"):
            if stored_digest(registry.at(version.folder, file)) != digest:
                raise altered(registry, version.folder, file)


def fetch(registry: Registry, version: Version, folder: Path, files: tuple[str, ...] = (WEIGHTS, SIDECAR)) -> None:
    """Puts files of a version into a folder.

    Raises:
        UserError: one cannot be read, or was altered.
    """
    for file in files:
        address = registry.at(version.folder, file)

        def transfer(source: str, target: Path = folder / file) -> None:
            with storage.open_file(source) as found, replacing(target, durable=False) as local:
                for chunk in found.chunks:
                    local.write(chunk)

        with registry.explained("read"):
            storage.retried(address, transfer)
        if file_digest(folder / file) != version.files.get(file):
            raise altered(registry, version.folder, file)


def altered(registry: Registry, folder: str, file: str) -> UserError:
    """The error for a file that is not what was written."""
    return UserError(f"{registry.at(folder, file)}: is damaged or was altered; restore it, or promote another version")
