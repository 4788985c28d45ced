"""Data sets for these tests, and a short temper in place of long retries."""

import dataclasses
import hashlib

import pytest
from mnist_files import Tiny, tiny_files
from surroundings import clean_surroundings  # noqa: F401 (a fixture)

from flyte_ddp.datasets import DATASETS
from flyte_ddp.datasets.published import MNIST


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """A small data set that stands in the table under mnist, with no public address."""
    arrays, contents = tiny_files(seed=0)
    files = {name: (hashlib.md5(content).hexdigest(),) for name, content in contents.items()}
    dataset = dataclasses.replace(MNIST, files=files, addresses=())
    monkeypatch.setitem(DATASETS, "mnist", dataset)
    return Tiny(dataset, arrays, contents)
