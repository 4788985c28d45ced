"""Data sets that consist of published files with published digests, on the public addresses or a team's mirror."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.datasets.arrays import ImageArrays, image_arrays
from flyte_ddp.datasets.identity import digest_of
from flyte_ddp.errors import UserError
from flyte_ddp.progress import Progress
from flyte_ddp.storage import (
    AlteredError,
    ForbiddenError,
    MissingError,
    UnavailableError,
    check_length,
    join,
    local_path,
    open_file,
    read,
    retried,
)
from flyte_ddp.storage.digest_list import SUMS, DigestListError, read_sums

Arrays = tuple[object, object, object, object]  # train images, train labels, test images, test labels


@dataclass(frozen=True)
class PublishedFile:
    """A file's name and MD5 (hex); ``repacked``: MD5 of known copies with the same content, compressed again."""

    name: str
    md5: str
    repacked: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublishedSet:
    """A published data set.

    ``addresses`` are directories that hold the files, tried in order after ``system_folder``, where a package of the
    operating system or of Python puts them. ``read`` takes the folder with the verified files.
    """

    name: str
    files: tuple[PublishedFile, ...]
    addresses: tuple[str, ...]
    classes: tuple[str, ...]
    read: Callable[[Path], Arrays]
    system_folder: str = ""

    def fingerprint(self, source: str) -> str:
        """Names the content by the digests that its files must have; of a mirror only ``SHA256SUMS`` is read."""
        sums = mirror_digests(self, source, Progress())
        return f"{self.name}-{digest_of(f'{file.name} {sums.get(file.name, file.md5)}' for file in self.files)[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[ImageArrays, str]:
        """Gets the files into ``workspace``, checks them, reads them and removes them."""
        sums = mirror_digests(self, source, progress)
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
    dataset: PublishedSet, file: PublishedFile, source: str, sums: dict[str, str], folder: Path, *, progress: Progress
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

    system = [dataset.system_folder] if dataset.system_folder and Path(dataset.system_folder).is_dir() else []
    usual = [join(place, file.name) for place in (*system, *dataset.addresses)]
    try:
        return retried(join(source, file.name) if source else usual, transfer, progress.note)
    except UnavailableError as failure:
        if source:
            raise mirror_error(dataset, file.name, source, failure) from None
        raise failure.explained(
            f"{dataset.name}: cannot get {file.name} ({failure}); check the network, or set data_source to a directory "
            "or mirror that holds it"
        ) from None


def mirror_digests(dataset: PublishedSet, source: str, progress: Progress) -> dict[str, str]:
    """SHA-256 of each file as the mirror's ``SHA256SUMS`` has it; empty where there is no mirror or no such file.

    With it a team serves data of its own in a published data set's format behind an address that does not change.

    Raises:
        UserError: the mirror is not there, or its ``SHA256SUMS`` leaves a file out or is not understood.
    """
    if not source:
        return {}
    path = local_path(source)
    if path is not None and not path.is_dir():
        raise UserError(f"data_source={source!r}: there is no such directory; give one that holds {names(dataset)}")
    try:
        content = retried(join(source, SUMS), read, progress.note)
    except (MissingError, ForbiddenError):  # web servers answer 403 for files that are not there, too
        return {}
    except UnavailableError as failure:
        raise mirror_error(dataset, SUMS, source, failure) from None
    try:
        found = read_sums(content)
    except DigestListError as error:
        raise UserError(
            f"data_source={source!r}: {SUMS} there is not understood: {error}; renew it beside the files: "
            f"sha256sum * > {SUMS}"
        ) from None
    for file in dataset.files:
        if file.name not in found:
            raise UserError(
                f"data_source={source!r}: {SUMS} there has no SHA-256 of {file.name}; "
                f"renew it beside the files: sha256sum * > {SUMS}"
            )
    return found


def mirror_error(dataset: PublishedSet, name: str, source: str, failure: UnavailableError) -> UserError:
    """The error for a mirror that failed."""
    where = f"data_source={source!r}"
    if isinstance(failure, MissingError):
        return UserError(f"{where}: has no {name} ({failure}); it must hold {names(dataset)}")
    if isinstance(failure, AlteredError):
        return UserError(
            f"{where}: {name} is damaged or altered: {failure}; copy it again, or, if your data are meant to differ, "
            f"publish their digests beside them: sha256sum * > {SUMS}"
        )
    return failure.explained(f"{where}: cannot read {name}: {failure}; check the address, and that the server is up")


def names(dataset: PublishedSet) -> str:
    """The files of a data set, for messages."""
    return ", ".join(file.name for file in dataset.files)
