"""Read files of HTTP servers. Proxies, certificates and ``~/.netrc`` come from the environment (requests)."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from http.cookiejar import DefaultCookiePolicy
from typing import Any, NoReturn
from urllib.parse import urljoin

import requests
import urllib3
from requests.adapters import HTTPAdapter
from requests.exceptions import InvalidURL, SSLError, TooManyRedirects

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.settings import ALLOWED
from flyte_ddp.core.text.credentials import mask_credentials
from flyte_ddp.storage import transfer
from flyte_ddp.storage.origins import describe_redirect_problem, parse_origin
from flyte_ddp.storage.transfer import CHUNK_BYTES, Content, Entry, Span, UnavailableError, parse_etag

CONNECTIONS = 64  # kept open by one process to one server
PERMANENT_ERRORS = (InvalidURL, SSLError, TooManyRedirects, urllib3.exceptions.LocationParseError)


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """Request a file, or a span of its bytes, and yield the content, which can be read once.

    Raises:
        UnavailableError: The request failed, or the server ignores the span.
    """
    span_header = {"Range": f"bytes={span[0]}-{span[1] - 1}"} if span is not None else {}
    with open_response(address, "GET", span_header) as response:
        if span is not None and not response.headers.get("Content-Range", "").startswith(f"bytes {span[0]}-"):
            raise UnavailableError("the server cannot send a part of a file: it ignores Range")
        chunks = response.raw.stream(CHUNK_BYTES, decode_content=False)
        yield Content(parse_content_length(response), chunks, parse_etag(response.headers.get("ETag")))


def stat_file(address: str) -> Entry:
    """Send a HEAD request for a file, and return size and tag as an Entry with an empty name.

    The size is -1 if not sent. The tag is the ETag, or else the time of the last change.

    Raises:
        MissingError: The file does not exist.
        UnavailableError: The request failed.
    """
    with open_response(address, "HEAD", {}) as response:
        tag, time = (response.headers.get(name, "") for name in ("ETag", "Last-Modified"))
        size = parse_content_length(response)
        return Entry("", -1 if size is None else size, parse_etag(tag) or time)


def parse_content_length(response: requests.Response) -> int | None:
    """Return the response's Content-Length in bytes, or None if not sent.

    Raises:
        UnavailableError: The header is no whole number.
    """
    length = response.headers.get("Content-Length", "")
    if length and not (length.isascii() and length.isdecimal()):
        raise UnavailableError(f"the server sent Content-Length: {length!r}, which is not a number of bytes")
    return int(length) if length else None


def list_files(address: str) -> NoReturn:  # noqa: ARG001
    raise UnavailableError("an HTTP server cannot list files")


list_folders = list_files


def write_file(address: str, *_: object, **__: object) -> NoReturn:
    raise UserError(f"address {address!r}: files of a web server can only be read; give a path, s3://, gs:// or az://")


def delete_files(addresses: Sequence[str]) -> NoReturn:
    write_file(addresses[0])


@contextmanager
def open_response(address: str, method: str, headers: dict[str, str]) -> Iterator[Any]:
    """Send a request, and yield the response with an unread body. The response is closed after the block.

    Redirects are followed, unless rejected.

    Raises:
        UnavailableError: The request failed, also later in the block, or the status is neither 200 nor 206.
    """
    try:
        with send_and_follow_redirects(address, method, headers) as response:
            if response.status_code not in (200, 206):
                raise transfer.make_http_status_error(response.status_code, response.reason or "")
            yield response
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        cause: BaseException = error  # the messages of outer errors are long and technical
        while (inner := cause.__cause__ or cause.__context__) is not None:
            cause = inner
        reason = getattr(cause, "strerror", None) or str(cause)
        raise UnavailableError(mask_credentials(reason), transient=not isinstance(error, PERMANENT_ERRORS)) from None


def send_and_follow_redirects(address: str, method: str, headers: dict[str, str]) -> requests.Response:
    """Send a request, follow redirects, and return the last response, which the caller must close.

    Raises:
        UnavailableError: A redirect is rejected.
        requests.RequestException: The request failed, also by a timeout, or the redirects were too many.
    """
    session = get_process_session(os.getpid())
    for _ in range(session.max_redirects + 1):
        try:
            response = session.request(
                method,
                address,
                stream=method != "HEAD",  # HEAD has no body to stream, so the connection can be reused
                timeout=(transfer.CONNECT_TIMEOUT, transfer.READ_TIMEOUT),
                headers={"Accept-Encoding": "identity", **headers},  # digests are computed from uncompressed bytes
                allow_redirects=False,
            )
            if not response.is_redirect:
                return response
            response.close()
            # Servers send UTF-8, and urllib3 decodes all headers as Latin-1.
            address = urljoin(response.url, response.headers["Location"].encode("latin-1").decode())
            problem = describe_redirect_problem(response.url, address)
        except requests.RequestException:
            raise
        except ValueError as error:  # for example, a UserError
            raise UnavailableError(f"redirected to a rejected address: {error}") from None
        if problem:
            fix = f"to allow it, set {ALLOWED}={parse_origin(address)}"
            raise UnavailableError(f"redirected to {parse_origin(address)}, {problem}; {fix}")
    raise TooManyRedirects(f"more than {session.max_redirects} redirects, the last one to {address}")


@cache
def get_process_session(process_id: int) -> requests.Session:  # noqa: ARG001
    """Return this process's HTTP session, without cookies. The first call in a process makes the session.

    A forked process must not use connections of its parent. Therefore the cache's key is ``process_id``.
    """
    session = requests.Session()
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
    return session
