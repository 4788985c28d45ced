"""Data for these tests."""

from pathlib import Path

import pytest

from flyte_ddp.datasets.packing import pack_source


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the digits in ten shards, the last of which is smaller; nobody changes it."""
    folder = tmp_path_factory.mktemp("shards")
    pack_source("digits", folder, per_shard=160, progress="off")
    return folder
