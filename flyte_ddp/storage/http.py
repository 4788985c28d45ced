"""Files of HTTP servers; proxies, certificates and ``~/.netrc`` are taken from the environment, as requests does."""

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
from requests.exceptions import ConnectTimeout, InvalidURL, ReadTimeout, SSLError, TooManyRedirects

from flyte_ddp.credentials import masked
from flyte_ddp.errors import UserError
from flyte_ddp.settings import ALLOWED
from flyte_ddp.storage import failures
from flyte_ddp.storage.addresses import leads_out
from flyte_ddp.storage.content import CHUNK_BYTES, Content, Entry, Span, entity_tag
from flyte_ddp.storage.digest_list import SUMS, DigestListError, read_sums
from flyte_ddp.storage.failures import UnavailableError, refusal
from flyte_ddp.storage.origins import may_be_redirected, origin_of

CONNECTIONS = 64  # that one process keeps open to a server
HOPELESS = (InvalidURL, SSLError, TooManyRedirects, urllib3.exceptions.LocationParseError)


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """:func:`flyte_ddp.storage.open_file` for an HTTP address."""
    wanted = {"Range": f"bytes={span[0]}-{span[1] - 1}"} if span is not None else {}
    with response(address, "GET", wanted) as answer:
        if span is not None and not answer.headers.get("Content-Range", "").startswith(f"bytes {span[0]}-"):
            raise UnavailableError("the server cannot give a part of a file: it ignores Range")
        size = answer.headers.get("Content-Length")
        chunks = answer.raw.stream(CHUNK_BYTES, decode_content=False)
        yield Content(int(size) if size else None, chunks, entity_tag(answer.headers.get("ETag")))


def stat(address: str) -> Entry:
    """:func:`flyte_ddp.storage.stat` for an HTTP address."""
    with response(address, "HEAD", {}) as answer:
        size, tag, time = (answer.headers.get(name, "") for name in ("Content-Length", "ETag", "Last-Modified"))
        return Entry("", int(size or -1), entity_tag(tag) or time)


def list_files(address: str) -> Iterator[Entry]:
    """:func:`flyte_ddp.storage.list_files` for an HTTP address: what ``SHA256SUMS`` there names, without sizes."""
    try:
        with open_file(f"{address.rstrip('/')}/{SUMS}", None) as found:
            content = b"".join(found.chunks)
    except UnavailableError as failure:
        words = f"an HTTP server has no list of its files, and {SUMS} in that folder cannot be read: {failure}"
        raise UnavailableError(words, transient=failure.transient) from None
    try:
        sums = read_sums(content)
    except DigestListError as error:
        raise UnavailableError(f"{SUMS} in that folder is not understood: {error}") from None
    for name, digest in sorted(sums.items()):
        if leads_out(name):
            raise UnavailableError(f"{SUMS} there names {name!r}, which is not in that folder")
        yield Entry(name, -1, digest)


def put(address: str, content: object) -> NoReturn:  # noqa: ARG001
    """Raise UserError: web servers only give files."""
    raise UserError(f"address {address!r}: nothing can be written to a web server; give a path, s3://, gs:// or az://")


create = put


def delete(addresses: Sequence[str]) -> NoReturn:
    """Raise UserError."""
    put(addresses[0], None)


@contextmanager
def response(address: str, method: str, headers: dict[str, str]) -> Iterator[Any]:
    """Yield the response with status 200 or 206, whose body is not yet read."""
    try:
        with session(os.getpid()).request(
            method,
            address,
            stream=method != "HEAD",  # what has no body is read at once, else its connection would be closed
            timeout=(failures.CONNECT_TIMEOUT, failures.READ_TIMEOUT),
            headers={"Accept-Encoding": "identity", **headers},  # what is compressed on the way has another digest
            allow_redirects=True,
        ) as answer:
            if answer.status_code not in (200, 206):
                raise refusal(answer.status_code, answer.reason or "")
            yield answer
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise UnavailableError(masked(root_cause(error)), transient=not isinstance(error, HOPELESS)) from None


def root_cause(error: BaseException) -> str:
    """Return the innermost error's message: those around it are long and name their objects."""
    if isinstance(error, ConnectTimeout | urllib3.exceptions.ConnectTimeoutError):
        return f"no connection within {failures.CONNECT_TIMEOUT:g} s"
    if isinstance(error, ReadTimeout | urllib3.exceptions.ReadTimeoutError):
        return f"no answer within {failures.READ_TIMEOUT:g} s"
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return getattr(error, "strerror", None) or str(error)


class Session(requests.Session):
    """Follows redirects on the same host and to public ones, and to others that the setting allows."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Return where a response says the file is; None if it is no redirect.

        Raises:
            UnavailableError: that is another host, in a private network, on this machine or of a cloud's own services.
        """
        target = super().get_redirect_target(resp)
        if target is not None and not may_be_redirected(resp.url, there := urljoin(resp.url, target)):
            resp.close()
            raise UnavailableError(
                f"redirected to {origin_of(there)}, which is another host and not a public one; set "
                f"{ALLOWED}={origin_of(there)} if that may be read"
            )
        return target


@cache
def session(process: int) -> requests.Session:  # noqa: ARG001
    """Return a process's session, which keeps connections open and no cookies: each request is given the same."""
    made = Session()
    made.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    for scheme in ("http://", "https://"):
        made.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
    return made
