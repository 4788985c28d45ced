"""A rank as seen by the function of its work, and the steps around the function under any launcher."""

import faulthandler
import os
import pkgutil
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from flyte_ddp.core import results
from flyte_ddp.core.launch.supervise.link import Link, OfferSaving, RankInfo
from flyte_ddp.core.launch.supervise.messages import Notice, StoreAddress
from flyte_ddp.core.launch.supervise.network import LOOPBACK
from flyte_ddp.core.machine import waiting
from flyte_ddp.core.machine.process import M_MMAP_MAX, M_TRIM_THRESHOLD, set_malloc_option
from flyte_ddp.core.order.random_state import keep_random_state
from flyte_ddp.core.parallel import distributed
from flyte_ddp.core.parallel.distributed import (
    make_waits_raise_collective_errors,
    translate_collective_errors,
    translate_device_errors,
)
from flyte_ddp.core.parallel.hang_watch import in_collective, start_hang_watch
from flyte_ddp.core.runs.metrics import RestartRecord
from flyte_ddp.core.runs.work import Work

FINISHED = "flyte-ddp finished"  # in the ranks' common store
NO_LIMIT = timedelta(days=365)


class Rank:
    """A rank of a run, as the work's function sees it: place, work and methods.

    ``link`` leads to the launcher. For a single rank in the launcher's process, ``link`` is None.
    """

    def __init__(self, work: Work, info: RankInfo, offer_saving: OfferSaving, link: Link | None = None) -> None:
        self.work, self.info, self.offer_saving, self.link = work, info, offer_saving, link
        self.store: Store | None = None  # the ranks' common store, which only join() sets

    def record_restarts(self, write: Callable[[RestartRecord], None]) -> None:
        """Pass to ``write`` a record of each restart that happened after the loaded checkpoint was saved.

        If a restart happened, also reports to the launcher that the work resumes. Call this method on rank 0 when the
        checkpoint is loaded. The last record has the seconds since its failure.
        """
        restarts = self.work.restarts
        for restart in restarts:
            seconds = max(0.0, time.time() - restart.time) if restart is restarts[-1] else None
            write(RestartRecord(step=restart.step, reason=restart.reason, seconds=seconds))
        if restarts and self.link is not None:
            self.link.send(Notice.RESUMED)

    def announce_writing(self, begins: bool) -> None:
        """Report to the launcher that this rank begins, or ends, writing a checkpoint.

        The launcher then waits for the file.
        """
        if self.link is not None:
            self.link.send(Notice.WRITING if begins else Notice.WRITTEN)

    def open_store(self) -> TCPStore:
        """Open and return the ranks' common store, also for torch's ``env://`` groups.

        Rank 0 serves the store at a free port, which the launcher passes on. Other ranks wait for this address.

        Raises:
            CollectiveTimeoutError: The address has not come within the setting ``timeout``.
            CollectiveError: The connection to the store failed.
        """
        info, link, timeout = self.info, self.link, timedelta(seconds=self.work.settings.timeout)
        with translate_collective_errors():
            if info.rank != 0 and link is not None:
                found = link.receive_address(timeout.total_seconds())
                return TCPStore(found.host, found.port, info.world_size, False, timeout, wait_for_workers=False)
            # Listen only where other ranks connect, because the store has no password.
            host = (self.work.world.hosts or (LOOPBACK,))[0]
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN) as server:
                port = server.getsockname()[1]
                store = TCPStore(
                    host,
                    port,  # not 0, because torch keeps ports of closed stores, and groups fail if a port recurs
                    info.world_size,
                    is_master=True,
                    timeout=timeout,
                    wait_for_workers=False,
                    multi_tenant=True,
                    master_listen_fd=server.detach(),
                )
            if link is not None:
                link.send(StoreAddress(host, port))
            return store

    def join_by(self, store: Store) -> None:
        """Join torch's process group by this store, and wait for all ranks.

        On a GPU, also starts a thread that reports a collective operation that takes too long to the launcher. NCCL
        connects the ranks without a time limit.
        """
        work, info = self.work, self.info
        on_gpu = work.world.device_type == "cuda"
        if on_gpu:
            report_error = self.link.report_error if self.link else lambda _: None
            start_hang_watch(work.settings.timeout, report_error, torch.cuda.Event)
        with translate_collective_errors(), in_collective():  # NCCL connects the ranks here, without a time limit
            dist.init_process_group(
                work.world.backend,
                store=store,
                rank=info.rank,
                world_size=info.world_size,
                timeout=distributed.choose_group_timeout(work.settings.timeout, on_gpu=on_gpu),
                device_id=torch.device("cuda", info.local_rank) if on_gpu else None,
            )

    def join(self) -> None:
        """Join torch's process group, and set ``store``.

        All ranks must call this method, which waits for all ranks. With a single rank, does nothing.
        """
        if self.info.world_size > 1:
            if self.info.store:  # a TCPStore looks up names of hosts, and would wait for a resolver that is down
                self.store = FileStore(self.info.store, self.info.world_size)
                self.store.set_timeout(timedelta(seconds=self.work.settings.timeout))
            else:
                self.store = self.open_store()
            self.join_by(self.store)

    def leave(self) -> None:
        """Wait for the other ranks, and leave the process group.

        If no group was joined, does nothing. Other ranks wait without a limit until rank 0 leaves. Then all ranks wait
        for each other.
        """
        if self.store is None:
            return
        # No rank may close connections that another rank needs, and rank 0 may still write results.
        if self.info.rank == 0:
            self.store.set(FINISHED, "")
        else:
            with translate_collective_errors():
                self.store.wait([FINISHED], NO_LIMIT)
        distributed.wait_for_all_ranks()
        dist.destroy_process_group()


