"""Reading a file from a directory, an HTTP server or S3, chosen by the address's scheme.

Every wait is bounded, and every failure is an :class:`UnavailableError` that says whether it is worth another try.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from flyte_ddp.errors import UserError

CHUNK_BYTES = 1 << 20
CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 30.0  # seconds without a byte

Content = tuple[int | None, Iterator[bytes]]  # size, where it is known, and the bytes


class UnavailableError(Exception):
    """A file could not be had; ``transient``: it may be there on the next try."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(reason)
        self.transient = transient


class MissingError(UnavailableError):
    """No such file, or none that we may read; S3 answers 403 for a missing key in a bucket that we may not list."""


def scheme(address: str) -> str:
    """``file`` (also for plain paths), ``http``, ``https`` or ``s3``.

    Raises:
        UserError: any other scheme, or no server or bucket after it.
    """
    found = address.partition("://")[0].lower() if "://" in address else "file"
    if found not in ("file", "http", "https", "s3"):
        raise UserError(f"data_source={address!r}: must be a path, or start with file://, s3://, https:// or http://")
    if found != "file" and not address.partition("://")[2].partition("/")[0]:
        raise UserError(
            f"data_source={address!r}: must name a {'bucket' if found == 's3' else 'server'} after {found}://"
        )
    return found


def local_path(address: str) -> Path | None:
    """The path that a plain path or a ``file://`` address means; None for a remote address."""
    if scheme(address) != "file":
        return None
    return Path(unquote(urlsplit(address).path) if "://" in address else address).expanduser().absolute()


def join(source: str, name: str) -> str:
    """The address of the file ``name`` in the directory or mirror ``source``."""
    path = local_path(source)
    return f"{source.rstrip('/')}/{name}" if path is None else str(path / name)


@contextmanager
def open_file(address: str) -> Iterator[Content]:
    """Opens a file for one pass over its bytes, as they are stored: nothing is decompressed on the way.

    Raises:
        UnavailableError: also while the bytes are read.
    """
    path = local_path(address)
    if path is not None:
        opened = open_local(path)
    else:
        opened = open_s3(address) if scheme(address) == "s3" else open_http(address)
    with opened as content:
        yield content


@contextmanager
def open_local(path: Path) -> Iterator[Content]:
    """:func:`open_file` for a path."""
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError("no such file") from None
    except OSError as error:
        raise UnavailableError(error.strerror or str(error)) from None
    with file:
        yield os.fstat(file.fileno()).st_size, iter(lambda: file.read(CHUNK_BYTES), b"")


@contextmanager
def open_http(address: str) -> Iterator[Content]:
    """:func:`open_file` for an HTTP address."""
    with http_response(address, "GET") as response:
        size = response.headers.get("Content-Length")
        yield int(size) if size else None, response.raw.stream(CHUNK_BYTES, decode_content=False)


@contextmanager
def http_response(address: str, method: str) -> Iterator[Any]:
    """The answer with status 200 and a body not yet read; proxies and certificates are taken from the environment."""
    import requests
    import urllib3

    hopeless = (
        requests.exceptions.InvalidURL,
        requests.exceptions.SSLError,
        requests.exceptions.TooManyRedirects,
        urllib3.exceptions.LocationParseError,
    )
    try:
        with requests.request(
            method,
            address,
            stream=True,
            timeout=(CONNECT_TIMEOUT, READ_TIMEOUT),
            headers={"Accept-Encoding": "identity"},  # a server that compressed on the way would change the digest
            allow_redirects=True,
        ) as response:
            if response.status_code != 200:
                raise refusal(response.status_code, response.reason or "")
            yield response
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise UnavailableError(root_cause(error), transient=not isinstance(error, hopeless)) from None


def refusal(status: int, detail: str) -> UnavailableError:
    """What an HTTP status means for us; S3 speaks HTTP too."""
    reason = f"HTTP {status} {detail}".strip()
    if status in (403, 404, 410):
        return MissingError(reason)
    return UnavailableError(reason, transient=status >= 500 or status in (408, 429))


def root_cause(error: BaseException) -> str:
    """The innermost error's own words: what libraries wrap around it names their objects and fills a page."""
    if "ConnectTimeout" in type(error).__name__:
        return f"no connection within {CONNECT_TIMEOUT:g} s"
    if "ReadTimeout" in type(error).__name__:
        return f"no answer within {READ_TIMEOUT:g} s"
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def open_s3(address: str) -> Iterator[Content]:
    """:func:`open_file` for an S3 object."""
    bucket, key = s3_location(address)
    with s3_failures():
        response = s3_client().get_object(Bucket=bucket, Key=key)
        with closing(response["Body"]) as body:
            yield response["ContentLength"], body.iter_chunks(CHUNK_BYTES)


def s3_location(address: str) -> tuple[str, str]:
    """Bucket and key."""
    bucket, _, key = address.partition("://")[2].partition("/")
    return bucket, key


@contextmanager
def s3_failures() -> Iterator[None]:
    """Turns botocore's errors into ours."""
    from botocore import exceptions  # type: ignore[import-untyped,unused-ignore]

    hopeless = (exceptions.ParamValidationError, exceptions.PartialCredentialsError, exceptions.SSLError)
    try:
        yield
    except exceptions.ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        raise refusal(status, error.response.get("Error", {}).get("Code", "")) from None
    except exceptions.BotoCoreError as error:
        raise UnavailableError(root_cause(error), transient=not isinstance(error, hopeless)) from None


def s3_client() -> Any:
    """A client for the environment as it is now; making one takes 0.3 s, so it is kept while that stays the same."""
    prefixes = ("AWS_", "FLYTE_AWS_")
    return s3_client_for(tuple(sorted(pair for pair in os.environ.items() if pair[0].startswith(prefixes))))


@functools.lru_cache(maxsize=1)
def s3_client_for(environment: tuple[tuple[str, str], ...]) -> Any:
    """Flyte's own variables come first, as in flytekit; botocore itself knows the standard ``AWS_*`` ones.

    Without credentials requests are anonymous, which is what public buckets take.
    """
    import botocore.config  # type: ignore[import-untyped,unused-ignore]
    import botocore.session  # type: ignore[import-untyped,unused-ignore]

    values = dict(environment)
    session = botocore.session.get_session()
    key, secret = values.get("FLYTE_AWS_ACCESS_KEY_ID"), values.get("FLYTE_AWS_SECRET_ACCESS_KEY")
    if key and secret:
        session.set_credentials(key, secret)
    anonymous = {} if session.get_credentials() else {"signature_version": botocore.UNSIGNED}
    config = botocore.config.Config(
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=READ_TIMEOUT,
        retries={"total_max_attempts": 1},  # the caller retries, and says so
        response_checksum_validation="when_required",  # servers other than AWS's may not send one
        **anonymous,
    )
    return session.create_client("s3", endpoint_url=values.get("FLYTE_AWS_ENDPOINT") or None, config=config)
