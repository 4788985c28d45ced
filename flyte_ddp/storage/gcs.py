"""Objects of Google Cloud Storage, by its XML interface: HTTP with a token of google-auth's.

``STORAGE_EMULATOR_HOST`` names another server, as for Google's own client. Without credentials requests are anonymous.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode
from xml.etree import ElementTree as ET

from flyte_ddp.storage import http
from flyte_ddp.storage.content import Content, Entry, Span, entity_tag
from flyte_ddp.storage.failures import UnavailableError
from flyte_ddp.storage.per_process import PerProcess
from flyte_ddp.storage.s3 import location

READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """:func:`flyte_ddp.storage.open_file` for an object."""
    bucket, key = location(address)
    with http.open_file(f"{server()}/{bucket}/{quote(key)}", span, authorisation()) as content:
        yield content


def stat(address: str) -> Entry:
    """:func:`flyte_ddp.storage.stat` for an object."""
    bucket, key = location(address)
    return http.stat(f"{server()}/{bucket}/{quote(key)}", authorisation())


def list_files(address: str) -> Iterator[Entry]:
    """:func:`flyte_ddp.storage.list_files` for a prefix, a page of a thousand at a time."""
    bucket, key = location(address)
    folder = f"{key.rstrip('/')}/" if key else ""
    query = {"list-type": "2", "prefix": folder}
    while True:
        with http.response(f"{server()}/{bucket}?{urlencode(query)}", "GET", authorisation()) as answer:
            page = parsed(answer.content)
        for found in page.iterfind("{*}Contents"):
            name, size, tag = (found.findtext(f"{{*}}{field}", "") for field in ("Key", "Size", "ETag"))
            if not name.endswith("/"):
                yield Entry(name[len(folder) :], int(size), entity_tag(tag))
        following = page.findtext("{*}NextContinuationToken")
        if not following:
            return
        query["continuation-token"] = following


def parsed(page: bytes) -> ET.Element:
    """The root of a page of a list."""
    try:
        return ET.fromstring(page)  # noqa: S314 (from the server that the user has named)
    except ET.ParseError as error:
        raise UnavailableError(f"the server's list of files is not XML ({error})") from None


def server() -> str:
    """Where the objects are."""
    host = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    if not host:
        return "https://storage.googleapis.com"
    return host if "://" in host else f"http://{host}"


def authorisation() -> dict[str, str]:
    """The header that says who asks; none where nobody has given credentials, or to another server than Google's."""
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return {}
    found = credentials(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", ""))
    if found is None:
        return {}
    from google.auth.exceptions import GoogleAuthError
    from google.auth.transport.requests import Request

    try:
        if not found.valid:
            found.refresh(Request())
    except GoogleAuthError as error:
        raise UnavailableError(f"Google's credentials were refused: {error}", transient=error.retryable) from None
    return {"Authorization": f"Bearer {found.token}"}


def new_credentials(file: str) -> Any:
    """What Google's own tools would use here, or None."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    try:
        return google.auth.default(scopes=[READ_ONLY])[0]
    except DefaultCredentialsError as error:
        if file:  # the user means it to be used
            raise UnavailableError(f"GOOGLE_APPLICATION_CREDENTIALS={file}: {error}") from None
        return None


credentials = PerProcess(new_credentials)