def run_rank(work: Work, info: RankInfo, offer_saving: OfferSaving, link: Link | None = None) -> None:
    """Run the work's function in this rank, and then leave the process group.

    All ranks must call this function, which waits for all ranks at the end. Changes process-wide settings, such as
    torch's threads, the current GPU, the time limits and the use of freed memory.

    Args:
        work: The work, prepared for this host.
        info: The place of the rank.
        offer_saving: Called with the function that saves a checkpoint.
        link: The connection to the launcher (None: the launcher is in this process).
    """
    faulthandler.enable()
    torch.set_num_threads(work.world.threads)
    waiting.limit_seconds = work.settings.timeout
    if info.world_size > 1:
        distributed.timeout_seconds = work.settings.timeout
        make_waits_raise_collective_errors()
    rank = Rank(work, info, offer_saving, link)
    with translate_device_errors(f"{work.world.device_type}:{info.local_rank}"):
        if work.world.device_type == "cpu":
            configure_malloc(retain=True)
        else:
            torch.cuda.set_device(info.local_rank)
        deliver: results.Deliver = results.ResultWriter(work.output_folder).write
        if link is not None and not work.sees_run_folder:
            deliver = results.send_results_in_pieces(link.send)
        with results.redirect_results(deliver, info.rank), warnings.catch_warnings():
            pkgutil.resolve_name(work.function)(rank)
        rank.leave()


def configure_malloc(*, retain: bool) -> None:
    """Make glibc retain freed memory in this process for later steps, or restore glibc's defaults.

    By default glibc returns freed memory to the kernel. Then each step has page faults, which are slow in virtual
    machines. After the defaults are restored, glibc's threshold for mappings no longer adapts itself until the process
    ends. Without glibc, does nothing.
    """
    set_malloc_option(M_MMAP_MAX, 0 if retain else 65536)  # number of mappings
    set_malloc_option(M_TRIM_THRESHOLD, 2**31 - 1 if retain else 128 * 1024)  # bytes


@contextmanager
def restore_process_settings() -> Iterator[None]:
    """Restore after the block the process-wide settings that run_rank and the work's function change.

    The settings are torch's threads and deterministic algorithms, CUBLAS_WORKSPACE_CONFIG, and the random states of
    Python, NumPy and torch. After the block, glibc returns freed memory to the kernel again.
    """
    threads, cublas = torch.get_num_threads(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        with keep_random_state(), torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
            yield
    finally:
        torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)
        if cublas is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        configure_malloc(retain=False)
