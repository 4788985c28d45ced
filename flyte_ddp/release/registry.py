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

import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, Self, TypeVar

from flyte_ddp import storage
from flyte_ddp.core.checks.parsing import parse_json
from flyte_ddp.core.checks.records import Count, JsonRecord
from flyte_ddp.core.errors import UserError, unknown_name_error
from flyte_ddp.core.files import SIDECAR, WEIGHTS, file_digest, replace_file
from flyte_ddp.core.text.formatting import join_first

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
MANIFEST = "manifest.json"
BEGINNING = re.compile(r"[0-9a-f]{12,64}")  # of a version's name
DIGEST = re.compile(r"[0-9a-f]{64}")
MOST = 12  # versions that an error lists
LISTED = re.compile(rf"(?:([0-9]+)/)?{re.escape(MANIFEST)}")
PROMOTE, ROLLBACK = "promote", "rollback"
ENTRY = re.compile(r"[0-9]{8}\.json")
READERS = 16  # threads that read entries
PROBE = ".creates-once"  # a file for testing whether the storage overwrites; no valid name of a model
DAMAGED = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
)  # errors of parsing damaged JSON

Value = TypeVar("Value")


@dataclass(frozen=True)
class Entry(JsonRecord):
    """An entry of the log, as it is stored."""

    number: Count  # from 1
    action: Annotated[str, {PROMOTE, ROLLBACK}]
    version: str  # the champion from now on: SHA-256 of its weights
    manifest: str  # SHA-256 of the version's manifest
    best: str  # the version with the best main measure so far, perhaps not the champion
    reason: str
    by: str  # a Flyte execution, or user@host
    time: str  # ISO 8601, UTC
    previous: str  # SHA-256 of the entry before; empty for the first
    nonce: str = ""  # differs between writers of the same entry
    digest: str = ""  # SHA-256 of this entry's file, which the file does not have

    @classmethod
    def from_file(cls, content: bytes) -> Self:
        """Parse the content of an entry's file. Raises ValueError if the content is malformed."""
        entry = cls.from_json_value(parse_json(content), "entry")
        if not all(map(DIGEST.fullmatch, (entry.version, entry.manifest))):
            raise ValueError("the version or the manifest is invalid")
        return replace(entry, digest=content_digest(content))


class LostError(UserError):
    """Another writer has appended the next entry of the log, ``winner``."""

    def __init__(self, winner: Entry) -> None:
        super().__init__(
            f"{winner.by} was faster: entry {winner.number} of the log made version {winner.version[:12]} the "
            f"champion ({winner.reason}); compare with this champion, and try again"
        )
        self.winner = winner


def check_model_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UserError(
            f"model name {name!r}: must be letters, digits, '_', '-' and '.' only, and begin with a letter or digit"
        )


def check_registry_address(address: str) -> None:
    if not address or storage.parse_scheme(address) in ("http", "https"):
        raise UserError(f"registry {address!r}: must be a path, or an address of s3://, gs:// or az://")


@contextmanager
def translate_storage_errors(address: str, problem: str) -> Iterator[None]:
    """Turn an UnavailableError of the block into a UserError with the registry's ``address`` and the ``problem``.

    The error is an UnreachableError if a retry may succeed.
    """
    try:
        yield
    except storage.UnavailableError as failure:
        said = f"{problem}: {failure}; check the address and the rights"
        raise failure.to_user_error(f"registry {address!r}: {said}") from None


def list_or_empty(folder: str, list_names: Callable[[str], list[Value]]) -> list[Value]:
    """Return ``list_names(folder)``, called with retries, or [] if the local folder is missing.

    Raises MissingError if the bucket is missing.
    """
    try:
        return storage.call_with_retries(folder, list_names)
    except storage.MissingError:
        if storage.find_local_path(folder) is None:  # the bucket is missing: an empty prefix raises no error
            raise
        return []


def list_models(address: str) -> list[str]:
    """Return the sorted names of all models in a registry.

    Raises:
        UserError: The address is invalid, the models cannot be listed, or the registry has no models.
    """
    check_registry_address(address)
    with translate_storage_errors(address, "its models cannot be listed"):
        names = [name for name in list_or_empty(address, storage.list_folders) if NAME.fullmatch(name)]
    if not names:
        raise UserError(f"registry {address!r}: has no models; release a model, or give another address")
    return names


