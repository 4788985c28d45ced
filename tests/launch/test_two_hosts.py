"""Elastic on two hosts that share neither files nor memory, started by ``torchrun`` on each."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli import HELPERS
from faulty_runs import HP as FAULTY
from faulty_runs import INTRODUCED as HP
from faulty_runs import equal
from hosts import Host, two_hosts
from trials import Trial, close, starts

from flyte_ddp.models.stored_code import read_model_json
from flyte_ddp.run import Result

pytestmark = pytest.mark.slow

SCRIPT = HELPERS / "elastic_host.py"
PORT = 29400  # within the hosts' own network


def torchrun(host: Host, first: Host, nodes: str, *, by_name: bool = False) -> list[str]:
    """A worker on this host, and Elastic's store on the first, by its address or its name."""
    cores = sorted(os.sched_getaffinity(0))
    core = str(cores[0] if host is first else cores[-1])
    name, own = (first.name, host.name) if by_name else (first.address, host.address)
    return [
        *("taskset", "--cpu-list", core),  # one for each rank, as in the run that this one is compared with
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{name}:{PORT}", "--rdzv-id", "test"),
        # A host that joins after the last call makes torchrun's agents wait a minute for each other.
        *("--rdzv-conf", f"is_host={int(host is first)},last_call_timeout=5,keep_alive_interval=1"),
        *("--local-addr", own, "--max-restarts", "2", "--monitor-interval", "0.1"),
    ]


def start(host: Host, trial: Trial, command: list[str], log: Path, **mounts: Any) -> subprocess.Popen[bytes]:
    """Start it with the test's environment, without what this machine has for its own network."""
    theirs = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return host.start(command, log, {**theirs, "PYTHONPATH": str(HELPERS)}, **mounts)


def test_two_hosts_train_as_one(expected: Result, trial: Trial, tmp_path: Path) -> None:
    """The second sees neither the run's folder nor its data; each knows its own name as a loopback address (Debian)."""
    runs = tmp_path / "runs"
    runs.mkdir()
    arguments = [str(SCRIPT), HP.to_json(), str(trial.digits), str(runs / "run")]
    with two_hosts() as both:
        started = []
        for host, other in (both, both[::-1]):
            names = tmp_path / f"{host.name}.hosts"
            names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{other.address} {other.name}\n")
            command = torchrun(host, both[0], "2", by_name=True)
            hidden = runs if host is both[1] else None
            log = tmp_path / f"{host.address}.log"
            started.append(start(host, trial, [*command, *arguments], log, hidden=hidden, names=names))
        codes = [process.wait(timeout=120) for process in started]
    assert codes == [0, 0], "\n".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert equal(expected.run_folder, runs / "run")
    assert {path.name for path in (runs / "run/results/ranks").iterdir()} == {"0.json", "1.json"}
    [begin] = starts(runs / "run")
    assert (begin["num_ranks"], begin["num_nodes"], begin["strategy"]) == (2, 2, "ddp")
    sidecar = read_model_json(runs / "run/model.json")
    assert (sidecar.num_ranks, sidecar.num_nodes) == (2, 2)


@pytest.mark.exhaustive
def test_one_host_is_lost(expected: Result, trial: Trial, tmp_path: Path) -> None:
    """The other goes on alone, from the last checkpoint."""
    trial.inject("hang")
    arguments = [str(SCRIPT), FAULTY.to_json(), str(trial.digits), str(trial.folder)]
    with two_hosts() as both:
        started = [
            start(host, trial, [*torchrun(host, both[0], "1:2"), *arguments], tmp_path / host.address) for host in both
        ]
        trial.when_failing(lambda: both[1].is_lost(started[1])).join()
        assert started[0].wait(timeout=180) == 0, (tmp_path / both[0].address).read_text()
    begun = starts(trial.folder)
    assert [(begin["num_ranks"], begin["num_nodes"]) for begin in begun] == [(2, 2), (1, 1)]
    assert begun[1]["resumed_after_step"] == 3
    assert close(trial.folder, expected.run_folder)


@pytest.mark.exhaustive
def test_the_host_of_rank_0_is_lost(trial: Trial, tmp_path: Path) -> None:
    """The other's worker says so; Elastic's store is still there."""
    trial.inject("hang", rank=0)
    arguments = ["--max-restarts", "0", str(SCRIPT), FAULTY.to_json(), str(trial.digits), str(trial.folder)]
    with two_hosts() as both:
        started = [
            start(host, trial, [*torchrun(host, both[1], "2"), *arguments], tmp_path / host.address) for host in both
        ]
        trial.when_failing(lambda: both[0].is_lost(started[0])).join()
        assert started[1].wait(timeout=120) == 1, (tmp_path / both[1].address).read_text()
    assert "RankError: lost the connection to rank 0" in (tmp_path / both[1].address).read_text()
