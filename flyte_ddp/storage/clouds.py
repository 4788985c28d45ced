"""obstore's stores for S3, Google and Azure, with the endpoints and credentials of each cloud's own tools.

Flyte's own variables (``FLYTE_AWS_*``, ``FLYTE_AZURE_*``) come first, as in flytekit. Settings and credentials that
cannot be used are errors of many classes: of botocore, google-auth, obstore, or a ValueError.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flyte_ddp.storage import failures

VARIABLES = (b"AWS_", b"FLYTE_A", b"GOOGLE_", b"STORAGE_EMULATOR_HOST", b"AZURE_", b"REQUESTS_CA_BUNDLE")
ENDPOINT_VARIABLES = ("FLYTE_AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
AWS_ENDPOINT = "https://s3.{region}.amazonaws.com"
GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
AZURE_SETTINGS = ("STORAGE_ACCOUNT_NAME", "STORAGE_ACCOUNT_KEY", "CLIENT_ID", "CLIENT_SECRET", "TENANT_ID")
CREDENTIALS_KEPT = timedelta(minutes=10)  # then botocore is asked again, which knows when they have to be renewed


def aws(bucket: str) -> Any:
    """Return a bucket of S3, on AWS or any server that speaks its protocol; botocore knows variables and profiles."""
    from botocore.session import get_session  # type: ignore[import-untyped,unused-ignore]
    from botocore.utils import validate_region_name  # type: ignore[import-untyped,unused-ignore]
    from obstore.store import S3Store

    session = get_session()
    key, secret = (os.environ.get(f"FLYTE_AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    if key and secret:
        session.set_credentials(key, secret)
    credentials = session.get_credentials()

    def credential() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        names = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "token": frozen.token}
        return {**names, "expires_at": datetime.now(UTC) + CREDENTIALS_KEPT}

    if credentials:
        credential()  # once here, where botocore's own error comes out
    region, bundle = session.get_config_variable("region"), session.get_config_variable("ca_bundle")
    validate_region_name(region)
    endpoint = next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), None)
    endpoint = endpoint or session.get_scoped_config().get("endpoint_url")
    if not endpoint:
        region = region_of(bucket, region or "us-east-1", bundle)
        endpoint = AWS_ENDPOINT.format(region=region) + (".cn" if region.startswith("cn-") else "")
    elif not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
        shown = endpoint.rpartition("@")[2]  # without a password
        raise ValueError(f"Invalid endpoint: {shown}; it must begin with https:// or http://")
    settings = common_settings(bundle) | {"aws_endpoint_url_s3": endpoint, "region": region or "us-east-1"}
    settings |= {"credential_provider": credential} if credentials else {"skip_signature": True}
    return S3Store(bucket, **settings)


def region_of(bucket: str, asked: str, bundle: str | None) -> str:
    """Return the region of a bucket of AWS: a server of any region, such as ``asked``, tells it to everybody."""
    import requests

    with suppress(requests.RequestException):  # what is wrong will be said when something is read
        timeouts = (failures.CONNECT_TIMEOUT, failures.READ_TIMEOUT)
        answer = requests.head(f"{AWS_ENDPOINT.format(region=asked)}/{bucket}", timeout=timeouts, verify=bundle or True)
        return answer.headers.get("x-amz-bucket-region", asked)
    return asked


def google(bucket: str) -> Any:
    """Return a bucket of Google's; ``STORAGE_EMULATOR_HOST`` names another server, as for Google's own client."""
    from google import auth
    from google.auth.exceptions import DefaultCredentialsError
    from obstore.auth.google import GoogleCredentialProvider
    from obstore.store import GCSStore

    # What writes has a credential in any case: without one obstore would ask the machine's metadata server.
    anonymous = common_settings() | {
        "skip_signature": True,
        "credential_provider": lambda: {"token": "-", "expires_at": None},
    }
    if host := os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/"):
        return GCSStore(bucket, base_url=host if "://" in host else f"http://{host}", **anonymous)
    try:
        provider = GoogleCredentialProvider(auth.default(scopes=[GOOGLE_SCOPE])[0])
    except DefaultCredentialsError as error:
        if file := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):  # the user means it to be used
            raise ValueError(f"GOOGLE_APPLICATION_CREDENTIALS={file}: {error}") from None
        return GCSStore(bucket, **anonymous)
    provider()  # once here, where google-auth's own error comes out
    return GCSStore(bucket, credential_provider=provider, **common_settings())


def azure(container: str) -> Any:
    """Return a container of Azure's; obstore itself knows the ``AZURE_*`` variables, and managed identities."""
    from obstore.store import AzureStore

    settings = common_settings()
    for name in AZURE_SETTINGS:
        if value := os.environ.get(f"FLYTE_AZURE_{name}"):
            settings[f"azure_{name.lower()}"] = value
    return AzureStore(container, **settings)


CLOUDS: dict[str, Callable[[str], Any]] = {"s3": aws, "gs": google, "az": azure}


def common_settings(bundle: str | None = None) -> dict[str, Any]:
    """Return the settings for all clouds; ``bundle`` is a file of certificates to trust beside the system's."""
    options: dict[str, Any] = {
        "allow_http": True,  # where an endpoint says so
        "connect_timeout": timedelta(seconds=failures.CONNECT_TIMEOUT),
        "read_timeout": timedelta(seconds=failures.READ_TIMEOUT),
        "timeout": timedelta(days=1),  # of a whole download; its own default is 30 s
    }
    if bundle := bundle or os.environ.get("REQUESTS_CA_BUNDLE"):
        options["root_certificate"] = Path(bundle).read_bytes()
        if b"-----BEGIN CERTIFICATE-----" not in options["root_certificate"]:
            raise ValueError(
                f"{bundle}: has no certificate in PEM's format; AWS_CA_BUNDLE or REQUESTS_CA_BUNDLE names it"
            )
    return {"client_options": options, "retry_config": {"max_retries": 0}}  # storage.retried retries, and says so
