"""Versions of a model in its registry: folders of files, named by the SHA-256 of the weights, and written once.

The manifest, the list of a version's files, is written last. A folder without it is of a writer that was killed, and is
completed when the same files are written again. If the same weights are judged again and promoted, the new files are a
revision: a folder ``2`` in the version's folder, then ``3``, and so on. An entry of the log names the revision that
became champion by the SHA-256 of its manifest. Every function raises a UserError if the registry cannot be read or
written.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import file_digest, replace_file
from flyte_ddp.release.registry import Registry
from flyte_ddp.storage import ExistsError, MissingError

WEIGHTS, SIDECAR, MANIFEST = "model.pt", "model.json", "manifest.json"
DIGEST = re.compile(r"[0-9a-f]{64}")
LISTED = re.compile(rf"(?:([0-9]+)/)?{re.escape(MANIFEST)}")


class Version(NamedTuple):
    """A complete version, in one of its revisions."""

    name: str  # the SHA-256 of its weights
    folder: str  # in the registry
    manifest: str  # the SHA-256 of its manifest
    files: dict[str, str]  # the SHA-256 of each file by its name


def write_version(registry: Registry, files: Mapping[str, Path | bytes]) -> Version:
    """Upload the files of a version that are missing, its manifest last, and return the version.

    Writes a new revision if the registry has these weights with other files. Replaces no file.

    Args:
        registry: of the model.
        files: contents or paths by name, ``model.pt`` among them. The first file must differ between judgements: by
            this file a writer sees that a folder is another judgement's.

    Raises:
        UserError: the stored weights are damaged, or the registry cannot be written to.
    """
    digests = {file: content_digest(content) for file, content in files.items()}
    manifest = json.dumps({"files": dict(sorted(digests.items()))}, indent=1).encode() + b"\n"
    contents, name, number = {**files, MANIFEST: manifest}, digests[WEIGHTS], 1
    while True:
        folder = revision_folder(name, number)
        for file, content in contents.items():
            with registry.explain_failures("written"):
                if create_or_compare_file(registry.at(folder, file), content):
                    continue
            if file == WEIGHTS:
                raise damaged_file_error(registry.at(folder, WEIGHTS))
            break
        else:
            return Version(name, folder, content_digest(manifest), digests)
        number += 1


def revision_folder(name: str, number: int) -> str:
    """Return the folder of a version's revision, from the registry's; revision 1 is in the version's folder itself."""
    return f"versions/{name}" if number == 1 else f"versions/{name}/{number}"


def create_or_compare_file(address: str, content: Path | bytes) -> bool:
    """Write a file if it is missing, else read the stored one whole; return whether it has this content now."""
    try:
        storage.retry(address, lambda to: storage.create_file(to, content))
    except ExistsError:  # by an earlier try, or by somebody with the same weights
        return read_digest(address) == content_digest(content)
    return True


def read_digest(address: str) -> str:
    """Read a whole file, wherever it is, and return its SHA-256; empty if the file is missing."""

    def hash_file(address: str) -> str:
        """Read a file whole, and return its SHA-256."""
        digest = hashlib.sha256()
        with storage.open_file(address) as found:
            for chunk in found.chunks:
                digest.update(chunk)
        return digest.hexdigest()

    try:
        return storage.retry(address, hash_file)
    except MissingError:
        return ""


def content_digest(content: Path | bytes) -> str:
    """Return the SHA-256 of bytes, or of the file at a path."""
    return file_digest(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()


def read_version(registry: Registry, name: str, manifest: str = "") -> Version:
    """Return a version of the registry; raise a UserError if it is missing, incomplete or altered.

    Reads only manifests. ``name`` is the SHA-256 of the weights, and ``manifest`` that of the manifest of one revision;
    empty: the newest revision.
    """
    if (found := find_version(registry, name, manifest)) is None:
        raise UserError(
            f"registry {registry.address!r}: {registry.name} has no complete version {name}: there is no {MANIFEST} "
            "in it; give another one, or write it again"
        )
    return found


def find_version(registry: Registry, name: str, manifest: str = "") -> Version | None:
    """Return a version of the registry, or None if it is missing or incomplete.

    Lists its folder and reads manifests, but no other file.

    Args:
        registry: of the model.
        name: the SHA-256 of its weights.
        manifest: the SHA-256 of the manifest of the revision; empty: the newest revision. Manifests are read from the
            newest one on, until it is found.

    Raises:
        UserError: the manifest was altered, or a file is missing.
    """
    if not DIGEST.fullmatch(name):
        raise UserError(f"version {name!r}: must be the SHA-256 of its weights, 64 hexadecimal digits")
    place = registry.at(revision_folder(name, 1))
    with registry.explain_failures("read"):
        try:
            there = {entry.name for entry in storage.retry(place, lambda of: [*storage.list_files(of)])}
        except MissingError:
            return None
    numbers = sorted((int(found[1] or 1) for found in map(LISTED.fullmatch, there) if found), reverse=True)
    for number in numbers:
        folder = revision_folder(name, number)
        with registry.explain_failures("read"):
            content = storage.retry(registry.at(folder, MANIFEST), storage.read_file)
        if manifest in ("", content_digest(content)):
            try:
                files = {str(file): str(digest) for file, digest in json.loads(content)["files"].items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                files = {}
            if files.get(WEIGHTS) != name or SIDECAR not in files:
                raise damaged_file_error(registry.at(folder, MANIFEST))
            for file in files:
                if ("" if number == 1 else f"{number}/") + file not in there:
                    raise UserError(f"{registry.at(folder, file)}: is missing; restore it, or promote another version")
            return Version(name, folder, content_digest(content), files)
    if not numbers:
        return None
    raise UserError(
        f"{place}: has no {MANIFEST} with the SHA-256 {manifest[:12]}..., which was altered or deleted; restore it, or "
        "promote another version"
    )


def find_damaged_files(registry: Registry, version: Version) -> Iterator[UserError]:
    """Read all files of a version whole, and yield an error for each that is missing or was altered."""
    for file, digest in version.files.items():
        address = registry.at(version.folder, file)
        with registry.explain_failures("read"):
            found = read_digest(address)
        if found != digest:
            yield damaged_file_error(address)


def verify_files(registry: Registry, version: Version) -> None:
    """Read all files of a version whole; raise a UserError if one is missing or was altered."""
    for error in find_damaged_files(registry, version):
        raise error


def fetch_files(
    registry: Registry, version: Version, folder: Path, files: tuple[str, ...] = (WEIGHTS, SIDECAR)
) -> None:
    """Download files of a version into an existing folder; raise a UserError if one is missing or was altered."""
    for file in files:
        address = registry.at(version.folder, file)

        def download(source: str, target: Path = folder / file) -> None:
            with storage.open_file(source) as found, replace_file(target, durable=False) as local:
                for chunk in found.chunks:
                    local.write(chunk)

        with registry.explain_failures("read"):
            storage.retry(address, download)
        if file_digest(folder / file) != version.files.get(file):
            raise damaged_file_error(address)


def damaged_file_error(address: str) -> UserError:
    """Return the error that says that the file at an address is not what was written."""
    return UserError(f"{address}: is damaged or was altered; restore it, or promote another version")
