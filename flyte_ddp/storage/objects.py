"""Read, list, write and delete objects of S3, Google Cloud Storage and Azure Blob Storage, through obstore.

The threads of obstore run without Python's global lock. A forked process has none of these threads. For this reason a
forked child can use obstore only if the parent has not used obstore.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError

from flyte_ddp.core.text.credentials import mask_credentials
from flyte_ddp.storage import clouds, transfer
from flyte_ddp.storage.addresses import split_key
from flyte_ddp.storage.transfer import Content, Entry, ForbiddenError, MissingError, Span, UnavailableError, parse_etag

BUCKET = re.compile(r"[A-Za-z0-9._$-]+")
PART_BYTES = 16 << 20  # size of a part of a multipart upload, which may have 10,000 parts
# obstore has classes for status 404, 403, 401, 409 and 412. Everything else is a GenericError.
KINDS = {FileNotFoundError: MissingError, PermissionDeniedError: ForbiddenError}
PASSING = ("HTTP error", "PyErr")  # a lost connection or no answer, and credentials that could not be renewed
DENIED = ("400", "401", "403")
QUERY = re.compile(r"\?\S+")
STATUS = re.compile(r"status code: (\d{3})(?:.*?<Code>(\w+)</Code>)?", re.DOTALL)
CAUSE = re.compile(r'message: "([^"]+)"')  # the operating system's message inside Rust's structures
Result = TypeVar("Result")


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """Request an object, or a span of its bytes, and yield the content, which can be read once.

    Raises:
        UnavailableError: The object cannot be read. Raised on entering the block, and while chunks are read.
    """
    options: Any = {"range": span} if span else {}
    stored = call_on_bucket(address, lambda store, key: obstore.get(store, key, options=options), reads=True)
    start, end = stored.range
    yield Content(end - start, read_chunks(stored.stream(transfer.CHUNK_BYTES // 4)), parse_etag(stored.meta["e_tag"]))


def read_chunks(stream: Iterable[Any]) -> Iterator[bytes]:
    """Yield the chunks of an object as bytes.

    Raises:
        UnavailableError: The object cannot be read.
    """
    try:
        yield from map(bytes, stream)
    except Exception as error:
        raise translate_obstore_error(error) from None


def stat_file(address: str) -> Entry:
    stored = call_on_bucket(address, obstore.head, reads=True)
    return Entry("", stored["size"], parse_etag(stored["e_tag"]))


def list_files(address: str) -> Iterator[Entry]:
    """Return an iterator of the objects below a prefix, sorted by name.

    Skips empty objects that mark a folder of other objects. The whole list is read before the function returns.

    Raises:
        UnavailableError: The bucket cannot be listed.
    """
    key, folders = split_key(address)[1], {""}
    start = len(key.rstrip("/")) + 1 if key else 0
    stored = call_on_bucket(address, lambda store, prefix: obstore.list(store, prefix=prefix).collect())
    entries = [Entry(each["path"][start:], each["size"], parse_etag(each["e_tag"])) for each in stored]
    for name in (entry.name for entry in entries):
        while (name := name.rpartition("/")[0]) not in folders:
            folders.add(name)
    return (entry for entry in entries if entry.size or entry.name not in folders)


def list_folders(address: str) -> list[str]:
    found = call_on_bucket(address, lambda store, prefix: obstore.list_with_delimiter(store, prefix=prefix))
    return sorted(prefix.rpartition("/")[2] for prefix in found["common_prefixes"])


def write_file(address: str, content: bytes | Path, *, create: bool) -> None:
    """Upload bytes, or the file at the path ``content``, to an object. Large content is uploaded in parts.

    With ``create``, the object must not exist and is uploaded in one request (on S3 at most 5 GB). A server that
    ignores the header If-None-Match replaces an existing object without an error.

    Raises:
        ExistsError: With ``create``, the object exists.
        UnavailableError: The object cannot be written.
    """
    if create:
        put = partial(obstore.put, mode="create", use_multipart=False)
    else:
        put = partial(obstore.put, chunk_size=PART_BYTES, max_concurrency=4)
    call_on_bucket(address, lambda store, key: put(store, key, content))


def delete_files(addresses: Sequence[str]) -> None:
    """Delete objects of one bucket. A request deletes up to 1,000 objects on S3, 256 on Azure, and one on Google.

    Raises:
        UnavailableError: An object cannot be deleted.
    """
    keys = [split_key(address)[1] for address in addresses]
    call_on_bucket(addresses[0], lambda store, _: obstore.delete(store, keys))


def call_on_bucket(address: str, action: Callable[[Any, str], Result], *, reads: bool = False) -> Result:
    """Return ``action(store, key)``, with obstore's store of the bucket and the key in ``address``.

    If ``reads`` is True and access is denied, also lists the bucket to find out whether the object exists.

    Raises:
        MissingError: Access is denied, and the bucket's list does not contain the object.
        UnavailableError: The store cannot be made, or ``action`` failed.
    """
    start, key = split_key(address)
    scheme, bucket = start.lower().partition("://")[0], start.split("/")[2]
    store = get_or_make_bucket_store(scheme, bucket)
    try:
        return action(store, key)
    except Exception as error:  # of obstore's classes, and some of Python's
        failure = translate_obstore_error(error, anonymous="skip_signature" in store.config)
        if reads and isinstance(failure, ForbiddenError) and is_known_to_be_missing(store, key):
            failure = MissingError(f"{failure}: the bucket's listing does not contain it")
        raise failure from None


def is_known_to_be_missing(store: Any, key: str) -> bool:
    """List the bucket, and return whether the list was readable and does not contain the object.

    For a missing object, a server answers 403 instead of 404 if the caller may not list the bucket.
    """
    try:
        # The list begins before the object. Some servers ignore the offset, so smaller keys are skipped.
        pages = obstore.list(store, prefix=key.rpartition("/")[0], offset=key[:-1])
        return key != next((each["path"] for page in pages for each in page if each["path"] >= key), "")
    except Exception:  # obstore's errors have many classes
        return False


def translate_obstore_error(error: Exception, *, anonymous: bool = False) -> UnavailableError:
    """Return the UnavailableError for an exception of obstore.

    The text has the HTTP status if known, else the exception's first line, without credentials. If ``anonymous`` is
    True, the text says that the request had no credentials.
    """
    text = str(error)  # the lines after the first show Rust's structures
    is_conflict = "ConditionalRequestConflict" in text  # S3: another writer is at work, and may yet fail
    if isinstance(error, AlreadyExistsError) and not is_conflict:
        return transfer.ExistsError("an object with this name already exists")
    if (status := STATUS.search(text)) and "TokenRequest" not in text:  # else the status of another request
        unsigned = " (requested without credentials, as none were found)" if anonymous and status[1] in DENIED else ""
        failure = transfer.make_http_status_error(int(status[1]), (status[2] or "") + unsigned)
        failure.transient |= is_conflict
        return failure
    kind = next((kind for raised, kind in KINDS.items() if isinstance(error, raised)), UnavailableError)
    words = QUERY.sub("", text.partition("\n")[0])  # the query of an address may contain a signature
    words += f": {cause[1]}" if (cause := CAUSE.search(text)) else ""
    if "InvalidCertificate" in text:
        words += ": its certificate is not trusted; set AWS_CA_BUNDLE to a file with the authority's certificate"
    transient = "InvalidCertificate" not in text and any(sign in text for sign in PASSING)
    return kind(mask_credentials(words), transient=transient)


USERS: set[int] = set()  # ids of processes that have used obstore: this process, and the processes it was forked from
LOCK = threading.Lock()  # held while a store is made


def get_or_make_bucket_store(scheme: str, bucket: str) -> Any:
    """Return obstore's store of a bucket from a cache, or a new store.

    A new store may ask servers for credentials and region. If the clouds' environment variables have changed, a new
    store is made. After the first call, forks of this process cannot use object storage.

    Raises:
        UnavailableError: The bucket's name, settings or credentials are unusable, or this process is a fork of a
            process that used obstore.
    """
    if not BUCKET.fullmatch(bucket):
        raise UnavailableError(f"bucket name {bucket!r}: may contain only letters, digits, '.', '_' and '-'")
    if USERS - {os.getpid()}:
        problem = "this process was forked from a process that used object storage, and lacks that process's threads"
        fix = "start it with 'spawn' or 'forkserver', as in DataLoader(multiprocessing_context='spawn')"
        raise UnavailableError(f"{problem}; {fix}")
    # Added before locking: a process that is forked while a thread holds the lock gets the error and does not hang.
    USERS.add(os.getpid())
    environment = tuple(sorted(pair for pair in os.environb.items() if pair[0].startswith(clouds.VARIABLES)))
    try:
        with LOCK:  # making a store takes 0.3 s, so threads must not make the same one twice
            return make_bucket_store(scheme, bucket, environment)
    except Exception as error:
        # google-auth marks transient errors, and botocore's transient errors have this name.
        transient = getattr(error, "retryable", False) or "RetrievalError" in type(error).__name__
        words = f"settings or credentials for {scheme}:// cannot be used: {translate_obstore_error(error)}"
        raise UnavailableError(words, transient=transient) from None


@lru_cache(maxsize=32)
def make_bucket_store(scheme: str, bucket: str, _: tuple[tuple[bytes, bytes], ...]) -> Any:
    """Return a new store of obstore for a bucket. The environment variables are only the key of the cache."""
    if scheme == "s3":
        return clouds.make_s3_store(bucket)
    return clouds.make_google_store(bucket) if scheme == "gs" else clouds.make_azure_store(bucket)
