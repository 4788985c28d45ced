"""Elastic on two hosts that share neither files nor memory, started by ``torchrun`` on each."""

import json
import os
import sys
from pathlib import Path

import faults
import pytest
import torch
from cli import HELPERS
from faulty_runs import HP as FAULTY
from faulty_runs import INTRODUCED as HP
from faulty_runs import equal, weights, when
from hosts import Host, two_hosts

from flyte_ddp.json_lines import read_records
from flyte_ddp.models.artifacts import read_sidecar
from flyte_ddp.run import Result

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("temporary")]

SCRIPT = HELPERS / "elastic_host.py"
PORT = 29400  # within the hosts' own network


def command(host: Host, first: Host, nodes: str, *arguments: str, by_name: bool = False) -> list[str]:
    """A worker on this host, and Elastic's store on the first, by its address or its name."""
    cores = sorted(os.sched_getaffinity(0))
    core = str(cores[0] if host is first else cores[-1])
    name, own = (first.name, host.name) if by_name else (first.address, host.address)
    return [
        *("taskset", "--cpu-list", core),  # one for each rank, as in the run that this one is compared with
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{name}:{PORT}", "--rdzv-id", "test"),
        *("--rdzv-conf", f"is_host={int(host is first)},last_call_timeout=1,keep_alive_interval=1"),
        *("--local-addr", own, "--max-restarts", "2", "--monitor-interval", "0.1", str(SCRIPT), *arguments),
    ]


def environment(temporary: Path) -> dict[str, str]:
    """The test's, without what this machine has for its own network."""
    theirs = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**theirs, "PYTHONPATH": str(HELPERS), "TMPDIR": str(temporary)}


@pytest.mark.parametrize("store_is_with", ["rank 0", pytest.param("the other", marks=pytest.mark.exhaustive)])
def test_two_hosts_train_as_one(
    expected: Result, digits: Path, tmp_path: Path, temporary: Path, store_is_with: str
) -> None:
    """The second sees neither the run's folder nor its data, which it fetches; Elastic's store may be on either.

    Each knows its own name as a loopback address, as Debian writes it into /etc/hosts.
    """
    runs = tmp_path / "runs"
    runs.mkdir()
    arguments = (HP.to_json(), str(digits), str(runs / "run"))
    with two_hosts() as both:
        for host, other in (both, both[::-1]):
            known = f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{other.address} {other.name}\n"
            (tmp_path / f"{host.name}.hosts").write_text(known)
        with_store = both[store_is_with != "rank 0"]
        started = [
            host.start(
                command(host, with_store, "2", *arguments, by_name=True),
                tmp_path / f"{host.address}.log",
                environment(temporary),
                hidden=runs if host is both[1] and store_is_with == "rank 0" else None,
                names=tmp_path / f"{host.name}.hosts",
            )
            for host in both
        ]
        codes = [process.wait(timeout=120) for process in started]
    logs = "\n".join((tmp_path / f"{host.address}.log").read_text() for host in both)
    assert codes == [0, 0], logs
    assert equal(expected.run_folder, runs / "run")
    assert {path.name for path in (runs / "run/results/ranks").iterdir()} == {"0.json", "1.json"}
    (start,) = [record for record in read_records(runs / "run/metrics.jsonl") if record["kind"] == "start"]
    assert (start["num_ranks"], start["num_nodes"], start["strategy"]) == (2, 2, "ddp")
    sidecar = read_sidecar(runs / "run/model.json")
    assert (sidecar["num_ranks"], sidecar["num_nodes"]) == (2, 2)


