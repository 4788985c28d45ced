"""Data sets that consist of published files with published digests, on the public addresses or a team's mirror."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from flyte_ddp.datasets.arrays import ImageArrays, image_arrays
from flyte_ddp.datasets.identity import digest_of
from flyte_ddp.errors import UnreachableError, UserError
from flyte_ddp.progress import Progress
from flyte_ddp.storage import (
    AllFailedError,
    AlteredError,
    MissingError,
    UnavailableError,
    check_length,
    join,
    local_path,
    open_file,
    read,
    retried,
    with_retries,
)
from flyte_ddp.storage.digest_list import SUMS, read_sums

Arrays = tuple[object, object, object, object]  # train images, train labels, test images, test labels


@dataclass(frozen=True)
class PublishedFile:
    """A file's name and MD5 (hex); ``repacked``: MD5 of known copies with the same content, compressed anew."""

    name: str
    md5: str
    repacked: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublishedSet:
    """A published data set.

    ``addresses`` are directories that hold the files, tried in order after ``system_folder``, where a package of the
    operating system puts them. ``read`` takes the folder with the verified files. ``needed_bytes`` is what the prepared
    folder takes on the disk.
    """

    name: str
    files: tuple[PublishedFile, ...]
    addresses: tuple[str, ...]
    classes: tuple[str, ...]
    read: Callable[[Path], Arrays]
    needed_bytes: int
    system_folder: str = ""

    def fingerprint(self, source: str) -> str:
        """Names the content by the digests that its files must have; of a mirror only ``SHA256SUMS`` is read."""
        sums = mirror_digests(self, source, Progress()) if source else None
        lines = [f"{file.name} {sums[file.name] if sums else file.md5}" for file in self.files]
        return f"{self.name}-{digest_of(lines)[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[ImageArrays, str]:
        """Gets the files into ``workspace``, checks them, reads them and removes them."""
        sums = mirror_digests(self, source, progress) if source else None
        raw = workspace / "raw"
        raw.mkdir()
        used = [get(self, file, source, sums, raw, progress=progress) for file in self.files]
        try:
            arrays = image_arrays(*self.read(raw), classes=self.classes, name=self.name)
        except UserError as error:
            raise UserError(f"{source or used[0]}: {error.message}") from error
        shutil.rmtree(raw)
        return arrays, " and ".join(dict.fromkeys(used))


def get(
    dataset: PublishedSet,
    file: PublishedFile,
    source: str,
    sums: dict[str, str] | None,
    folder: Path,
    *,
    progress: Progress,
) -> str:
    """Puts one file into ``folder`` and returns the directory or mirror that it came from."""
    algorithm, digests = ("sha256", [sums[file.name]]) if sums else ("md5", [file.md5, *file.repacked])

    def transfer(address: str) -> str:
        digest, place = hashlib.new(algorithm, usedforsecurity=False), address.removesuffix(file.name)
        remote = local_path(address) is None
        with open_file(address) as found, (folder / file.name).open("wb") as target:
            with progress.track(f"{file.name} from {place}", found.size, "B") as advance:
                for chunk in found.chunks:
                    target.write(chunk)
                    digest.update(chunk)
                    advance(len(chunk))
            received = target.tell()
        check_length(received, found.size, remote=remote)
        if digest.hexdigest() not in digests:
            what = f"{algorithm} {digest.hexdigest()} ({received:,} bytes) instead of {digests[0]}"
            raise AlteredError(what, transient=remote)
        return place.rstrip("/")

    places = [source] if source else usual_places(dataset)
    try:
        return with_retries(file.name, [join(place, file.name) for place in places], transfer, progress.note)
    except AllFailedError as error:
        if source:
            [failure] = error.failures.values()
            explain(dataset, file.name, source, failure, own_digests=bool(sums))
        kind = UnreachableError if any(failure.transient for failure in error.failures.values()) else UserError
        raise kind(
            f"{dataset.name}: cannot get {file.name} ({error}); check the network, or set data_source to a directory "
            "or mirror that holds it"
        ) from None


def usual_places(dataset: PublishedSet) -> list[str]:
    """Where to look without a mirror: the system's copy, if there is one, then the public addresses."""
    system = [dataset.system_folder] if dataset.system_folder and Path(dataset.system_folder).is_dir() else []
    return [*system, *dataset.addresses]


def mirror_digests(dataset: PublishedSet, source: str, progress: Progress) -> dict[str, str] | None:
    """SHA-256 of each file as the mirror's ``SHA256SUMS`` has it, or None where the mirror has no such file.

    With it a team serves data of its own in a published data set's format behind an address that does not change.

    Raises:
        UserError: the mirror is not there, or its ``SHA256SUMS`` leaves a file out.
    """
    path = local_path(source)
    if path is not None and not path.is_dir():
        raise UserError(f"data_source={source!r}: there is no such directory; give one that holds {names(dataset)}")
    try:
        content = retried(join(source, SUMS), read, progress.note)
    except MissingError:
        return None
    except UnavailableError as failure:
        explain(dataset, SUMS, source, failure, own_digests=False)
    found = read_sums(content)
    for file in dataset.files:
        if file.name not in found:
            raise UserError(
                f"data_source={source!r}: {SUMS} there has no SHA-256 of {file.name}; "
                f"renew it beside the files: sha256sum * > {SUMS}"
            )
    return found


def explain(dataset: PublishedSet, name: str, source: str, failure: UnavailableError, *, own_digests: bool) -> NoReturn:
    """Raises the error for a mirror that failed."""
    where = f"data_source={source!r}"
    if isinstance(failure, MissingError):
        raise UserError(f"{where}: has no {name} ({failure}); it must hold {names(dataset)}") from None
    if isinstance(failure, AlteredError) and own_digests:
        raise UserError(
            f"{where}: {name} is damaged or {SUMS} there is out of date: {failure}; copy the file again or renew {SUMS}"
        ) from None
    if isinstance(failure, AlteredError):
        raise UserError(
            f"{where}: {name} is damaged or altered: {failure}, its published digest; copy it again, or, if your data "
            f"are meant to differ, publish their digests beside them: sha256sum * > {SUMS}"
        ) from None
    message = f"{where}: cannot read {name}: {failure}; check the address, and that the server is up"
    raise failure.explained(message) from None


def names(dataset: PublishedSet) -> str:
    """The files of a data set, for messages."""
    return ", ".join(file.name for file in dataset.files)
