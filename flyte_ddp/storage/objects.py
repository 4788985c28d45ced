"""Objects of S3, Google Cloud Storage and Azure Blob Storage, through obstore, whose threads do not need Python's lock.

A fork does not take these threads along, so a forked child can use obstore only if its parent has not.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import obstore

from flyte_ddp.credentials import masked
from flyte_ddp.storage import failures
from flyte_ddp.storage.clouds import CLOUDS, VARIABLES
from flyte_ddp.storage.content import CHUNK_BYTES, Content, Entry, Span, entity_tag
from flyte_ddp.storage.failures import ExistsError, ForbiddenError, MissingError, UnavailableError, refusal

BUCKET = re.compile(r"[A-Za-z0-9._$-]+")
STATUS = re.compile(r"status code: (\d{3})(?:.*?<Code>(\w+)</Code>)?", re.DOTALL)
CAUSE = re.compile(r'(?:message|error): "([^"]*)"|InvalidCertificate\(\s*(\w+)')
SERVER = re.compile(r"Error performing \w+ (\w+://[^/\s]+)")
READ, LIST, WRITE = "read", "list", "write"
# What each cloud calls the rights to read, list and write objects.
RIGHTS = {
    "s3": {READ: "s3:GetObject", LIST: "s3:ListBucket", WRITE: "s3:PutObject"},
    "gs": {READ: "storage.objects.get", LIST: "storage.objects.list", WRITE: "storage.objects.create"},
    "az": {READ: "Storage Blob Data Reader", LIST: "Storage Blob Data Reader", WRITE: "Storage Blob Data Contributor"},
}
NO_RIGHT = (
    "HTTP 403",
    "HTTP 403 AccessDenied",
    "HTTP 403 AuthorizationPermissionMismatch",
)  # other texts say that it is the credentials, not their rights
CONFLICT = "ConditionalRequestConflict"  # of S3: somebody else is writing the object, and may fail
WRAPPING = re.compile(r"Generic \w+ error: |Error performing \w+( \S+ in \S+ -| request:) |HTTP error: ")
Result = TypeVar("Result")


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """:func:`flyte_ddp.storage.open_file` for an object."""
    found = ask(address, lambda store, key: obstore.get(store, key, options={"range": span} if span else {}))
    start, end = found.range
    yield Content(end - start, chunks(found.stream(CHUNK_BYTES // 4)), entity_tag(found.meta["e_tag"]))


def chunks(stream: Iterable[Any]) -> Iterator[bytes]:
    """The content."""
    try:
        yield from map(bytes, stream)
    except Exception as error:
        raise failure(error) from None


def stat(address: str) -> Entry:
    """:func:`flyte_ddp.storage.stat` for an object."""
    found = ask(address, obstore.head)
    return Entry("", found["size"], entity_tag(found["e_tag"]))


def list_files(address: str) -> Iterator[Entry]:
    """:func:`flyte_ddp.storage.list_files` for a prefix; an empty object that stands for an empty folder is a file."""

    def listed(store: Any, key: str) -> list[Entry]:
        start = len(key.rstrip("/")) + 1 if key else 0
        pages = obstore.list(store, prefix=key)
        return [Entry(file["path"][start:], file["size"], entity_tag(file["e_tag"])) for page in pages for file in page]

    found, folders = ask(address, listed, LIST), {""}
    for name in (entry.name for entry in found):
        while (name := name.rpartition("/")[0]) not in folders:
            folders.add(name)
    return (entry for entry in found if entry.size or entry.name not in folders)


def put(address: str, content: bytes) -> None:
    """:func:`flyte_ddp.storage.put` for an object."""
    ask(address, lambda store, key: obstore.put(store, key, content), WRITE)


def create(address: str, content: bytes | Path) -> None:
    """:func:`flyte_ddp.storage.create` for an object: in one request, so of at most 5 GB on S3."""
    ask(address, lambda store, key: obstore.put(store, key, content, mode="create", use_multipart=False), WRITE)


def ask(address: str, action: Callable[[Any, str], Result], right: str = READ) -> Result:
    """Return the result of ``action`` for an object's store and key; its errors become an UnavailableError.

    Args:
        address: of the object, or of the prefix to list.
        action: does one thing with obstore, and may raise its errors.
        right: which right the action needs: READ, LIST or WRITE. A refusal for want of it costs a request more.
    """
    kind, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    store = None
    try:
        store = store_of(kind.lower(), bucket)
        return action(store, key)
    except UnavailableError:
        raise
    except obstore.exceptions.AlreadyExistsError as error:
        if CONFLICT in str(error):
            raise UnavailableError(f"HTTP 409 {CONFLICT}", transient=True) from None
        raise ExistsError("there is an object of that name") from None
    except Exception as error:  # of many classes, some of them Python's own
        found = failure(error, anonymous=store is not None and "skip_signature" in store.config)
        raise missing_right(found, kind.lower(), store, key, right) if str(found) in NO_RIGHT else found from None


def missing_right(refused: UnavailableError, kind: str, store: Any, key: str, right: str) -> UnavailableError:
    """Return the error that names the right which is missing, or says that the object is.

    A store answers 403, and not 404, for an object that is not there to whoever may not list the bucket; on S3 also
    where the right to list is limited to a prefix. So an object that could not be read is looked for in the list.
    """
    rights = RIGHTS[kind]
    if right != READ:
        to = {LIST: "list the bucket, or this part of it,", WRITE: "write it"}[right]
        return ForbiddenError(f"{refused}: the right to {to} ({rights[right]}) is missing")
    try:
        if not is_listed(store, key):
            return MissingError(f"{refused}: the list of the bucket does not have it")
    except Exception:  # of obstore, whose errors have many classes: the bucket cannot be listed
        return ForbiddenError(
            f"{refused}: the right to read it ({rights[READ]}) is missing; or there is none, which the right to list "
            f"the bucket ({rights[LIST]}) would show"
        )
    return ForbiddenError(f"{refused}: the right to read it ({rights[READ]}) is missing")


def is_listed(store: Any, key: str) -> bool:
    """Return whether the list of a bucket has an object; asks for the page of the list where it would be."""
    pages = obstore.list(store, prefix=key.rpartition("/")[0], offset=key[:-1])
    names = (file["path"] for page in pages for file in page)
    return next((name for name in names if name >= key), "") == key


def failure(error: Exception, *, anonymous: bool = False) -> UnavailableError:
    """The UnavailableError for an error of obstore's, whose text tells what kind it is."""
    text = str(error)
    status, cause, server = STATUS.search(text), CAUSE.search(text), SERVER.search(text)
    if status and "TokenRequest" not in text:
        code = status[2] or ""
        if anonymous and status[1] in ("400", "401", "403"):
            code += " (asked without credentials, as there are none)"
        return refusal(int(status[1]), code.strip())
    if "kind: Connect" in text and "TimedOut" in text:
        reason = f"no connection within {failures.CONNECT_TIMEOUT:g} s"
    elif "kind: Timeout" in text:
        reason = f"no answer within {failures.READ_TIMEOUT:g} s"
    else:
        reason = cause[1] or cause[2] if cause else WRAPPING.sub("", text.partition("\n")[0])
    reason += f" by {server[1]}" if server else ""
    words = next((words for sign, words in EXPLAINED.items() if sign in text), "{}")
    passing = ("kind: " in text and "Certificate" not in text) or "PyErr" in text  # where credentials are not renewed
    return UnavailableError(masked(words.format(reason)), transient=passing)


