"""Checks of a user's own Flyte cluster from outside; see docs/deployment.md, "Trying a cluster"."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cluster import Cluster  # noqa: E402 (from this folder, after the project's)

SECURITY_LEVEL = "pod-security.kubernetes.io/enforce"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that ``make cluster-test`` passes on."""
    parser.addoption("--flyte-config", required=True, help="cluster to register on: deploy/sandbox.yaml or your own")
    parser.addoption("--image", required=True, help="image of the pods, built from Dockerfile, with a tag")
    parser.addoption("--profile", default="sandbox", help="a name in flyte_ddp/pods/profiles.py")
    parser.addoption("--project", default="flytesnacks")
    parser.addoption("--domain", default="staging")


@pytest.fixture(scope="session", autouse=True)
def isolated_environment() -> None:
    """Replace the other tests' fixture: the cluster is reached by this user's own home and variables."""


@pytest.fixture(scope="session", autouse=True)
def forked_interpreters() -> None:
    """Replace the other tests' fixture: commands start as users start them."""


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield the cluster, with a version of this run's own to register; end its launch plans and executions after."""
    found = Cluster(pytestconfig.getoption, tmp_path_factory.mktemp("cluster"))
    try:
        yield found
    finally:
        found.clean_up()


@pytest.fixture
def kubectl(cluster: Cluster) -> Cluster:
    """Return the cluster; skip the test if kubectl does not reach it."""
    if not cluster.has_kubectl:
        pytest.skip("kubectl reaches no cluster with this project's namespace")
    return cluster


@pytest.fixture
def restricted(kubectl: Cluster) -> Iterator[Cluster]:
    """Yield the cluster; label its namespace meanwhile to enforce PodSecurity "restricted", if kubectl may do that."""
    found = json.loads(kubectl.kubectl("get", "namespace", kubectl.namespace, "-o", "json").stdout)
    before = found["metadata"]["labels"].get(SECURITY_LEVEL)
    label = ("label", "--overwrite", "namespace", kubectl.namespace)
    kubectl.kubectl(*label, f"{SECURITY_LEVEL}=restricted", check=False)
    yield kubectl
    kubectl.kubectl(*label, f"{SECURITY_LEVEL}={before}" if before else f"{SECURITY_LEVEL}-", check=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a table of all checks: outcome, duration, name, and the first line of the error, or why it was skipped."""
    terminalreporter.section("cluster")
    for outcome in ("passed", "skipped", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            crash = getattr(report.longrepr, "reprcrash", None)
            said = report.longrepr[2].removeprefix("Skipped: ") if outcome == "skipped" else crash and crash.message
            check = report.head_line.removeprefix("test_").replace("_", " ")
            reason = f": {said.splitlines()[0][:90]}" if said else ""
            terminalreporter.write_line(f"{outcome:8} {report.duration:6.0f} s  {check}{reason}")
