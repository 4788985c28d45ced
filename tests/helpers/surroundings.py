"""What tests of reading files start from."""

import os

import pytest

from flyte_ddp.storage import retries


def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy and no credentials of the machine's own, and pauses that nobody waits for."""
    for name in tuple(os.environ):
        if name.startswith(("AWS_", "FLYTE_AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.001)


def s3_environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 is at this address, and nobody asks who we are."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def azure_environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure's Blob service is at this address, and has an account of whose key it says nothing."""
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