EXPLAINED = {
    "NotPartial": "the server cannot give a part of a file: it ignores Range",
    "BareRedirect": "HTTP 301: the bucket is in another region; set AWS_DEFAULT_REGION to that one",
    "InvalidCertificate": "certificate verify failed: {}; AWS_CA_BUNDLE or REQUESTS_CA_BUNDLE can name one to trust",
    "MissingAccount": "{}; set AZURE_STORAGE_ACCOUNT_NAME",
    "TokenRequest": "no credentials ({}); set AZURE_STORAGE_ACCOUNT_KEY or the like, or AZURE_SKIP_SIGNATURE=true",
}

USERS: set[int] = set()  # processes that have used obstore: this one, and those that it is a fork of
LOCK = threading.Lock()


def store_of(kind: str, bucket: str) -> Any:
    """Obstore's own for a bucket, in the environment as it is now.

    Raises:
        UnavailableError: settings or credentials cannot be used, or obstore cannot in this process.
    """
    if not BUCKET.fullmatch(bucket):
        raise UnavailableError(f"bucket name {bucket!r}: may have letters, digits, '.', '_' and '-' only")
    if USERS - {os.getpid()}:
        raise UnavailableError(
            "this process is a fork of one that has used object storage, whose threads a fork does not have; "
            "start it by 'spawn' or 'forkserver', as DataLoader(multiprocessing_context='spawn') does"
        )
    USERS.add(os.getpid())  # before the lock is taken, so that no fork waits for one that another thread has held
    environment = tuple(sorted(pair for pair in os.environb.items() if pair[0].startswith(VARIABLES)))
    with LOCK:  # making one takes 0.3 s
        return new_store(kind, bucket, environment)


@lru_cache(maxsize=32)
def new_store(kind: str, bucket: str, environment: tuple[tuple[bytes, bytes], ...]) -> Any:
    """A store, whose settings depend on ``environment``."""
    del environment
    return CLOUDS[kind](bucket)