def test_one_host_is_lost(
    expected: Result, digits: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other goes on alone, from the last checkpoint."""
    runs, marker = tmp_path / "runs", tmp_path / "marker"
    runs.mkdir()
    faults.inject(monkeypatch, marker, rank=1, at="training", kind="hang", **{"pass": 3})
    arguments = (FAULTY.to_json(), str(digits), str(runs / "run"))
    with two_hosts() as (first, second):
        started = [
            host.start(
                command(host, first, "1:2", *arguments), tmp_path / f"{host.address}.log", environment(temporary)
            )
            for host in (first, second)
        ]
        when(marker, lambda: second.is_lost(started[1])).join()
        code = started[0].wait(timeout=180)
    log = (tmp_path / f"{first.address}.log").read_text()
    assert code == 0, log
    starts = [record for record in read_records(runs / "run/metrics.jsonl") if record["kind"] == "start"]
    assert [(start["num_ranks"], start["num_nodes"]) for start in starts] == [(2, 2), (1, 1)]
    assert starts[1]["resumed_after_step"] == 3
    mine, other = weights(runs / "run"), weights(expected.run_folder)
    assert all(torch.allclose(mine[name], other[name], rtol=1e-3, atol=1e-5) for name in other)


@pytest.mark.parametrize("loss", ["process", pytest.param("host", marks=pytest.mark.exhaustive)])
def test_rank_0_is_lost(
    digits: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Killed, as by the kernel for want of memory, or with its host, as a pod that is deleted.

    The other's agent is told that another try is worth it, and not of the connection that it lost.
    """
    runs, marker = tmp_path / "runs", tmp_path / "marker"
    runs.mkdir()
    kind = "SIGKILL" if loss == "process" else "hang"
    faults.inject(monkeypatch, marker, rank=0, at="training", kind=kind, **{"pass": 3})
    arguments = [str(SCRIPT), FAULTY.to_json(), str(digits), str(runs / "run")]
    with two_hosts() as both:
        first, second = both
        store = f"{second.address}:{PORT}"  # rank 0 is on the first, as its address is
        started = [
            host.start(
                [sys.executable, *arguments, store, host.address, str(int(host is second))],
                tmp_path / f"{host.address}.log",
                environment(temporary),
            )
            for host in both
        ]
        if loss == "host":
            when(marker, lambda: first.is_lost(started[0])).join()
        codes = [process.wait(timeout=120) for process in started]
    logs = [(tmp_path / f"{host.address}.log").read_text() for host in both]
    assert codes == [0 if loss == "process" else -9, 0], logs
    told = [json.loads(log.splitlines()[-1]) for log in logs[loss == "host" :]]
    assert (told[-1]["type"], told[-1]["again"]) == ("RankError", True), logs[1]
    assert told[-1]["said"].startswith("lost the connection to rank 0")
    if loss == "process":
        assert (told[0]["said"].split(",")[0], told[0]["again"]) == ("rank 0 was killed by SIGKILL", True)


NAME_SERVER = """
import pathlib, socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("", 53))
pathlib.Path(sys.argv[1]).touch()
while True:
    question, asking = server.recvfrom(1000)
    print(question[12:], flush=True)
    server.sendto(question[:2] + bytes([0x81, 0x83]) + question[4:6] + bytes(6) + question[12:], asking)  # no such name
"""
TRAINING = """
import sys
from pathlib import Path
from flyte_ddp.config import Hyperparameters
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings
hp, settings = Hyperparameters(epochs=1, num_ranks=2), Settings(progress="off", wandb_mode="disabled")
run_training(hp, Path(sys.argv[1]), Path(sys.argv[2]), settings)
"""
LOOKING_UP = "import socket; socket.getnameinfo(('10.78.0.77', 80), 0)"


def test_ranks_on_one_host_look_no_name_up(digits: Path, tmp_path: Path, temporary: Path) -> None:
    """A resolver that does not answer, for which each name would cost seconds, costs them nothing."""
    log, asked, ready = tmp_path / "log", tmp_path / "asked", tmp_path / "ready"
    names, resolver = tmp_path / "hosts", tmp_path / "resolv.conf"
    with two_hosts() as (host, other):
        names.write_text(f"127.0.0.1 localhost\n{host.address} {host.name}\n")
        resolver.write_text(f"nameserver {other.address}\n")
        server = other.start([sys.executable, "-c", NAME_SERVER, str(ready)], asked, environment(temporary))
        when(ready, lambda: None).join()

        def asked_by(*command: str) -> int:
            before = asked.read_text().count("\n")
            process = host.start(
                [sys.executable, "-c", *command], log, environment(temporary), names=names, resolver=resolver
            )
            assert process.wait(timeout=120) == 0, log.read_text()
            return asked.read_text().count("\n") - before

        assert asked_by(LOOKING_UP) == 1
        assert asked_by(TRAINING, str(digits), str(tmp_path / "run")) == 0
        server.kill()
        server.wait()
