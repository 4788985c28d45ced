"""Data sets and servers for these tests, and a short temper in place of long retries."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_server import FaultyServer, faulty_server
from mnist_files import DEBIAN, Tiny, rebuilt_fashion_mnist, tiny_files

from flyte_ddp.datasets import DATASETS
from flyte_ddp.datasets.mnist import MNIST
from flyte_ddp.datasets.published import PublishedFile
from flyte_ddp.storage import retries

sys.path.insert(0, str(Path(__file__).parents[1]))  # for s3_server, which other tests use too


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy and no credentials of the machine's own, and pauses that nobody waits for."""
    for name in tuple(os.environ):
        if name.startswith(("AWS_", "FLYTE_AWS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.001)


@pytest.fixture(scope="session")
def published_fashion() -> dict[str, bytes]:
    """The published FashionMNIST files."""
    if not DEBIAN.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    return rebuilt_fashion_mnist()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """A small data set that stands in the table under mnist, with no public address."""
    arrays, contents = tiny_files(seed=0)
    files = tuple(PublishedFile(name, hashlib.md5(content).hexdigest()) for name, content in contents.items())
    dataset = dataclasses.replace(MNIST, files=files, addresses=())
    monkeypatch.setitem(DATASETS, "mnist", dataset)
    return Tiny(dataset, arrays, contents)


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    """An HTTP server with nothing on it yet."""
    with faulty_server() as running:
        yield running
