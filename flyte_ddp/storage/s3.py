"""Objects of S3, on AWS or any server that speaks its protocol."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from flyte_ddp.storage import failures
from flyte_ddp.storage.content import CHUNK_BYTES, Content, Entry, Span, entity_tag
from flyte_ddp.storage.failures import CONNECTIONS, UnavailableError, refusal, root_cause
from flyte_ddp.storage.per_process import PerProcess
from flyte_ddp.storage.s3_objects import Buckets


@contextmanager
def open_file(address: str, span: Span | None) -> Iterator[Content]:
    """:func:`flyte_ddp.storage.open_file` for an S3 object."""
    bucket, key = location(address)
    with explained():
        if span is None:
            found = access().buckets.open(bucket, key)
            if found is not None:
                yield found
                return
            answer = client().get_object(Bucket=bucket, Key=key)
            access().buckets.leave(bucket)
        else:
            answer = client().get_object(Bucket=bucket, Key=key, Range=f"bytes={span[0]}-{span[1] - 1}")
        with closing(answer["Body"]) as body:
            yield Content(answer["ContentLength"], body.iter_chunks(CHUNK_BYTES), entity_tag(answer.get("ETag")))


def stat(address: str) -> Entry:
    """:func:`flyte_ddp.storage.stat` for an S3 object."""
    bucket, key = location(address)
    with explained():
        found = client().head_object(Bucket=bucket, Key=key)
    return Entry("", found["ContentLength"], entity_tag(found["ETag"]))


def list_files(address: str) -> Iterator[Entry]:
    """:func:`flyte_ddp.storage.list_files` for a prefix; consoles make empty objects that stand for folders."""
    bucket, key = location(address)
    folder = f"{key.rstrip('/')}/" if key else ""
    with explained():
        for page in client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=folder):
            for found in page.get("Contents", []):
                if not found["Key"].endswith("/"):
                    yield Entry(found["Key"][len(folder) :], found["Size"], entity_tag(found["ETag"]))


def location(address: str) -> tuple[str, str]:
    """Bucket and key."""
    bucket, _, key = address.partition("://")[2].partition("/")
    return bucket, key


@contextmanager
def explained() -> Iterator[None]:
    """Turns botocore's errors into ours."""
    from botocore import exceptions  # type: ignore[import-untyped,unused-ignore]

    passing = (
        exceptions.HTTPClientError,
        exceptions.ConnectionError,
        exceptions.IncompleteReadError,
        exceptions.CredentialRetrievalError,
        exceptions.MetadataRetrievalError,
    )
    try:
        yield
    except exceptions.ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        code = error.response.get("Error", {}).get("Code", "")
        raise refused(status, "" if code == str(status) else code) from None
    except exceptions.BotoCoreError as error:
        transient = isinstance(error, passing) and not isinstance(error, exceptions.SSLError)
        where = f" by {client().meta.endpoint_url}" if isinstance(error, exceptions.ConnectionError) else ""
        raise UnavailableError(f"{root_cause(error)}{where}", transient=transient) from None


def refused(status: int, code: str) -> UnavailableError:
    """The error for a refusal, S3's code for which may be empty."""
    from botocore import UNSIGNED

    anonymous = client().meta.config.signature_version is UNSIGNED and status in (400, 401, 403)
    return refusal(status, f"{code} (asked without credentials, as there are none)".strip() if anonymous else code)


class Access(NamedTuple):
    """Ways to a store: botocore's client, and a shorter one to objects."""

    client: Any
    buckets: Buckets


def client() -> Any:
    """Botocore's client for the environment as it is now."""
    return access().client


def access() -> Access:
    """For the environment as it is now; making a client takes 0.3 s, so it is kept while that stays the same."""
    prefixes = (b"AWS_", b"FLYTE_AWS_")
    return accesses(tuple(sorted(pair for pair in os.environb.items() if pair[0].startswith(prefixes))))


def flytes_own(environment: Mapping[str, str]) -> tuple[str, str, str]:
    """Endpoint, key and secret in Flyte's own variables, each empty where it is not set."""
    values = [environment.get(f"FLYTE_AWS_{name}", "") for name in ("ENDPOINT", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY")]
    return values[0], values[1], values[2]


def new_access(environment: tuple[tuple[bytes, bytes], ...]) -> Access:
    """Flyte's own variables come first, as in flytekit; botocore itself knows the standard ``AWS_*`` ones.

    Without credentials requests are anonymous, which is what public buckets take.
    """
    import botocore.config  # type: ignore[import-untyped,unused-ignore]
    import botocore.session  # type: ignore[import-untyped,unused-ignore]

    values = {os.fsdecode(name): os.fsdecode(value) for name, value in environment}
    session = botocore.session.get_session()
    endpoint, key, secret = flytes_own(values)
    if key and secret:
        session.set_credentials(key, secret)
    credentials = session.get_credentials()
    anonymous = {} if credentials else {"signature_version": botocore.UNSIGNED}
    config = botocore.config.Config(
        connect_timeout=failures.CONNECT_TIMEOUT,
        read_timeout=failures.READ_TIMEOUT,
        max_pool_connections=CONNECTIONS,
        retries={"total_max_attempts": 1},  # the caller retries, and says so
        response_checksum_validation="when_required",  # servers other than AWS's may not send one
        **anonymous,
    )
    try:
        client = session.create_client("s3", endpoint_url=endpoint or None, config=config)
    except ValueError as error:  # an endpoint that is no address
        raise UnavailableError(str(error)) from None
    return Access(client, Buckets(client, credentials, refused))


accesses = PerProcess(new_access)
