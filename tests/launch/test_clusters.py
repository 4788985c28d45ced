"""What clusters have that one machine has not: hosts, workers, addresses."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import distributed
import pytest
import ray as engine
from ray._private import services

from flyte_ddp.core.errors import UnreachableError, UserError
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.engines import capacity, dask, ray

pytestmark = pytest.mark.usefixtures("temporary")


@contextmanager
def client_of_workers(number: int) -> Iterator[distributed.Client]:
    """Yield the client of a cluster whose scheduler and workers are threads of this process."""
    options = {"processes": False, "protocol": "tcp://", "threads_per_worker": 1, "dashboard_address": ":0"}
    cluster = distributed.LocalCluster(n_workers=number, host="127.0.0.1", **options)
    with cluster, distributed.Client(cluster) as client:
        yield client


@pytest.mark.slow
@pytest.mark.usefixtures("no_current_client")
class TestDask:
    def test_the_cluster_of_an_address(self, monkeypatch, capsys) -> None:
        with client_of_workers(4) as other:
            monkeypatch.setenv(dask.SCHEDULER, other.scheduler.address)
            with dask.connected() as client:
                assert client.scheduler.address == other.scheduler.address
                assert client is not other
                found = dask.plan_world(Request(0), client, 60.0)
                assert (found.num_ranks, found.threads) == (4, 1)
                assert dask.plan_world(Request(9), client, 0.0).num_ranks == 4
        said = "4 of 9 workers of the Dask cluster\nnum_ranks=9: the Dask cluster has 4 workers; starting 4 ranks\n"
        assert capsys.readouterr().err == said

    def test_an_address_without_a_scheduler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(dask.SCHEDULER, "tcp://127.0.0.1:9")
        words = "^DASK_SCHEDULER_ADDRESS=tcp://127.0.0.1:9: no scheduler answers .*; start"
        with pytest.raises(UnreachableError, match=words):
            dask.connected(seconds=0.5).__enter__()


WORKERS = {f"tcp://{name}": {"host": name[0], "tasks": ()} for name in ("b:1", "a:1", "b:2", "c:1")}


def test_workers_are_on_as_few_hosts_as_possible_and_idle_ones_first() -> None:
    assert dask.choose_workers(WORKERS, 2) == ["tcp://b:1", "tcp://b:2"]
    assert dask.choose_workers(WORKERS, 3) == ["tcp://b:1", "tcp://b:2", "tcp://a:1"]
    busy = {**WORKERS, "tcp://b:1": {"host": "b", "tasks": ("something",)}}
    assert dask.choose_workers(busy, 2) == ["tcp://a:1", "tcp://b:2"]
    assert len(dask.choose_workers(busy, 4)) == 4
    with pytest.raises(UserError, match=r"num_ranks=5: the Dask cluster has 4 workers, .*lower num_ranks"):
        dask.choose_workers(WORKERS, 5)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (("0,1", "0,1", "0"), [0, 1, 0]),  # as plain workers see them, on two hosts
        (("0,1", "1,0", "0"), [0, 0, 0]),  # rotated
        (("2", "3", "0"), [0, 0, 0]),  # one for each worker
        ((None, None, None), [0, 1, 0]),  # not limited
    ],
)
def test_each_rank_has_a_gpu_of_its_own(visible: tuple[str | None, ...], expected: list[int]) -> None:
    workers = ["tcp://a:1", "tcp://a:2", "tcp://b:1"]
    assert dask.choose_gpus(workers, dict(zip(workers, visible, strict=True))) == expected


class TestRay:
    @pytest.fixture(autouse=True)
    def disconnected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine.shutdown()
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")

    @pytest.mark.parametrize(
        ("address", "words"),
        [
            ("127.0.0.1:9", "no cluster answers .*Connection refused.*; start"),
            ("auto", "no cluster answers .*Connection refused"),  # of a cluster that has ended
            ("nowhere", "no cluster answers .*Invalid address format: nowhere"),
            ("ray://127.0.0.1:10001", "must be host:port of the cluster's head"),
        ],
    )
    def test_an_address_without_a_cluster_for_ranks(self, monkeypatch, tmp_path, address: str, words: str) -> None:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text("127.0.0.1:9")
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(set))  # this machine may have a cluster
        monkeypatch.setenv(ray.ADDRESS, address)
        with pytest.raises(UserError, match=f"^RAY_ADDRESS={address}: {words}") as raised, ray.connected():
            pass
        assert isinstance(raised.value, UnreachableError) == words.startswith("no cluster")


@pytest.mark.parametrize(
    ("cpus", "num_ranks", "expected"), [([8], 2, 4), ([4, 4], 2, 4), ([4, 4], 3, 2), ([8, 2], 2, 4), ([3, 3], 6, 1)]
)
def test_ranks_have_as_many_cpus_as_all_can_have(cpus: list[int], num_ranks: int, expected: int) -> None:
    assert ray.compute_cpus_per_rank(cpus, num_ranks) == expected


def test_hosts_that_are_still_to_come_are_waited_for(monkeypatch, capsys) -> None:
    """Those that are there need no word."""
    monkeypatch.setattr(capacity, "POLL_SECONDS", 0.0)
    capacity.wait_for_hosts(lambda: 2, 2, "workers", seconds=0)
    assert capsys.readouterr().err == ""
    there = iter([0, 0, 1, 1, 3])
    capacity.wait_for_hosts(lambda: next(there), 2, "workers", seconds=60)
    assert capsys.readouterr().err.splitlines() == ["0 of 2 workers", "1 of 2 workers", "3 of 2 workers"]
    with pytest.raises(UnreachableError, match=r"only 1 of 2 workers joined within 0 s \(FLYTE_DDP_TIMEOUT\)"):
        capacity.wait_for_hosts(lambda: 1, 2, "workers", seconds=0)


def test_less_capacity_than_was_asked_for() -> None:
    assert capacity.clamp_ranks(3, 2, "there are 2 CPUs", 4) == 2
    with pytest.raises(UserError, match="num_ranks=3: there are 2 CPUs, and each rank needs one; lower num_ranks, or"):
        capacity.clamp_ranks(3, 2, "there are 2 CPUs", 4, exact=True)
    with pytest.raises(UserError, match="the cluster has no workers: too few for a single rank"):
        capacity.clamp_ranks(0, 0, "the cluster has no workers", 0)
