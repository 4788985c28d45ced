"""Data sets of published files with known digests, fetched from public addresses or from a team's mirror."""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.datasets.arrays import ImageArrays, image_arrays
from flyte_ddp.datasets.identity import digest_lines
from flyte_ddp.errors import UserError
from flyte_ddp.progress import Progress
from flyte_ddp.storage.digest_list import SUMS, DigestListError, parse_digest_list

Arrays = tuple[object, object, object, object]  # train images, train labels, test images, test labels
RENEW = f"sha256sum * > {SUMS}"  # the command that errors advise


@dataclass(frozen=True)
class PublishedSet:
    """A published data set: its files with their digests, where to find them, and how to read them."""

    name: str
    files: Mapping[str, tuple[str, ...]]  # by name: allowed MD5 digests (hex), one for each compression in use
    addresses: tuple[str, ...]  # directories that hold the files, tried in order after ``system_folder``
    classes: tuple[str, ...]
    read: Callable[[Path], Arrays]  # reads the verified files in a folder
    system_folder: str = ""  # where a system or Python package installs the files

    def fingerprint(self, source: str) -> str:
        """Return a name with a hash of the digests that the files must have; reads a mirror's ``SHA256SUMS``."""
        sums = self.read_mirror_digests(source, Progress())
        lines = (f"{name} {sums.get(name, known[0])}" for name, known in self.files.items())
        return f"{self.name}-{digest_lines(lines)[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[ImageArrays, str]:
        """Download the files, and return checked arrays and the addresses they came from.

        Downloads into ``workspace/raw``, and removes it after reading.
        """
        sums = self.read_mirror_digests(source, progress)
        raw = workspace / "raw"
        raw.mkdir()
        used = [self.download_file(name, source, sums, raw, progress) for name in self.files]
        try:
            arrays = image_arrays(*self.read(raw), classes=self.classes, name=self.name)
        except UserError as error:
            raise UserError(f"{source or used[0]}: {error.message}") from error
        shutil.rmtree(raw)
        return arrays, " and ".join(dict.fromkeys(used))

    def download_file(self, name: str, source: str, sums: dict[str, str], folder: Path, progress: Progress) -> str:
        """Download one file into ``folder`` with retries, verify its digest, and return the place it came from.

        With a ``source`` only this mirror is tried. ``sums`` holds the mirror's SHA-256 by file name; if it is empty,
        the published MD5 counts. Shows progress on stderr. Raises a UserError if no address serves the verified file.
        """
        algorithm, digests = ("sha256", (sums[name],)) if sums else ("md5", self.files[name])

        def download_and_verify(address: str) -> str:
            """Download the file from one address and verify it. Raises AlteredError for a wrong digest."""
            digest, place = hashlib.new(algorithm, usedforsecurity=False), address.removesuffix(name)
            remote = storage.local_path(address) is None
            with storage.open_file(address) as file, (folder / name).open("wb") as target:
                with progress.track(f"{name} from {place}", file.size, "B") as advance:
                    for chunk in file.chunks:
                        target.write(chunk)
                        digest.update(chunk)
                        advance(len(chunk))
                received = target.tell()
            storage.check_length(received, file.size, remote=remote)
            if digest.hexdigest() not in digests:
                what = f"{algorithm} {digest.hexdigest()} ({received:,} bytes) instead of {digests[0]}"
                raise storage.AlteredError(what, transient=remote)
            return place.rstrip("/")

        system = [self.system_folder] if self.system_folder and Path(self.system_folder).is_dir() else []
        usual = [storage.join(place, name) for place in (*system, *self.addresses)]
        try:
            return storage.retry(
                storage.join(source, name) if source else usual, download_and_verify, progress.print_note
            )
        except storage.UnavailableError as failure:
            if source:
                raise self.mirror_error(name, source, failure) from None
            raise failure.to_user_error(
                f"{self.name}: cannot get {name} ({failure}); check the network, or set data_source to a "
                "directory or mirror that holds it"
            ) from None

    def read_mirror_digests(self, source: str, progress: Progress) -> dict[str, str]:
        """Return the SHA-256 of each file by a mirror's ``SHA256SUMS``; {} without a mirror or without that file.

        A team can so serve its own data in the format of a published set. Raises a UserError if the mirror is missing,
        or ``SHA256SUMS`` cannot be parsed or lacks one of the files.
        """
        if not source:
            return {}
        where, path = f"data_source={source!r}", storage.local_path(source)
        if path is not None and not path.is_dir():
            raise UserError(f"{where}: there is no such directory; give one that holds {', '.join(self.files)}")
        try:
            digests = parse_digest_list(
                storage.retry(storage.join(source, SUMS), storage.read_file, progress.print_note)
            )
        except (storage.MissingError, storage.ForbiddenError):  # web servers answer 403 for missing files, too
            return {}
        except storage.UnavailableError as failure:
            raise self.mirror_error(SUMS, source, failure) from None
        except DigestListError as error:
            problem = f"is not understood: {error}"
        else:
            missing = [name for name in self.files if name not in digests]
            problem = f"has no SHA-256 of {missing[0]}" if missing else ""
        if problem:
            raise UserError(f"{where}: {SUMS} there {problem}; renew it in the folder of the files: {RENEW}")
        return digests

    def mirror_error(self, name: str, source: str, failure: storage.UnavailableError) -> UserError:
        """Return a UserError that says why the mirror did not serve the file ``name``, and what to do."""
        where = f"data_source={source!r}"
        if isinstance(failure, storage.MissingError):
            return UserError(f"{where}: has no {name} ({failure}); it must hold {', '.join(self.files)}")
        if isinstance(failure, storage.AlteredError):
            return UserError(
                f"{where}: {name} is damaged or altered: {failure}; copy it again, or, if your data are meant to "
                f"differ, publish their digests beside them: {RENEW}"
            )
        return failure.to_user_error(
            f"{where}: cannot read {name}: {failure}; check the address, and that the server is up"
        )
