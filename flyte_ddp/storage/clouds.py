"""Make obstore's stores for S3, Google and Azure, with the same endpoints and credentials as each cloud's tools.

Flyte's variables (``FLYTE_AWS_*``, ``FLYTE_AZURE_*``) take precedence, as in flytekit. Unusable settings or credentials
raise exceptions of many classes: of botocore, google-auth, obstore, or a ValueError.
"""

import os
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flyte_ddp.storage import transfer

VARIABLES = (b"AWS_", b"FLYTE_A", b"GOOGLE_", b"STORAGE_EMULATOR_HOST", b"AZURE_", b"REQUESTS_CA_BUNDLE")
ENDPOINT_VARIABLES = ("FLYTE_AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
AWS_ENDPOINT = "https://s3.{region}.amazonaws.com"
GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
AZURE_SETTINGS = ("STORAGE_ACCOUNT_NAME", "STORAGE_ACCOUNT_KEY", "CLIENT_ID", "CLIENT_SECRET", "TENANT_ID")
CREDENTIALS_LIFETIME = timedelta(minutes=10)  # afterwards obstore asks botocore again, which renews expired credentials


def make_s3_store(bucket: str) -> Any:
    """Return obstore's store of a bucket on AWS or an S3-compatible server. May ask AWS for region and credentials.

    Without credentials, requests are not signed. For exceptions, see the module's docstring.
    """
    from botocore.session import get_session  # type: ignore[import-untyped,unused-ignore]
    from obstore.store import S3Store

    session = get_session()
    key, secret = (os.environ.get(f"FLYTE_AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    if key and secret:
        session.set_credentials(key, secret)
    credentials = session.get_credentials()

    def fetch_credentials() -> dict[str, str | datetime]:
        """Return the current credentials in obstore's form. botocore renews them before they expire."""
        frozen = credentials.get_frozen_credentials()
        names = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "token": frozen.token}
        return {**names, "expires_at": datetime.now(UTC) + CREDENTIALS_LIFETIME}

    if credentials:
        fetch_credentials()  # called here to get botocore's exception, which obstore would wrap
    region, bundle = session.get_config_variable("region"), session.get_config_variable("ca_bundle")
    endpoint = next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), None)
    endpoint = endpoint or session.get_scoped_config().get("endpoint_url")
    if not endpoint:
        region = find_bucket_region(bucket, region or "us-east-1", bundle)
        endpoint = AWS_ENDPOINT.format(region=region) + (".cn" if region.startswith("cn-") else "")
    elif not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
        shown = endpoint.rpartition("@")[2]  # without a password
        raise ValueError(f"Invalid endpoint: {shown}; it must begin with https:// or http://")
    settings = make_client_settings(bundle) | {"aws_endpoint_url_s3": endpoint, "region": region or "us-east-1"}
    settings |= {"credential_provider": fetch_credentials} if credentials else {"skip_signature": True}
    return S3Store(bucket, **settings)


def find_bucket_region(bucket: str, default: str, bundle: str | None) -> str:
    """Ask AWS for the region of a bucket, without credentials. If the request fails, return ``default``.

    ``bundle`` is the path of trusted certificates (PEM), or None for the usual certificates.
    """
    import requests

    with suppress(requests.RequestException):  # the first read from the bucket reports the error
        timeouts = (transfer.CONNECT_TIMEOUT, transfer.READ_TIMEOUT)
        url = f"{AWS_ENDPOINT.format(region=default)}/{bucket}"
        return requests.head(url, timeout=timeouts, verify=bundle or True).headers.get("x-amz-bucket-region", default)
    return default


def make_google_store(bucket: str) -> Any:
    """Return obstore's store of a Google bucket. Fetches the application default credentials.

    If no credentials exist, or if STORAGE_EMULATOR_HOST names a server, requests are not signed. If
    GOOGLE_APPLICATION_CREDENTIALS is set but unusable, google-auth's exception passes through.
    """
    from google import auth
    from google.auth.exceptions import DefaultCredentialsError
    from obstore.auth.google import GoogleCredentialProvider
    from obstore.store import GCSStore

    # Without any credential, obstore would ask the machine's metadata server for one before it writes.
    no_token = {"token": "-", "expires_at": None}
    anonymous = make_client_settings() | {"skip_signature": True, "credential_provider": lambda: no_token}
    if host := os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/"):
        return GCSStore(bucket, base_url=host if "://" in host else f"http://{host}", **anonymous)
    try:
        provider = GoogleCredentialProvider(auth.default(scopes=[GOOGLE_SCOPE])[0])
    except DefaultCredentialsError:
        if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):  # the user asked for credentials
            raise
        return GCSStore(bucket, **anonymous)
    provider()  # called here to get google-auth's exception, which obstore would wrap
    return GCSStore(bucket, credential_provider=provider, **make_client_settings())


def make_azure_store(container: str) -> Any:
    """Return obstore's store of an Azure container. Sends no request.

    The variables ``FLYTE_AZURE_*`` take precedence over ``AZURE_*``.
    """
    from obstore.store import AzureStore

    settings = make_client_settings()
    for name in AZURE_SETTINGS:
        if value := os.environ.get(f"FLYTE_AZURE_{name}"):
            settings[f"azure_{name.lower()}"] = value
    return AzureStore(container, **settings)


def make_client_settings(bundle: str | None = None) -> dict[str, Any]:
    """Return obstore's settings for timeouts, retries and certificates, which all stores have.

    ``bundle`` or REQUESTS_CA_BUNDLE is the path of certificates (PEM) that are trusted in addition. Reads this file.
    """
    options: dict[str, Any] = {
        "allow_http": True,  # an endpoint may begin with http://
        "connect_timeout": timedelta(seconds=transfer.CONNECT_TIMEOUT),
        "read_timeout": timedelta(seconds=transfer.READ_TIMEOUT),
        "timeout": timedelta(days=1),  # for a whole download: obstore's default of 30 s is too short for a shard
    }
    if bundle := bundle or os.environ.get("REQUESTS_CA_BUNDLE"):
        options["root_certificate"] = Path(bundle).read_bytes()
    return {
        "client_options": options,
        "retry_config": {"max_retries": 0},
    }  # call_with_retries() retries
