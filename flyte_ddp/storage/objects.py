"""Read, list, write and delete objects of S3, Google Cloud Storage and Azure Blob Storage, through obstore.

obstore's threads run without Python's global lock. A fork has none of these threads, so a forked child can use obstore
only if its parent has not used it.
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
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError

from flyte_ddp.credentials import mask_credentials
from flyte_ddp.storage import clouds, failures
from flyte_ddp.storage.addresses import split_key
from flyte_ddp.storage.content import CHUNK_BYTES, Content, Entry, Span, parse_etag
from flyte_ddp.storage.failures import ExistsError, ForbiddenError, MissingError, UnavailableError, http_status_error

BUCKET = re.compile(r"[A-Za-z0-9._$-]+")
PART_BYTES = 16 << 20  # of each part of a multipart upload, which may have 10,000 parts
READ, LIST, WRITE, DELETE = "read it", "list the bucket, or this part of it,", "write it", "delete it"
# The name of each right in each cloud.
GOOGLE, AZURE_READER, AZURE_WRITER = "storage.objects", "Storage Blob Data Reader", "Storage Blob Data Contributor"
RIGHTS = {
    "s3": {READ: "s3:GetObject", LIST: "s3:ListBucket", WRITE: "s3:PutObject", DELETE: "s3:DeleteObject"},
    "gs": {READ: f"{GOOGLE}.get", LIST: f"{GOOGLE}.list", WRITE: f"{GOOGLE}.create", DELETE: f"{GOOGLE}.delete"},
    "az": {READ: AZURE_READER, LIST: AZURE_READER, WRITE: AZURE_WRITER, DELETE: AZURE_WRITER},
}
# A missing right. Status 403 with another code means bad credentials; a response to HEAD has no code.
NO_RIGHT = ("HTTP 403", "HTTP 403 AccessDenied", "HTTP 403 AuthorizationPermissionMismatch")
Result = TypeVar("Result")


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """Open an object, or a span of bytes of it, for one pass; the server sends no more than the span."""
    stored = call_with_store(
        address, lambda store, key: obstore.get(store, key, options={"range": span} if span else {})
    )
    start, end = stored.range
    yield Content(end - start, read_chunks(stored.stream(CHUNK_BYTES // 4)), parse_etag(stored.meta["e_tag"]))


def read_chunks(stream: Iterable[Any]) -> Iterator[bytes]:
    try:
        yield from map(bytes, stream)
    except Exception as error:
        raise translate_error(error) from None


def stat_file(address: str) -> Entry:
    stored = call_with_store(address, obstore.head)
    return Entry("", stored["size"], parse_etag(stored["e_tag"]))


def list_files(address: str) -> Iterator[Entry]:
    """Return the objects below a prefix by name, without empty ones whose name is the folder of another object."""
    key, folders = split_key(address)[1], {""}
    start = len(key.rstrip("/")) + 1 if key else 0
    stored = call_with_store(address, lambda store, prefix: obstore.list(store, prefix=prefix).collect(), LIST)
    entries = [Entry(each["path"][start:], each["size"], parse_etag(each["e_tag"])) for each in stored]
    for name in (entry.name for entry in entries):
        while (name := name.rpartition("/")[0]) not in folders:
            folders.add(name)
    return (entry for entry in entries if entry.size or entry.name not in folders)


def write_file(address: str, content: bytes | Path, *, create: bool) -> None:
    """Upload an object, in parts if it is large; with ``create`` in one request (on S3 at most 5 GB), as a new one."""
    parts: dict[str, Any] = {"chunk_size": PART_BYTES, "max_concurrency": 4}
    options = {"mode": "create", "use_multipart": False} if create else parts
    call_with_store(address, lambda store, key: obstore.put(store, key, content, **options), WRITE)


def delete_files(addresses: Sequence[str]) -> None:
    """Delete objects of one bucket: up to 1,000 with each request on S3, 256 on Azure, one on Google."""
    keys = [split_key(address)[1] for address in addresses]
    call_with_store(addresses[0], lambda store, _: obstore.delete(store, keys), DELETE)


def call_with_store(address: str, action: Callable[[Any, str], Result], right: str = READ) -> Result:
    """Open the bucket of ``address`` and return ``action(store, key)``; raise UnavailableError if either fails."""
    start, key = split_key(address)
    scheme, bucket = start.lower().partition("://")[0], start.split("/")[2]
    store = get_bucket_store(scheme, bucket)
    try:
        return action(store, key)
    except Exception as error:  # of obstore's classes, and some of Python's own
        failure = translate_error(error, anonymous="skip_signature" in store.config)
        raise explain_refusal(failure, scheme, store, key, right) if str(failure) in NO_RIGHT else failure from None


def explain_refusal(refused: UnavailableError, scheme: str, store: Any, key: str, right: str) -> UnavailableError:
    """Return the error for the 403 response ``refused``: a ForbiddenError with the missing right, or a MissingError.

    A server answers 403 and not 404 for a missing object if the caller may not list the bucket; on S3 also if the right
    to list covers only a prefix. Therefore after a refused READ this lists the bucket around the object.
    """
    names = RIGHTS[scheme]
    words = f"{refused}: the right to {right} ({names[right]}) is missing"
    if right != READ:
        return ForbiddenError(words)
    try:
        # The list begins before the object; some servers ignore the offset, so smaller keys are skipped.
        pages = obstore.list(store, prefix=key.rpartition("/")[0], offset=key[:-1])
        listed = next((each["path"] for page in pages for each in page if each["path"] >= key), "")
    except Exception:  # of obstore, whose errors have many classes: the bucket cannot be listed
        words += f"; or there is none, which the right to list the bucket ({names[LIST]}) would show"
        return ForbiddenError(words)
    missing = MissingError(f"{refused}: the list of the bucket does not have it")
    return ForbiddenError(words) if listed == key else missing


# obstore has classes for status 404, 403, 401, 409 and 412. All other failures are GenericErrors: only the text of the
# error shows whether the cause is a status, a lost connection, a certificate or a setting.
KINDS = {FileNotFoundError: MissingError, PermissionDeniedError: ForbiddenError}
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
    """Return the UnavailableError for an exception of obstore, by its class and by patterns in its text."""
    text = str(error)  # the causes stand in the lines below the first
    status, cause, server = STATUS.search(text), CAUSE.search(text), SERVER.search(text)
    if isinstance(error, AlreadyExistsError) and "ConditionalRequestConflict" not in text:
        return ExistsError("there is an object of that name")
    if status and "TokenRequest" not in text:
        code = status[2] or ""
        if anonymous and status[1] in ("400", "401", "403"):
            code += " (asked without credentials, as there are none)"
        failure = http_status_error(int(status[1]), code.strip())
        failure.transient |= isinstance(error, AlreadyExistsError)  # S3: another writer is at work, and may yet fail
        return failure
    if "kind: Connect" in text and "TimedOut" in text:
        reason = f"no connection within {failures.CONNECT_TIMEOUT:g} s"
    elif "kind: Timeout" in text:
        reason = f"no answer within {failures.READ_TIMEOUT:g} s"
    else:
        reason = cause[1] or cause[2] if cause else WRAPPING.sub("", text.partition("\n")[0])
    reason += f" by {server[1]}" if server else ""
    words = next((words for sign, words in EXPLAINED.items() if sign in text), "{}")
    # "kind: " marks a failed connection; "PyErr" marks credentials that could not be renewed.
    transient = ("kind: " in text and "Certificate" not in text) or "PyErr" in text
    kind = next((kind for raised, kind in KINDS.items() if isinstance(error, raised)), UnavailableError)
    return kind(mask_credentials(words.format(reason)), transient=transient)


USERS: set[int] = set()  # ids of processes that have used obstore: this process, and the processes it was forked from
LOCK = threading.Lock()  # held while a store is made


def get_bucket_store(scheme: str, bucket: str) -> Any:
    """Return obstore's store of a bucket, made once for the current values of the environment variables.

    Raises UnavailableError in a fork of a process that has used obstore, or if the settings cannot be used.
    """
    if not BUCKET.fullmatch(bucket):
        raise UnavailableError(f"bucket name {bucket!r}: may have letters, digits, '.', '_' and '-' only")
    if USERS - {os.getpid()}:
        raise UnavailableError(
            "this process is a fork of one that has used object storage, whose threads a fork does not have; "
            "start it by 'spawn' or 'forkserver', as DataLoader(multiprocessing_context='spawn') does"
        )
    # Before the lock is taken: a process that is forked while a thread holds the lock gets the error and does not hang.
    USERS.add(os.getpid())
    environment = tuple(sorted(pair for pair in os.environb.items() if pair[0].startswith(clouds.VARIABLES)))
    try:
        with LOCK:  # making a store takes 0.3 s, so threads must not make the same one twice
            return make_bucket_store(scheme, bucket, environment)
    except Exception as error:
        # google-auth marks its transient errors; botocore's have this name.
        transient = getattr(error, "retryable", False) or "RetrievalError" in type(error).__name__
        words = f"settings or credentials of {scheme}:// cannot be used: {translate_error(error)}"
        raise UnavailableError(words, transient=transient) from None


@lru_cache(maxsize=32)
def make_bucket_store(scheme: str, bucket: str, _: tuple[tuple[bytes, bytes], ...]) -> Any:
    """Make obstore's store of a bucket; the variables serve only as the key of the cache."""
    if scheme == "s3":
        return clouds.make_s3_store(bucket)
    return clouds.make_google_store(bucket) if scheme == "gs" else clouds.make_azure_store(bucket)