def content_digest(content: Path | bytes) -> str:
    return file_digest(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()


class Version(NamedTuple):
    """A complete version, in a specific revision."""

    name: str  # the SHA-256 of its weights
    folder: str  # in the registry
    manifest: str  # the SHA-256 of its manifest
    files: dict[str, str]  # the SHA-256 of each file by its name


class Registry:
    """The registry of one model, in a folder or bucket that many models share.

    A failed request is retried up to 3 times, after pauses of up to 1, 2 and 4 s, if a retry may help. Then the method
    raises UserError. The constructor raises UserError for an invalid address or model name.
    """

    def __init__(self, address: str, name: str) -> None:
        check_model_name(name)
        check_registry_address(address)
        self.address, self.name = address, name

    def address_of(self, *parts: str) -> str:
        """Return the address of a file or folder of this model. ``parts`` are the names of the path below the model."""
        return storage.join_address(self.address, "/".join((self.name, *parts)))

    def entry_address(self, number: int) -> str:
        return self.address_of("log", f"{number:08}.json")

    def translate_storage_errors(self, action: str) -> AbstractContextManager[None]:
        """Turn an UnavailableError of the block into a UserError.

        The message says that the model cannot be ``action``: "read", "listed" or "written".
        """
        return translate_storage_errors(self.address, f"{self.name} cannot be {action}")

    def read_if_exists(self, address: str, read: Callable[[str], Value]) -> Value | None:
        """Return ``read(address)``, called with retries, or None if the file does not exist.

        Raises UserError if the file cannot be read.
        """
        with self.translate_storage_errors("read"):
            try:
                return storage.call_with_retries(address, read)
            except storage.MissingError:
                return None

    def list_files(self, folder: str) -> list[str]:
        """Return the sorted relative paths of all files below a folder, or [] if the folder is missing.

        Skips hidden local files.
        """
        with self.translate_storage_errors("listed"):
            return [entry.name for entry in list_or_empty(folder, lambda of: [*storage.list_files(of)])]

    def check_model_exists(self) -> None:
        """Raise UserError if the registry does not have this model. The error lists the registry's models."""
        if self.name not in (names := list_models(self.address)):
            error = unknown_name_error("model", self.name, names, "the list of `python -m flyte_ddp.release list`")
            raise UserError(f"registry {self.address!r}: {error.message}")

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

    def create_file(self, address: str, content: bytes | Path) -> bool:
        """Write a file unless the address has a file, and return whether the address has this content afterwards.

        Makes up to 4 tries, with pauses. ``content`` is the content, or the path of a file to copy. An existing file
        with the same content counts as written by an earlier try of this process. Two writers that compete for an
        address must therefore write different contents.
        """
        with self.translate_storage_errors("written"):
            try:
                storage.call_with_retries(address, lambda to: storage.create_file(to, content))
            except storage.ExistsError:
                # An earlier try may have written the file and lost the response. Rivals must write other contents.
                return self.read_if_exists(address, storage.hash_file) == content_digest(content)
        return True

    def check_storage_never_overwrites(self) -> None:
        """Raise UserError if the storage overwrites existing files.

        The test writes the file PROBE (``.creates-once``) beside the models. The file remains.
        """
        probe = storage.join_address(self.address, PROBE)
        if all(self.create_file(probe, secrets.token_bytes(16)) for _ in range(2)):
            raise UserError(
                f"registry {self.address!r}: the storage ignores If-None-Match, so two promotions at the same "
                "time could both succeed; use storage with If-None-Match, such as S3, Google's, Azure's, or a folder"
            )

    def read_champion(self) -> Entry | None:
        """Return the last entry of the log, which names the champion, or None if nothing was promoted.

        Older entries may be missing. Raises UserError if the digests in the entries show that an entry was altered.
        """
        numbers = self.list_entry_numbers()
        if not numbers:
            return None
        entry = self.read_entry(numbers[-1])
        before = entry.number - 1
        others = self.read_entries([before] if before in numbers else numbers[:-1])
        digests = {other.number: other.digest for other in others}
        if before in (0, *digests):
            follows = entry.previous == digests.get(before, "")
        else:  # the entry before is lost; a stray copy of an older entry would follow an existing entry
            follows = entry.previous not in ("", *digests.values())
        if not follows:
            raise self.altered_error(entry)
        return entry

    def read_log(self, at_least: int = 0) -> list[Entry]:
        """Return all entries of the log, oldest first.

        Raises:
            UserError: An entry was altered, or is missing. Entries up to the number ``at_least`` must exist.
        """
        numbers = self.list_entry_numbers()
        present = {*numbers}
        missing = next(number for number in itertools.count(1) if number not in present)
        if missing <= max([at_least, *numbers[-1:]]):
            rest = f"entries up to {numbers[-1]} exist" if numbers else "the log is empty"
            raise UserError(
                f"{self.entry_address(missing)} is missing; restore it, as no entry may be deleted ({rest})"
            )
        entries = [*self.read_entries(numbers)]
        for before, entry in itertools.pairwise([None, *entries]):
            if entry is not None and entry.previous != (before.digest if before else ""):
                raise self.altered_error(entry)
        return entries

    def read_entries(self, numbers: Sequence[int]) -> list[Entry]:
        with ThreadPoolExecutor(READERS) as pool:
            return [*pool.map(self.read_entry, numbers)]

    def altered_error(self, entry: Entry) -> UserError:
        rule = "does not follow the entry before it: one of the two was altered"
        return UserError(f"{self.entry_address(entry.number)} {rule}; restore them, or delete a stray copy")

    def list_entry_numbers(self) -> list[int]:
        names = self.list_files(self.address_of("log"))
        return [int(name.removesuffix(".json")) for name in names if ENTRY.fullmatch(name)]

    def read_entry(self, number: int) -> Entry:
        """Return the log's entry with this number. Raises UserError if the entry is missing or damaged."""
        address = self.entry_address(number)
        if (content := self.read_if_exists(address, storage.read_file)) is None:
            raise UserError(f"{address} is missing; restore it, as no entry may be deleted")
        with suppress(ValueError):
            entry = Entry.from_file(content)
            if entry.number == number:
                return entry
        raise UserError(f"{address} is damaged; restore it, as no entry of the log may be altered")

    def append_entry(self, before: Entry | None, *, by: str, reason: str, **values: str) -> Entry:
        """Append an entry to the log after the entry ``before``, and return the new entry.

        First writes a small file, to test that the storage never overwrites files.

        Args:
            before: The last entry of the log, or None for an empty log.
            by: The Flyte execution or user.
            reason: The reason of the entry, a text for people.
            values: The fields action, version, manifest and best.

        Raises:
            LostError: Another writer has written this entry.
            UserError: The reason is blank, or the storage overwrites files.
        """
        if not reason.strip():
            raise UserError("reason='': must not be empty; the registry's log keeps the reason")
        self.check_storage_never_overwrites()
        number = before.number + 1 if before else 1
        entry = Entry(
            number=number,
            reason=reason.strip(),
            by=by,
            time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            previous=before.digest if before else "",
            nonce=secrets.token_hex(16),
            **values,
        )
        content = json.dumps(entry.to_json_value(), indent=1).encode() + b"\n"
        if not self.create_file(self.entry_address(number), content):
            raise LostError(self.read_entry(number))
        return Entry.from_file(content)

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


def replay_promotions(history: list[Entry]) -> tuple[list[Entry], dict[str, Entry]]:
    """Return the promotions and rollbacks that are in force after the whole log ``history``, oldest entry first.

    A rollback ends when the version that was rolled back becomes the champion again.

    Returns:
        The promotions that no rollback has undone, oldest first. The rollbacks in force, by the version that was rolled
        back.

    Raises:
        UserError: A rollback has no promotion to undo.
    """
    standing, taken_back = list[Entry](), dict[str, Entry]()
    for entry in history:
        if entry.action == PROMOTE:
            standing.append(entry)
        elif standing:
            taken_back[standing.pop().version] = entry
        else:
            raise UserError(
                f"entry {entry.number} of the log: rolls back, but no promotion is in force; restore the log"
            )
        taken_back.pop(entry.version, None)
    return standing, taken_back


def revision_folder(name: str, number: int) -> str:
    return f"versions/{name}" if number == 1 else f"versions/{name}/{number}"


def damaged_file_error(address: str) -> UserError:
    return UserError(f"{address}: is missing, damaged or was altered; restore it, or promote another version")
