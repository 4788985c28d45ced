"""Objects of S3, Google Cloud Storage and Azure Blob Storage, through obstore, whose threads do not need Python's lock.

A fork does not take these threads along, so a forked child can use obstore only if its parent has not.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError

from flyte_ddp.credentials import masked
from flyte_ddp.storage import failures
from flyte_ddp.storage.addresses import split_key
from flyte_ddp.storage.clouds import CLOUDS, VARIABLES
from flyte_ddp.storage.content import CHUNK_BYTES, Content, Entry, Span, entity_tag
from flyte_ddp.storage.failures import ExistsError, ForbiddenError, MissingError, UnavailableError, refusal

BUCKET = re.compile(r"[A-Za-z0-9._$-]+")
PART_BYTES = 16 << 20  # of an upload in parts, of which there may be 10,000
READ, LIST, WRITE, DELETE = "read it", "list the bucket, or this part of it,", "write it", "delete it"
# What each cloud calls these rights.
GOOGLE, AZURE_READER, AZURE_WRITER = "storage.objects", "Storage Blob Data Reader", "Storage Blob Data Contributor"
RIGHTS = {
    "s3": {READ: "s3:GetObject", LIST: "s3:ListBucket", WRITE: "s3:PutObject", DELETE: "s3:DeleteObject"},
    "gs": {READ: f"{GOOGLE}.get", LIST: f"{GOOGLE}.list", WRITE: f"{GOOGLE}.create", DELETE: f"{GOOGLE}.delete"},
    "az": {READ: AZURE_READER, LIST: AZURE_READER, WRITE: AZURE_WRITER, DELETE: AZURE_WRITER},
}
# Other codes of status 403 say that it is the credentials, not their rights; an answer to HEAD has none.
NO_RIGHT = ("HTTP 403", "HTTP 403 AccessDenied", "HTTP 403 AuthorizationPermissionMismatch")
Result = TypeVar("Result")


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """:func:`flyte_ddp.storage.open_file` for an object."""
    found = call_store(address, lambda store, key: obstore.get(store, key, options={"range": span} if span else {}))
    start, end = found.range
    yield Content(end - start, chunks(found.stream(CHUNK_BYTES // 4)), entity_tag(found.meta["e_tag"]))


def chunks(stream: Iterable[Any]) -> Iterator[bytes]:
    """Yield the content."""
    try:
        yield from map(bytes, stream)
    except Exception as error:
        raise translate_error(error) from None


def stat(address: str) -> Entry:
    """:func:`flyte_ddp.storage.stat` for an object."""
    found = call_store(address, obstore.head)
    return Entry("", found["size"], entity_tag(found["e_tag"]))


def list_files(address: str) -> Iterator[Entry]:
    """:func:`flyte_ddp.storage.list_files` for a prefix; an empty object that stands for an empty folder is a file."""

    def list_entries(store: Any, key: str) -> list[Entry]:
        start = len(key.rstrip("/")) + 1 if key else 0
        pages = obstore.list(store, prefix=key)
        return [Entry(file["path"][start:], file["size"], entity_tag(file["e_tag"])) for page in pages for file in page]

    found, folders = call_store(address, list_entries, LIST), {""}
    for name in (entry.name for entry in found):
        while (name := name.rpartition("/")[0]) not in folders:
            folders.add(name)
    return (entry for entry in found if entry.size or entry.name not in folders)


def put(address: str, content: bytes | Path) -> None:
    """:func:`flyte_ddp.storage.put` for an object; what is larger than PART_BYTES is sent in parts, four at a time."""
    options: dict[str, Any] = {"chunk_size": PART_BYTES, "max_concurrency": 4}
    call_store(address, lambda store, key: obstore.put(store, key, content, **options), WRITE)


def create(address: str, content: bytes | Path) -> None:
    """:func:`flyte_ddp.storage.create` for an object: in one request, so of at most 5 GB on S3."""
    call_store(address, lambda store, key: obstore.put(store, key, content, mode="create", use_multipart=False), WRITE)


def delete(addresses: Sequence[str]) -> None:
    """:func:`flyte_ddp.storage.delete` for objects: on S3 1,000 by each request, on Azure 256, on Google one."""
    keys = [split_key(address)[1] for address in addresses]
    call_store(addresses[0], lambda store, _: obstore.delete(store, keys), DELETE)


def call_store(address: str, action: Callable[[Any, str], Result], right: str = READ) -> Result:
    """Return the result of ``action`` for an object's store and key; its errors become an UnavailableError.

    Args:
        address: of the object, or of the prefix to list.
        action: does one thing with obstore, and may raise its errors.
        right: the right that the action needs: READ, LIST, WRITE or DELETE. A refusal of READ costs a request more.
    """
    start, key = split_key(address)
    kind, store = start.partition("://")[0].lower(), None
    try:
        store = store_of(kind, start.split("/")[2])
        return action(store, key)
    except UnavailableError:
        raise
    except Exception as error:  # of obstore's classes, and some of Python's own
        found = translate_error(error, anonymous=store is not None and "skip_signature" in store.config)
        raise missing_right(found, kind, store, key, right) if str(found) in NO_RIGHT else found from None


def missing_right(refused: UnavailableError, kind: str, store: Any, key: str, right: str) -> UnavailableError:
    """Return the error that names the right which is missing, or says that the object is.

    A store answers 403, and not 404, for an object that is not there to whoever may not list the bucket; on S3 also
    where the right to list is limited to a prefix. So an object that could not be read is looked for in the list.
    """
    rights = RIGHTS[kind]
    words = f"{refused}: the right to {right} ({rights[right]}) is missing"
    if right != READ:
        return ForbiddenError(words)
    try:
        pages = obstore.list(store, prefix=key.rpartition("/")[0], offset=key[:-1])  # from where it would be
        names = (file["path"] for page in pages for file in page)
        if next((name for name in names if name >= key), "") != key:
            return MissingError(f"{refused}: the list of the bucket does not have it")
    except Exception:  # of obstore, whose errors have many classes: the bucket cannot be listed
        words += f"; or there is none, which the right to list the bucket ({rights[LIST]}) would show"
    return ForbiddenError(words)


# obstore has classes for status 404, 403, 401, 409 and 412; all other failures are GenericErrors, and only their text
# says whether it was a status, a lost connection, a certificate or a setting.
STATUS = re.compile(r"status code: (\d{3})(?:.*?<Code>(\w+)</Code>)?", re.DOTALL)
CAUSE = re.compile(r'(?:message|error): "([^"]*)"|InvalidCertificate\(\s*(\w+)')
SERVER = re.compile(r"Error performing \w+ (\w+://[^/\s]+)")
WRAPPING = re.compile(r"Generic \w+ error: |Error performing \w+( \S+ in \S+ -| request:) |HTTP error: ")
EXPLAINED = {
    "NotPartial": "the server cannot give a part of a file: it ignores Range",
    "BareRedirect": "HTTP 301: the bucket is in another region; set AWS_DEFAULT_REGION to that one",
    "InvalidCertificate": "certificate verify failed: {}; AWS_CA_BUNDLE or REQUESTS_CA_BUNDLE can name one to trust",
    "MissingAccount": "{}; set AZURE_STORAGE_ACCOUNT_NAME",
    "TokenRequest": "no credentials ({}); set AZURE_STORAGE_ACCOUNT_KEY or the like, or AZURE_SKIP_SIGNATURE=true",
}


def translate_error(error: Exception, *, anonymous: bool = False) -> UnavailableError:
    """Return the UnavailableError for an error of obstore's, whose text has in the lines below the first its causes."""
    text = str(error)
    status, cause, server = STATUS.search(text), CAUSE.search(text), SERVER.search(text)
    if isinstance(error, AlreadyExistsError) and "ConditionalRequestConflict" not in text:
        return ExistsError("there is an object of that name")
    if status and "TokenRequest" not in text:
        code = status[2] or ""
        if anonymous and status[1] in ("400", "401", "403"):
            code += " (asked without credentials, as there are none)"
        found = refusal(int(status[1]), code.strip())
        found.transient |= isinstance(error, AlreadyExistsError)  # of S3: somebody else is writing it, and may fail
        return found
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


USERS: set[int] = set()  # processes that have used obstore: this one, and those that it is a fork of
LOCK = threading.Lock()


def store_of(kind: str, bucket: str) -> Any:
    """Return obstore's store for a bucket, with the settings and credentials of the environment as it is now.

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
def new_store(kind: str, bucket: str, _: tuple[tuple[bytes, bytes], ...]) -> Any:
    """Make a store, once for the same environment."""
    try:
        return CLOUDS[kind](bucket)
    except Exception as error:
        passing = (
            getattr(error, "retryable", False) or "RetrievalError" in type(error).__name__
        )  # google-auth, botocore
        words = f"settings or credentials of {kind}:// cannot be used: {translate_error(error)}"
        raise UnavailableError(words, transient=passing) from None
