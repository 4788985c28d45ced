"""Set the environment for tests that read files."""

import os

import pytest

from flyte_ddp.storage import transfer


@pytest.fixture(autouse=True)
def clean_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply :func:`clean` to each test of a folder whose conftest imports this fixture."""
    clean(monkeypatch)


def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove proxies and credentials from the environment, and make pauses between retries short."""
    for name in tuple(os.environ):
        if name.startswith(("AWS_", "FLYTE_AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(transfer, "FIRST_DELAY", 0.001)


def set_variables(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Set variables of the environment."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def s3_environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let S3 clients use this address."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def object_stores(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients of S3, Google and Azure use this address. Azure's clients get an account and a fake key."""
    s3_environment(endpoint, monkeypatch)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    for name, value in {"ENDPOINT": endpoint, "ACCOUNT_NAME": "account", "ACCOUNT_KEY": "c2VjcmV0"}.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
