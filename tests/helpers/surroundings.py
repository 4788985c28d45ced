"""Set the environment for tests that read files."""

import os

import pytest

from flyte_ddp.storage import retries


def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove proxies and credentials from the environment, and make pauses between retries short."""
    for name in tuple(os.environ):
        if name.startswith(("AWS_", "FLYTE_AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.001)


def s3_environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let S3 clients use this address."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def azure_environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Azure clients use this address, with an account and a made-up key."""
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
