"""A model's registry in a folder or in object storage: a log whose last entry names the champion.

    ADDRESS/NAME/log/00000001.json          an entry: the new champion, the reason, and the digest of the entry before.
    ADDRESS/NAME/versions/DIGEST/           a version: the files of a model, by the SHA-256 of the weights.
    ADDRESS/NAME/judgements/TEST_DIGEST/    the judgements on a test split, each counted as a look at the split.
        looks/00000007.json                 the seventh look: both models, and the rule
        pairs/DIGEST.json                   the look of two models and a rule, for a repeated comparison.

Every file is written once. No file is ever locked, and half-written versions need no repair. If two writers append the
next entry, one writer succeeds, and the other gets a LostError.

A version's manifest lists the version's files, and is written last. A folder without a manifest was left by a killed
writer. Writing the same files again completes the folder. If the same weights are judged again and promoted, the new
files are a revision in the version's folder: ``2``, then ``3``, and so on. The weights are in the version's folder
alone. An entry of the log names the revision by the SHA-256 of the manifest.
"""

import json
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import SIDECAR, WEIGHTS, file_digest, replace_file
from flyte_ddp.core.text.formatting import join_first
from flyte_ddp.release.model_files import content_digest, list_or_empty
from flyte_ddp.release.promotion_log import PromotionLog

MANIFEST = "manifest.json"
BEGINNING = re.compile(r"[0-9a-f]{12,64}")  # of a version's name
MOST = 12  # versions that an error lists
LISTED = re.compile(rf"(?:([0-9]+)/)?{re.escape(MANIFEST)}")
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # errors of parsing damaged JSON


class Version(NamedTuple):
    """A complete version, in a specific revision."""

    name: str  # the SHA-256 of its weights
    folder: str  # in the registry
    manifest: str  # the SHA-256 of its manifest
    files: dict[str, str]  # the SHA-256 of each file by its name


