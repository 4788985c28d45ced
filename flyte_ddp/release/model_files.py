"""The files of a model in a registry: each file is written once, and no file is locked."""

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError, unknown_name_error
from flyte_ddp.core.files import file_digest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
PROBE = ".creates-once"  # a file for testing whether the storage overwrites; no valid name of a model

Value = TypeVar("Value")


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


class ModelFiles:
    """The files of one model, in a folder or bucket that many models share.

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
