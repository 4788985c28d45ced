"""S3 objects through obstore: its own threads fetch them, without the GIL that botocore holds.

botocore's client says what the addresses of a bucket are and who asks. It is also who is asked instead where obstore
cannot be: in a process that was forked from one that used it, whose threads are not there, and for a bucket of which
only the client gets something, such as one in another region.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flyte_ddp.storage import failures
from flyte_ddp.storage.content import CHUNK_BYTES, Content, entity_tag
from flyte_ddp.storage.failures import UnavailableError

CREDENTIALS_KEPT = timedelta(minutes=10)  # then botocore is asked again, which knows when they have to be renewed
STATUS = re.compile(r"status code: (\d{3})(?:.*?<Code>(\w+)</Code>)?", re.DOTALL)
KIND = re.compile(r"kind: (Timeout|Connect)\b")
CAUSE = re.compile(r'message: "([^"]*)"')


KEPT: list[tuple[int, Any]] = []  # stores and who made them; held, so that a forked child does not take them apart


def forked() -> bool:
    """Whether obstore's threads are not here, but in a process that this one was forked from."""
    return any(process != os.getpid() for process, _ in KEPT)


class Buckets:
    """Reads objects of S3.

    Args:
        client: botocore's, for S3.
        credentials: botocore's; None for anonymous requests.
        refused: the error for a status and S3's code for it, which may be empty.
    """

    def __init__(self, client: Any, credentials: Any, refused: Callable[[int, str], UnavailableError]) -> None:
        self.client, self.credentials, self.refused = client, credentials, refused
        self.lock = threading.Lock()
        self.stores: dict[str, Any] = {}  # by bucket; None: leave it to the client
        self.proved: set[str] = set()  # buckets of which we got something

    def open(self, bucket: str, key: str) -> Content | None:
        """An object; None if the client may get more out of the bucket.

        Raises:
            UnavailableError: it cannot be had.
        """
        store = self.store(bucket)
        if store is None:
            return None
        import obstore

        try:
            found = obstore.get(store, key)
        except Exception as error:  # of many classes, some of them Python's own
            failure = self.failure(error)
            # Of a connection that is not made the client knows better why, such as a certificate that isn't trusted.
            if bucket in self.proved or (failure.transient and "kind: Connect" not in str(error)):
                raise failure from None
            return None
        self.proved.add(bucket)
        chunks = self.chunks(found.stream(CHUNK_BYTES // 4))  # at the least
        return Content(found.meta["size"], chunks, entity_tag(found.meta["e_tag"]))

    def chunks(self, stream: Iterable[Any]) -> Iterator[bytes]:
        """The content."""
        try:
            for chunk in stream:
                yield bytes(chunk)
        except Exception as error:
            raise self.failure(error) from None

    def failure(self, error: Exception) -> UnavailableError:
        """What obstore's error means for us; its text has all there is to know."""
        text = str(error)
        if found := STATUS.search(text):
            return self.refused(int(found[1]), found[2] or "")
        if "redirect" in text:
            return self.refused(301, "PermanentRedirect")
        kind, cause = KIND.search(text), CAUSE.search(text)
        if kind and kind[1] == "Timeout":
            return UnavailableError(f"no answer within {failures.READ_TIMEOUT:g} s", transient=True)
        what = cause[1] if cause else text.partition("\n")[0]
        where = f" by {self.client.meta.endpoint_url}" if kind else ""
        return UnavailableError(f"{what}{where}", transient=not isinstance(error, ValueError))

    def store(self, bucket: str) -> Any:
        """Obstore's own for the bucket, or None."""
        if forked():
            return None
        with self.lock:
            if bucket not in self.stores:
                self.stores[bucket] = self.new_store(bucket)
            return self.stores[bucket]

    def leave(self, bucket: str) -> None:
        """Leaves the bucket to the client, which got from it what we did not."""
        with self.lock:
            self.stores[bucket] = None

    def new_store(self, bucket: str) -> Any:
        """One that asks where the client would."""
        from obstore.store import S3Store

        address = self.client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"})
        start = address.partition("?")[0].removesuffix("/k")
        in_path = start.endswith(f"/{bucket}")
        region = self.client.meta.region_name
        options: Any = {
            "allow_http": start.startswith("http://"),
            "connect_timeout": timedelta(seconds=failures.CONNECT_TIMEOUT),
            "read_timeout": timedelta(seconds=failures.READ_TIMEOUT),
            "timeout": timedelta(days=1),  # of a whole download; its own default is 30 s
            **self.certificates(),
        }
        store = S3Store(
            bucket,
            endpoint=start.removesuffix(f"/{bucket}") if in_path else start,
            virtual_hosted_style_request=not in_path,
            region="us-east-1" if region in (None, "aws-global") else region,
            client_options=options,
            retry_config={"max_retries": 0},  # the caller retries, and says so
            **({"skip_signature": True} if self.credentials is None else {"credential_provider": self.credential}),
        )
        KEPT.append((os.getpid(), store))
        return store

    def certificates(self) -> dict[str, bytes]:
        """The setting for those that the client trusts beside the system's.

        Raises:
            UnavailableError: there are none in their file.
        """
        trusted = self.client._endpoint.http_session._verify
        if not isinstance(trusted, str):
            return {}
        try:
            content = Path(trusted).read_bytes()
        except OSError as error:
            raise UnavailableError(f"certificates {trusted}: {error.strerror}; correct AWS_CA_BUNDLE") from None
        if b"-----BEGIN CERTIFICATE-----" not in content:
            raise UnavailableError(f"certificates {trusted}: has none in PEM's format; correct AWS_CA_BUNDLE")
        return {"root_certificate": content}

    def credential(self) -> dict[str, Any]:
        """Who asks, in obstore's words."""
        frozen = self.credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + CREDENTIALS_KEPT,
        }
