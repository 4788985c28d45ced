"""What tests share; nothing of the user's own environment reaches them."""

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import packaged
import pytest
import zygote
from cli import HELPERS
from file_server import FileServer, file_server
from hypothesis import settings
from packaged import Package

from flyte_ddp.datasets import fetch

collect_ignore = ["cluster"]  # needs a cluster: make cluster-test


def pytest_configure(config: pytest.Config) -> None:
    """Before torch is imported: its idle threads do not turn on cores that other tests need; GPUs are hidden."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # most tests expect what "auto" chooses on a CPU
    settings.register_profile("busy machines", deadline=None)
    settings.load_profile("busy machines")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from visiting modules and tests, while they are imported and afterwards.

    These 700,000 objects never become garbage. Visiting them took a quarter of the collection's time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # at exit, nanobind reports objects that are not collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with many slow tests come first: no worker is idle at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="let tests see GPUs: for those of tests/training/test_gpu.py")
    parser.addoption("--cold", action="store_true", help="start each interpreter as users do")


@pytest.fixture
def no_collection() -> Iterator[None]:
    """For what goes as deep as Python allows: a finaliser that runs down there has no depth left, and fails."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def forked_interpreters(request: pytest.FixtureRequest) -> Iterator[None]:
    """``pyflyte`` commands, pods and ranks are forks of a process that has imported flytekit's modules and torch."""
    with nullcontext() if request.config.getoption("--cold") else zygote.used():
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """What tests compute themselves takes one thread: more cost a multiple where two workers share two cores."""
    import torch  # after pytest_configure has set what it reads once

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def interpreters(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of tests that are marked ``cold`` start as users start them."""
    with zygote.unused() if request.node.get_closest_marker("cold") else nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def isolated_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No settings of flytekit, of wandb or of this package, and an empty home: Flyte keeps its local cache there."""
    with pytest.MonkeyPatch.context() as patch:
        for name in tuple(os.environ):
            if name.startswith(("FLYTE", "WANDB_")):
                patch.delenv(name)
        patch.setenv("FLYTE_DDP_RESTARTS", "0")  # so that tests see the failure; tests of restarts allow them
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("MPLCONFIGDIR", str(zygote.MATPLOTLIB))
        yield


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A server on loopback with nothing on it yet."""
    with file_server() as running:
        yield running


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded digits, prepared; nobody changes them."""
    return fetch("digits", "", tmp_path_factory.mktemp("data") / "digits", progress="off")


@pytest.fixture
def user_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of tests/helpers be found, in ranks too."""
    monkeypatch.chdir(HELPERS)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where processes put their temporary files, which also tells them from others; user models are found."""
    monkeypatch.chdir(HELPERS)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # torch makes it, for all its users
    return folder


@pytest.fixture(scope="session")
def default(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package of somebody who chose no profile, but said whom to notify, and where results and models go."""
    stores = {"FLYTE_DDP_RESULTS": "s3://bucket/results", "FLYTE_DDP_REGISTRY": "s3://bucket/models"}
    others = {"WANDB_PROJECT": "digits", "WANDB_MODE": "online", "FLYTE_DDP_NOTIFY": "a@example.com, b@example.com"}
    return packaged.make_shared(
        tmp_path_factory, "default", lambda folder: packaged.make(folder, **stores, **others)[0]
    )


@pytest.fixture(scope="session")
def of_two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package of somebody who chose two nodes."""
    make = partial(packaged.make, FLYTE_DDP_NODES="2")
    return packaged.make_shared(tmp_path_factory, "two-nodes", lambda folder: make(folder)[0])
