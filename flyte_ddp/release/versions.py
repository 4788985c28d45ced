"""Versions of a model in its registry: folders of files, named by the SHA-256 of the weights, and written once.

The manifest, the list of a version's files, is written last. A folder without it is of a killed writer, and is
completed when the same files are written again. If the same weights are judged again and promoted, the new files are a
revision: a folder ``2`` in the version's folder, then ``3``, and so on. An entry of the log names the revision by the
SHA-256 of its manifest. The weights are in the version's folder alone. Every function raises a UserError if the
registry cannot be read or written.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flyte_ddp.errors import UserError
from flyte_ddp.files import SIDECAR, WEIGHTS
from flyte_ddp.release.registry import DAMAGED, Registry, content_digest
from flyte_ddp.text.formatting import describe_input

MANIFEST = "manifest.json"
DIGEST = re.compile(r"[0-9a-f]{64}")
LISTED = re.compile(rf"(?:([0-9]+)/)?{re.escape(MANIFEST)}")


class Version(NamedTuple):
    """A complete version, in one of its revisions."""

    name: str  # the SHA-256 of its weights
    folder: str  # in the registry
    manifest: str  # the SHA-256 of its manifest
    files: dict[str, str]  # the SHA-256 of each file by its name


def read_task(sidecar: Mapping[str, Any]) -> dict[str, Any]:
    """Return what comparable models share; of the input the shape alone counts, as each data set has its own mean."""
    return {
        "objective": sidecar.get("objective", "classification"),  # older ones name none
        "objective's options": sidecar.get("options", {}).get("objective", {}),
        "target shape": sidecar.get("target_shape", []),
        "classes": sidecar["classes"],
        "input": describe_input(sidecar["input"]),
    }


def write_version(registry: Registry, files: Mapping[str, Path | bytes]) -> Version:
    """Upload the files of a version that are missing, its manifest last, and return the version. Replaces no file.

    Weights that are stored with other files get a new revision, which has all files but the weights. The first of
    ``files`` must differ between judgements: it shows at once that a folder belongs to another one.
    """
    digests = {file: content_digest(content) for file, content in files.items()}
    manifest = json.dumps({"files": dict(sorted(digests.items()))}, indent=1).encode() + b"\n"
    name, number = digests[WEIGHTS], 1
    weights = registry.at(revision_folder(name, 1), WEIGHTS)
    if not registry.create_file(weights, files[WEIGHTS]):
        raise damaged_file_error(weights)
    others = {file: content for file, content in files.items() if file != WEIGHTS} | {MANIFEST: manifest}

    def create_others(folder: str) -> bool:
        return all(registry.create_file(registry.at(folder, file), content) for file, content in others.items())

    while not create_others(revision_folder(name, number)):
        number += 1
    return Version(name, revision_folder(name, number), content_digest(manifest), digests)


def revision_folder(name: str, number: int) -> str:
    return f"versions/{name}" if number == 1 else f"versions/{name}/{number}"


def file_address(registry: Registry, version: Version, file: str) -> str:
    return registry.at(revision_folder(version.name, 1) if file == WEIGHTS else version.folder, file)


def read_version(registry: Registry, name: str, manifest: str = "") -> Version:
    """Return the version as :func:`find_version` does; raise a UserError if there is none."""
    if (found := find_version(registry, name, manifest)) is None:
        raise UserError(
            f"registry {registry.address!r}: {registry.name} has no complete version {name}: there is no {MANIFEST} "
            "in it; give another one, or write it again"
        )
    return found


def find_version(registry: Registry, name: str, manifest: str = "") -> Version | None:
    """Return the version whose weights have the SHA-256 ``name``; None if no revision of it is complete.

    ``manifest`` is the SHA-256 of one revision's manifest; empty: the newest. Raises a UserError if ``name`` is no
    SHA-256, no revision has that ``manifest``, the manifest is damaged, or a file that it names is missing.
    """
    if not DIGEST.fullmatch(name):
        raise UserError(f"version {name!r}: must be the SHA-256 of its weights, 64 hexadecimal digits")
    place = registry.at("versions", name)
    names = registry.list_files(place)
    numbers = sorted((int(found[1] or 1) for found in map(LISTED.fullmatch, names) if found), reverse=True)
    for number in numbers:
        folder = revision_folder(name, number)
        content = registry.read_file(registry.at(folder, MANIFEST)) or b""
        if manifest in ("", content_digest(content)):
            try:
                files = {str(file): str(digest) for file, digest in json.loads(content)["files"].items()}
            except (*DAMAGED, AttributeError):
                files = {}
            if files.get(WEIGHTS) != name or SIDECAR not in files:
                raise damaged_file_error(registry.at(folder, MANIFEST))
            version = Version(name, folder, content_digest(content), files)
            there = {registry.at("versions", name, file) for file in names}
            if missing := [file for file in files if file_address(registry, version, file) not in there]:
                said = "is missing; restore it" if len(missing) == 1 else "are missing; restore them"
                raise UserError(f"{registry.at(folder, ', '.join(missing))}: {said}, or promote another version")
            return version
    if not numbers:
        return None
    raise UserError(
        f"{place}: has no {MANIFEST} with the SHA-256 {manifest[:12]}..., which was altered or deleted; restore it, or "
        "promote another version"
    )


def verify_files(registry: Registry, version: Version) -> None:
    """Read all files of a version whole; UserError for the first that is missing or was altered."""
    for file, digest in version.files.items():
        address = file_address(registry, version, file)
        if registry.hash_file(address) != digest:
            raise damaged_file_error(address)


def read_version_file(registry: Registry, version: Version, file: str) -> bytes:
    """Return the content of a version's file; UserError if the file is missing or was altered."""
    address = file_address(registry, version, file)
    content = registry.read_file(address)
    if content is None or content_digest(content) != version.files[file]:
        raise damaged_file_error(address)
    return content


def damaged_file_error(address: str) -> UserError:
    return UserError(f"{address}: is damaged or was altered; restore it, or promote another version")
