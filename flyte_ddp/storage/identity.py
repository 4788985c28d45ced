"""Hash the content of an address that the user gives, so that the cache key changes with the content."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import file_digest
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.settings import runs_folder

IGNORE_FILE = ".flyteddpignore"  # in a data folder: patterns of file names that are no data, one per line
# Files that libraries write beside the data on reading: LMDB's lock, Hugging Face's caches, GDAL's statistics.
WRITTEN_BY_READERS = ("lock.mdb", "cache-*.arrow", "*.aux.xml")
SUMS = "SHA256SUMS"  # the digests of a folder's files, as sha256sum writes them


def hash_address_content(source: str, hyperparameter: str = "data_source") -> str:
    """Return a SHA-256 (hex) that changes with the content of a file, a folder, a bucket or a web address.

    Local files are read completely. Of a folder, the names and contents of the files of :func:`list_data_files` are
    hashed. Of a bucket, the names, sizes and tags of the objects are hashed. A web server is asked for SHA256SUMS, then
    for the file's tag. If the server has neither, the file is downloaded. Remote addresses are tried up to 4 times, and
    pauses are printed. If ``source`` is empty, the result is "".

    Raises:
        UserError: ``source`` cannot be read, or is a directory without data. The text names ``hyperparameter``.
    """
    if not source:
        return ""
    where, path = f"{hyperparameter}={source!r}", storage.find_local_path(source)
    if path is not None:
        try:
            if path.is_file():
                return digest_lines([file_digest(path)])
            if not path.is_dir():
                raise UserError(f"{where}: no such file or directory; give an existing path")
            files = {file.relative_to(path).as_posix(): file for file in list_data_files(path)}
            if not files:
                raise UserError(f"{where}: the directory is empty; give a directory that contains the data")
            return digest_lines(f"{name} {file_digest(file)}" for name, file in sorted(files.items()))
        except OSError as error:
            raise UserError(f"{where}: cannot be read: {error}; make it readable, or give another path") from None
    identify = hash_web_content if storage.parse_scheme(source) in ("http", "https") else hash_object_listing
    try:
        return storage.call_with_retries(source, identify, Progress().print_note)
    except storage.UnavailableError as failure:
        fix = "check the address, and that the server is up"
        if hyperparameter == "data_source":
            fix += "; a directory on a web server needs a SHA256SUMS file in it"
        raise failure.to_user_error(f"{where}: cannot be read: {failure}; {fix}") from None


def list_data_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder whose content belongs to the data set.

    Skips the runs folder, ``__pycache__``, hidden folders, and names in ``WRITTEN_BY_READERS`` or the folder's
    ``IGNORE_FILE``. The skipped files may change with each run, and then no run would equal an earlier run. Links to
    files are followed, links to folders are not. Folders that cannot be read are skipped without a message.

    Raises:
        UserError: The ``IGNORE_FILE`` is malformed. Raised by the first ``next()``.
    """
    runs = runs_folder().resolve()
    ignored = [*WRITTEN_BY_READERS, IGNORE_FILE, *read_ignore_patterns(folder)]
    for parent, folders, names in os.walk(folder):
        shown = (name for name in folders if name != "__pycache__" and not name.startswith("."))
        folders[:] = [name for name in shown if Path(parent, name).resolve() != runs]
        place = Path(parent).relative_to(folder)
        for name in names:
            path = Path(parent, name)
            # As in git, a pattern without a slash matches a name in any folder.
            named = (name, (place / name).as_posix())
            if not any(fnmatchcase(named["/" in pattern], pattern) for pattern in ignored) and path.is_file():
                yield path


def read_ignore_patterns(folder: Path) -> list[str]:
    """Return the patterns in a folder's ``IGNORE_FILE``, without comments (#). If the file does not exist, return [].

    Raises:
        UserError: The file is not UTF-8 text, or a pattern begins with "!" or "/", or ends with "/".
    """
    try:
        lines = (folder / IGNORE_FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise UserError(f"{folder / IGNORE_FILE}: is not a text file in UTF-8 ({error}); write it again") from None
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for pattern in patterns:
        if pattern[0] in "!/" or pattern[-1] == "/":
            rule = "is not a pattern of file names"
            raise UserError(
                f"{folder / IGNORE_FILE}: {pattern!r} {rule}; write index/* for a folder, without ! or a leading /"
            )
    return patterns


def digest_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def hash_object_listing(source: str) -> str:
    """Return a SHA-256 (hex) of names, sizes and tags of all objects below ``source``.

    If no object is below ``source``, the object at ``source`` is hashed in the same way. Contents are not read.

    Raises:
        MissingError: No such object exists.
        UnavailableError: The bucket cannot be read.
    """
    entries = list(storage.list_files(source))
    if not entries:
        try:
            entries = [storage.stat_file(source)]
        except storage.MissingError:
            raise storage.MissingError("no such file or folder") from None
    return digest_lines(f"{entry.name} {entry.size} {entry.tag}" for entry in entries)


def hash_web_content(source: str) -> str:
    """Return a SHA-256 (hex) that changes with the content of an HTTP address.

    If ``source`` is a folder with a file SHA256SUMS, this file is hashed. Otherwise, size and tag in the headers of
    ``source`` are hashed. If the server sends no tag, the content is downloaded and hashed.

    Raises:
        UnavailableError: The server cannot be reached, or has no such file.
    """
    try:
        return hashlib.sha256(storage.read_file(storage.join_address(source, SUMS))).hexdigest()
    except (storage.MissingError, storage.ForbiddenError):  # web servers answer 403 for missing files, too
        pass
    entry = storage.stat_file(source)
    if entry.tag:
        return digest_lines(f"{entry.size} {entry.tag}")
    return storage.hash_file(source)
