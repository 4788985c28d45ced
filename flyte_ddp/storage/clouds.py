"""obstore's stores for S3, Google and Azure, with the endpoints and credentials of each cloud's own tools."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flyte_ddp.storage import failures
from flyte_ddp.storage.failures import UnavailableError

VARIABLES = (b"AWS_", b"FLYTE_AWS_", b"GOOGLE_", b"STORAGE_EMULATOR_HOST", b"AZURE_", b"REQUESTS_CA_BUNDLE")
ENDPOINT_VARIABLES = ("FLYTE_AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
AWS_ENDPOINT = "https://s3.{region}.amazonaws.com"
GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
CREDENTIALS_KEPT = timedelta(minutes=10)  # then botocore is asked again, which knows when they have to be renewed


def aws(bucket: str) -> Any:
    """A bucket of S3, on AWS or any server that speaks its protocol.

    Flyte's own variables come first, as in flytekit; botocore knows the standard ``AWS_*`` ones, and profiles.
    """
    from botocore import exceptions  # type: ignore[import-untyped,unused-ignore]
    from botocore.session import get_session  # type: ignore[import-untyped,unused-ignore]
    from botocore.utils import validate_region_name  # type: ignore[import-untyped,unused-ignore]
    from obstore.store import S3Store

    session = get_session()
    key, secret = (os.environ.get(f"FLYTE_AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    if key and secret:
        session.set_credentials(key, secret)

    def credential() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        names = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "token": frozen.token}
        return {**names, "expires_at": datetime.now(UTC) + CREDENTIALS_KEPT}

    try:
        if credentials := session.get_credentials():
            credential()  # once here, where botocore's own error comes out
        region, bundle = session.get_config_variable("region"), session.get_config_variable("ca_bundle")
        validate_region_name(region)
        endpoint = next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), None)
        endpoint = endpoint or session.get_scoped_config().get("endpoint_url")
    except exceptions.BotoCoreError as error:
        passing = isinstance(error, (exceptions.CredentialRetrievalError, exceptions.MetadataRetrievalError))
        raise UnavailableError(str(error).strip(), transient=passing) from None
    settings = common(bundle)
    if not endpoint:
        region = region_of(bucket, region or "us-east-1", bundle)
        endpoint = AWS_ENDPOINT.format(region=region) + (".cn" if region.startswith("cn-") else "")
    elif not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
        shown = endpoint.rpartition("@")[2]  # without a password
        raise UnavailableError(f"Invalid endpoint: {shown}; it must begin with https:// or http://")
    settings |= {"aws_endpoint_url_s3": endpoint, "region": region or "us-east-1"}
    settings |= {"credential_provider": credential} if credentials else {"skip_signature": True}
    return S3Store(bucket, **settings)


def region_of(bucket: str, asked: str, bundle: str | None) -> str:
    """The region that a bucket of AWS is in: a server of any region, such as ``asked``, tells it to everybody."""
    import requests

    with suppress(requests.RequestException):  # what is wrong will be said when something is read
        timeouts = (failures.CONNECT_TIMEOUT, failures.READ_TIMEOUT)
        answer = requests.head(f"{AWS_ENDPOINT.format(region=asked)}/{bucket}", timeout=timeouts, verify=bundle or True)
        return answer.headers.get("x-amz-bucket-region", asked)
    return asked


def google(bucket: str) -> Any:
    """A bucket of Google Cloud Storage; ``STORAGE_EMULATOR_HOST`` names another server, as for Google's own client."""
    from google import auth
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from google.auth.transport.requests import Request
    from obstore.store import GCSStore

    def credential() -> Any:
        if not credentials.valid:
            credentials.refresh(Request())  # type: ignore[no-untyped-call]
        until = credentials.expiry
        return {"token": credentials.token, "expires_at": until and until.replace(tzinfo=UTC)}

    # What writes has a credential in any case: without one obstore would ask the machine's metadata server.
    anonymous = common() | {"skip_signature": True, "credential_provider": lambda: {"token": "-", "expires_at": None}}
    if host := os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/"):
        return GCSStore(bucket, base_url=host if "://" in host else f"http://{host}", **anonymous)
    try:
        credentials = auth.default(scopes=[GOOGLE_SCOPE])[0]
        credential()  # once here, where google-auth's own error comes out
    except DefaultCredentialsError as error:
        if file := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):  # the user means it to be used
            raise UnavailableError(f"GOOGLE_APPLICATION_CREDENTIALS={file}: {error}") from None
        return GCSStore(bucket, **anonymous)
    except GoogleAuthError as error:
        raise UnavailableError(f"Google's credentials were refused: {error}", transient=error.retryable) from None
    return GCSStore(bucket, credential_provider=credential, **common())


def azure(container: str) -> Any:
    """A container of Azure Blob Storage; obstore itself knows the ``AZURE_*`` variables, and managed identities."""
    from obstore.store import AzureStore

    return AzureStore(container, **common())


CLOUDS: dict[str, Callable[[str], Any]] = {"s3": aws, "gs": google, "az": azure}


def common(bundle: str | None = None) -> dict[str, Any]:
    """Settings for all clouds; ``bundle``: a file of certificates that are trusted beside the system's."""
    options: dict[str, Any] = {
        "allow_http": True,  # where an endpoint says so
        "connect_timeout": timedelta(seconds=failures.CONNECT_TIMEOUT),
        "read_timeout": timedelta(seconds=failures.READ_TIMEOUT),
        "timeout": timedelta(days=1),  # of a whole download; its own default is 30 s
    }
    if bundle := bundle or os.environ.get("REQUESTS_CA_BUNDLE"):
        try:
            options["root_certificate"] = Path(bundle).read_bytes()
        except OSError as error:
            raise UnavailableError(f"certificates {bundle}: {error.strerror}; correct AWS_CA_BUNDLE") from None
        if b"-----BEGIN CERTIFICATE-----" not in options["root_certificate"]:
            raise UnavailableError(f"certificates {bundle}: has none in PEM's format; correct AWS_CA_BUNDLE")
    return {"client_options": options, "retry_config": {"max_retries": 0}}  # the caller retries, and says so