class Registry(PromotionLog):
    """The registry of one model: the log, the versions, and the judgements.

    The methods retry failed requests as :class:`ModelFiles` describes.
    """

    def list_versions(self) -> list[str]:
        """Return the names of all versions, also of incomplete versions.

        Raises UserError if the model has no versions.
        """
        with self.translate_storage_errors("listed"):
            names = list_or_empty(self.address_of("versions"), storage.list_folders)
        if not names:
            self.check_model_exists()
            raise UserError(f"registry {self.address!r}: {self.name} has no versions; release a model first")
        return names

    def complete_version_name(self, version: str) -> str:
        """Return the whole name of the version that begins with the digits ``version``.

        At least 12 hexadecimal digits are needed. Upper case and blanks around the digits are accepted.

        Raises:
            UserError: No version or several versions match. The message lists the versions.
        """
        names, digits = self.list_versions(), version.strip().lower()
        listed = f"{self.name} has {join_first((name[:12] for name in names), MOST)}"
        if not BEGINNING.fullmatch(digits):
            rule = "must be the SHA-256 of a version's weights, or at least its first 12 hexadecimal digits"
            raise UserError(f"version {version!r}: {rule}; {listed}")
        found = [name for name in names if name.startswith(digits)]
        if not found:
            raise UserError(f"version {version!r}: does not exist; {listed}")
        if len(found) > 1:
            raise UserError(f"version {version!r}: matches {' and '.join(found)}; give more digits")
        return found[0]

    def register_look(self, test_digest: str, challenger: str, champion: str, rule: str) -> int:
        """Record that two models are compared on a test split, and return the number of this look at the split.

        Looks are numbered from 1. If the same models were compared on the split by the same rule before, returns the
        earlier number. Writes two small files, each in up to 4 tries with pauses.

        Args:
            test_digest: The digest of the test split.
            challenger: The SHA-256 of the challenger's weights.
            champion: The SHA-256 of the champion's weights, or "none".
            rule: The rule of the comparison with its numbers, as text.

        Raises:
            UserError: The record of the earlier comparison is damaged.
        """
        folder = self.address_of("judgements", test_digest)
        compared = {"challenger": challenger, "champion": champion, "rule": rule}
        pair = storage.join_address(folder, f"pairs/{content_digest(json.dumps(compared).encode())}.json")
        if (content := self.read_if_exists(pair, storage.read_file)) is not None:
            try:
                return int(json.loads(content)["look"])
            except DAMAGED:
                raise UserError(f"{pair}: is damaged; restore the file, or delete it and use another look") from None
        number = 1 + len(self.list_files(storage.join_address(folder, "looks")))
        values = {**compared, "nonce": secrets.token_hex(16)}  # differs between judges
        while not self.create_file(
            storage.join_address(folder, f"looks/{number:08}.json"),
            json.dumps({"look": number, **values}, indent=1).encode(),
        ):
            number += 1
        # A process killed here loses the number, which makes later comparisons a bit stricter.
        # Two processes that judge the same pair at once get two looks. Later comparisons use the first look.
        self.create_file(pair, json.dumps({"look": number}).encode())
        return number

    def write_version(self, files: Mapping[str, Path | bytes]) -> Version:
        """Upload the missing files of a version, and return the version. Replaces no file.

        If the registry has the same weights with other files, the new files become a new revision. The manifest is
        written last, and makes the version complete.

        Args:
            files: Contents or paths by name, with the weights and the sidecar. The first file must differ between
                judgements, as verdicts do, because the first file decides whether a revision is another judgement's.

        Raises:
            UserError: The stored weights are damaged.
        """
        digests = {file: content_digest(content) for file, content in files.items()}
        manifest = json.dumps({"files": dict(sorted(digests.items()))}, indent=1).encode() + b"\n"
        name, number = digests[WEIGHTS], 1
        folder = revision_folder(name, number)
        weights = self.address_of(folder, WEIGHTS)
        if not self.create_file(weights, files[WEIGHTS]):
            raise damaged_file_error(weights)
        others = {file: content for file, content in files.items() if file != WEIGHTS} | {MANIFEST: manifest}
        while not all(self.create_file(self.address_of(folder, file), content) for file, content in others.items()):
            number += 1
            folder = revision_folder(name, number)
        return Version(name, folder, content_digest(manifest), digests)

    def file_address(self, version: Version, file: str) -> str:
        return self.address_of(revision_folder(version.name, 1) if file == WEIGHTS else version.folder, file)

    def read_version(self, name: str, manifest: str = "") -> Version:
        """Return the complete version whose weights have the SHA-256 ``name``.

        ``manifest`` is the SHA-256 of a revision's manifest. The default is the newest revision.

        Raises:
            UserError: No complete version exists, no revision has this manifest, or the manifest is damaged.
        """
        if (found := self.find_version(name, manifest)) is None:
            raise UserError(
                f"registry {self.address!r}: {self.name} has no complete version {name} ({MANIFEST} is "
                "missing); give another version, or write this version again"
            )
        return found

    def find_version(self, name: str, manifest: str = "") -> Version | None:
        """Return the version whose weights have the SHA-256 ``name``, or None if no revision is complete.

        ``manifest`` is the SHA-256 of a revision's manifest. The default is the newest revision. Raises UserError if no
        revision has this manifest, or the manifest is damaged.
        """
        place = self.address_of("versions", name)
        manifests = map(LISTED.fullmatch, self.list_files(place))
        numbers = sorted((int(found[1] or 1) for found in manifests if found), reverse=True)
        for number in numbers:
            folder = revision_folder(name, number)
            content = self.read_if_exists(self.address_of(folder, MANIFEST), storage.read_file) or b""
            if manifest in ("", content_digest(content)):
                try:
                    files = {str(file): str(digest) for file, digest in json.loads(content)["files"].items()}
                except DAMAGED:
                    files = {}
                if files.get(WEIGHTS) != name or SIDECAR not in files:
                    raise damaged_file_error(self.address_of(folder, MANIFEST))
                return Version(name, folder, content_digest(content), files)
        if not numbers:
            return None
        raise UserError(
            f"{place}: the {MANIFEST} with the SHA-256 {manifest[:12]}... was altered or deleted; restore the "
            "file, or promote another version"
        )

    def download_file(self, version: Version, file: str, folder: Path) -> Path:
        """Download a version's file into an existing folder, and return the path. Replaces a file of this name.

        Makes up to 4 tries, with pauses. Raises UserError if the file is missing or was altered. An altered file
        remains in the folder.
        """
        address, path = self.file_address(version, file), folder / file
        with (
            self.translate_storage_errors("read"),
            suppress(storage.MissingError),
            replace_file(path, durable=False) as target,
        ):
            storage.call_with_retries(address, partial(storage.download_file, file=target))
        if not path.exists() or file_digest(path) != version.files[file]:
            raise damaged_file_error(address)
        return path

    def verify_files(self, version: Version) -> None:
        """Read all files of a version completely. Raises UserError for the first file that is missing or altered."""
        for file, digest in version.files.items():
            address = self.file_address(version, file)
            if self.read_if_exists(address, storage.hash_file) != digest:
                raise damaged_file_error(address)

    def read_version_file(self, version: Version, file: str) -> bytes:
        """Return the content of a version's file. Raises UserError if the file is missing or altered."""
        address = self.file_address(version, file)
        content = self.read_if_exists(address, storage.read_file)
        if content is None or content_digest(content) != version.files[file]:
            raise damaged_file_error(address)
        return content


def revision_folder(name: str, number: int) -> str:
    return f"versions/{name}" if number == 1 else f"versions/{name}/{number}"


def damaged_file_error(address: str) -> UserError:
    return UserError(f"{address}: is missing, damaged or was altered; restore it, or promote another version")
