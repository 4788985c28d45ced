"""Files of HTTP servers; proxies and certificates are taken from the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flyte_ddp.storage import failures
from flyte_ddp.storage.addresses import leads_out
from flyte_ddp.storage.content import CHUNK_BYTES, Content, Entry, Span, entity_tag
from flyte_ddp.storage.digest_list import SUMS, read_sums
from flyte_ddp.storage.failures import CONNECTIONS, UnavailableError, refusal, root_cause
from flyte_ddp.storage.per_process import PerProcess


@contextmanager
def open_file(address: str, span: Span | None, headers: Mapping[str, str] | None = None) -> Iterator[Content]:
    """:func:`flyte_ddp.storage.open_file` for an HTTP address."""
    wanted = dict(headers or {})
    if span is not None:
        wanted["Range"] = f"bytes={span[0]}-{span[1] - 1}"
    with response(address, "GET", wanted) as answer:
        # By the header and not by the status: some servers of objects answer with 200.
        if span is not None and not answer.headers.get("Content-Range", "").startswith(f"bytes {span[0]}-"):
            raise UnavailableError("the server cannot give a part of a file: it ignores Range")
        size = answer.headers.get("Content-Length")
        chunks = answer.raw.stream(CHUNK_BYTES, decode_content=False)
        yield Content(int(size) if size else None, chunks, entity_tag(answer.headers.get("ETag")))


def stat(address: str, headers: Mapping[str, str] | None = None) -> Entry:
    """:func:`flyte_ddp.storage.stat` for an HTTP address."""
    with response(address, "HEAD", headers) as answer:
        size, tag, time = (answer.headers.get(name, "") for name in ("Content-Length", "ETag", "Last-Modified"))
        return Entry("", int(size or -1), entity_tag(tag) or time)


def list_files(address: str) -> Iterator[Entry]:
    """HTTP knows no list of files; one can be put there, which has no sizes."""
    try:
        with open_file(f"{address.rstrip('/')}/{SUMS}", None) as found:
            content = b"".join(found.chunks)
    except UnavailableError as failure:
        words = f"an HTTP server has no list of its files, and {SUMS} in that folder cannot be read: {failure}"
        raise UnavailableError(words, transient=failure.transient) from None
    for name, digest in sorted(read_sums(content).items()):
        if leads_out(name):
            raise UnavailableError(f"{SUMS} there names {name!r}, which is not in that folder")
        yield Entry(name, -1, digest)


@contextmanager
def response(address: str, method: str, headers: Mapping[str, str] | None = None) -> Iterator[Any]:
    """The answer with status 200 or 206 and a body not yet read."""
    import requests
    import urllib3

    hopeless = (
        requests.exceptions.InvalidURL,
        requests.exceptions.SSLError,
        requests.exceptions.TooManyRedirects,
        urllib3.exceptions.LocationParseError,
    )
    try:
        with sessions(None).request(
            method,
            address,
            stream=method != "HEAD",  # what has no body is read at once, else its connection would be closed
            timeout=(failures.CONNECT_TIMEOUT, failures.READ_TIMEOUT),
            # A server that compressed on the way would change the digest.
            headers={"Accept-Encoding": "identity", **(headers or {})},
            allow_redirects=True,
        ) as answer:
            if answer.status_code not in (200, 206):
                raise refusal(answer.status_code, answer.reason or "")
            yield answer
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise UnavailableError(root_cause(error), transient=not isinstance(error, hopeless)) from None


def new_session(key: None) -> Any:
    """Keeps connections open, and no cookies: one request is not to change what the next one is given."""
    del key
    from http.cookiejar import DefaultCookiePolicy

    import requests
    from requests.adapters import HTTPAdapter

    session = requests.Session()
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
    return session


sessions = PerProcess(new_session)
