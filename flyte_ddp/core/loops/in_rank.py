"""Calls a user-defined function in a rank, and delivers rank 0's return value."""

import itertools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, constants, distributed_c10d  # type: ignore[attr-defined]
from torch.utils._pytree import tree_map

from flyte_ddp.core.errors import UserError, print_to_stderr
from flyte_ddp.core.files import replace_file
from flyte_ddp.core.launch.supervise.rank import NO_LIMIT, Rank
from flyte_ddp.core.loops.call import RETURNED, Call
from flyte_ddp.core.loops.checkpoints import Checkpoints
from flyte_ddp.core.loops.current_rank import CurrentRank, set_current_rank
from flyte_ddp.core.loops.records import Records
from flyte_ddp.core.parallel.distributed import translate_collective_errors
from flyte_ddp.core.runs.metrics import FunctionStart

DONE, LEFT = "flyte-ddp done", "flyte-ddp left"  # in the ranks' common store
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def run_function(rank: Rank) -> None:
    """Call the user-defined function in this rank, and write rank 0's return value to ``returned.pickle``.

    All ranks must call this function. Waits for all ranks at the end, on rank 0 up to the time limit. Sets torchrun's
    environment variables during the call. Exceptions of the user-defined function pass through.

    Raises:
        RuntimeError: The user-defined function called ``sys.exit``.
        UserError: Rank 0's return value cannot be pickled or written.
    """
    call: Call = rank.work.arguments
    store = rank.open_store()
    with (
        set_torchrun_variables(rank, store.port),
        set_default_group_timeout(rank.work.settings.timeout),
        separate_group_stores(),
        provide_current_rank(rank, store) as current,
        destroy_process_group_at_end(rank),
    ):
        function = call.load()
        try:
            value = function()
        except SystemExit as error:
            raise RuntimeError(f"called sys.exit({error.code!r}); return, or raise an exception, instead") from error
        current._checkpoints.close()  # from now on a request to save does not wait for the user-defined function
        if rank.info.rank == 0:
            write_return_value(value, rank.work.output_folder / RETURNED)
            if current._records is not None:
                current._records.end()
        wait_until_all_have_ended(rank, store)


@contextmanager
def provide_current_rank(rank: Rank, store: Any) -> Iterator[CurrentRank]:
    """Make the CurrentRank of this rank, which :func:`current_rank` returns during the block, and yield this object.

    On rank 0, writes the run's start and restarts to metrics.jsonl. During the block, the launcher can request saves.
    At the end of the block, waits until the last save is written.
    """
    work, info, settings = rank.work, rank.info, rank.work.settings
    beside_writer = not work.sees_run_folder or work.world.hosts[info.rank] == work.world.hosts[0]
    checkpoints = Checkpoints(
        *(work.output_folder, work.identity, work.checkpoint, settings.checkpoint_seconds),
        link_name="" if beside_writer else f".rank-{info.rank}.tmp",
        announce=rank.announce_writing,
    )
    is_leader = info.rank == 0
    first = work.checkpoint.step if work.checkpoint else 0
    records = Records(work.output_folder, settings.progress, first) if is_leader else None
    device = torch.device("cuda", info.local_rank) if work.world.device_type == "cuda" else torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    current = CurrentRank(
        (info.rank, info.world_size, local_rank),
        device,
        work.output_folder,
        checkpoints=checkpoints,
        records=records,
        join=lambda: rank.join_by(PrefixStore(f"join {next(joins)}", store)),
        store=store if info.world_size > 1 else None,
    )
    joins = itertools.count()  # each group has its own part of the store, without addresses of earlier groups
    before = set_current_rank(current)
    try:
        if records is not None:
            records.write(make_start_record(rank, device))
            records.progress.print_note(f"ranks: {info.world_size}, nodes: {work.world.num_nodes}")
            rank.record_restarts(records.write)
        rank.offer_saving(checkpoints.save_last)
        yield current
    finally:
        set_current_rank(before)
        checkpoints.close()
        if records is not None:
            records.close()


def make_start_record(rank: Rank, device: torch.device) -> FunctionStart:
    """Return the start record for metrics.jsonl: function, arguments, ranks and device."""
    call: Call = rank.work.arguments
    found = rank.work.checkpoint
    is_changed = found is not None and found.identity != rank.work.identity
    return FunctionStart(
        resumed_after_step=found.step if found else 0,
        resumed_from_other_code=True if is_changed else None,
        function=call.name,
        hyperparameters=dict(call.shown),
        num_ranks=rank.info.world_size,
        num_nodes=rank.work.world.num_nodes,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        backend=rank.work.world.backend,
    )


@contextmanager
def destroy_process_group_at_end(rank: Rank) -> Iterator[None]:
    """Destroy, at the end of the block, the process group that the block has made, and restore ``sys.excepthook``.

    After an exception, destroys the group only if the rank runs in the launcher's process.
    """
    before, hook = dist.is_initialized(), sys.excepthook  # a group sets a hook, which prints the rank before each line
    failed = True
    try:
        yield
        failed = False
    finally:
        sys.excepthook = hook
        # A failed rank must report before ranks fail without its connections. On GPUs destroying may also hang.
        if dist.is_initialized() and not before and (not failed or rank.link is None):
            dist.destroy_process_group()


@contextmanager
def set_torchrun_variables(rank: Rank, port: int) -> Iterator[None]:
    """Set torchrun's environment variables for the block, with MASTER_PORT=``port``, and restore them afterwards.

    On CPUs also makes Accelerate use the CPU. Resets Accelerate after the block, unless it was in use before.
    """
    info, world = rank.info, rank.work.world
    on_cpu = world.device_type == "cpu"
    # A rank that sees one GPU, as on Ray, counts as a node, because Lightning looks for LOCAL_WORLD_SIZE GPUs.
    sees_one = not on_cpu and torch.cuda.device_count() == 1
    hosts = tuple(map(str, range(info.world_size))) if sees_one else world.hosts
    here = hosts[info.rank]
    variables = {
        "RANK": info.rank,
        "WORLD_SIZE": info.world_size,
        "LOCAL_RANK": hosts[: info.rank].count(here) if on_cpu else info.local_rank,
        "LOCAL_WORLD_SIZE": hosts.count(here),
        "GROUP_RANK": [*dict.fromkeys(hosts)].index(here),
        "NODE_RANK": [*dict.fromkeys(hosts)].index(here),
        "GROUP_WORLD_SIZE": len({*hosts}),
        "MASTER_ADDR": world.hosts[0],
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "flyte-ddp",  # shows Lightning and other libraries that the ranks are started for them
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "OMP_NUM_THREADS": world.threads,  # without it Lightning and Accelerate set torch's threads anew
    }
    if on_cpu:
        variables["ACCELERATE_USE_CPU"] = "true"  # without it each rank trains alone, unless the script sets cpu=True
    before = {name: os.environ.get(name) for name in (*variables, AGENT_STORE)}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.pop(AGENT_STORE, None)  # with it torch would wait in vain for a store at another port
    try:
        with reset_accelerator_at_end():
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def separate_group_stores() -> Iterator[None]:
    """Give each process group that the block creates by ``env://`` separate keys in the store.

    Patches torch for the block. Otherwise a second group would find the addresses of a first group that was destroyed.
    """
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers  # ``rendezvous`` is a function, too
    meet, numbers = handlers["env"], itertools.count()

    def meet_apart(*args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        for store, rank, world_size in meet(*args, **kwargs):
            yield PrefixStore(f"group {next(numbers)}", store), rank, world_size

    handlers["env"] = meet_apart
    try:
        yield
    finally:
        handlers["env"] = meet


@contextmanager
def reset_accelerator_at_end() -> Iterator[None]:
    """Reset the state of the library Accelerate after the block, unless Accelerate was in use before.

    Otherwise Accelerate would keep the ranks of its first use in a process.
    """
    module = "accelerate.state"
    knew = module in sys.modules and bool(sys.modules[module].PartialState._shared_state)
    try:
        yield
    finally:
        if module in sys.modules and not knew:
            sys.modules[module].AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def set_default_group_timeout(seconds: float) -> Iterator[None]:
    """Set torch's default timeout of new process groups for the block."""
    # Lightning reads its default from `constants` when Lightning is imported.
    with ExitStack() as at_end:
        for module in (distributed_c10d, constants):
            for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
                at_end.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, timedelta(seconds=seconds))
        yield


def write_return_value(value: Any, path: Path) -> None:
    """Pickle a function's return value to the file ``path``, with tensors on the CPU.

    Raises:
        UserError: The value cannot be pickled, or the file cannot be written.
    """
    try:
        content = cloudpickle.dumps(tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, value))
    except Exception as error:  # an object's own code may raise anything
        raise UserError(
            f"rank 0's return value cannot be pickled ({type(error).__name__}: {error}); return numbers, strings, "
            "tensors, and lists and dicts of them, or write files into current_rank().folder"
        ) from error
    with replace_file(path, durable=False) as file:
        file.write(content)


def wait_until_all_have_ended(rank: Rank, store: Any) -> None:
    """Wait until all ranks have called this function. Call this function once for each ``store``.

    Rank 0 returns last, because rank 0 serves the store. Rank 0 waits up to the time limit for the other ranks' calls,
    and again for their returns. Other ranks wait for rank 0 without a limit. After the time limit, rank 1 prints that
    rank 0 has not returned.

    Raises:
        CollectiveError: On rank 0, the time limit is over. On any rank, the connection to the store is lost.
    """
    others, timeout = range(1, rank.info.world_size), rank.work.settings.timeout
    if not others:
        return
    with translate_collective_errors():
        if rank.info.rank == 0:
            limit = timedelta(seconds=timeout)
            store.wait([f"{DONE} {other}" for other in others], limit)
            store.set(DONE, "")
            store.wait([f"{LEFT} {other}" for other in others], limit)
        else:
            store.set(f"{DONE} {rank.info.rank}", "")
            waiting = f"rank 0 has not returned {timeout:g} s after rank 1; rank 1 waits without a limit"
            notice = threading.Timer(timeout, print_to_stderr, [waiting])
            notice.daemon = True
            if rank.info.rank == 1:
                notice.start()
            try:
                store.wait([DONE], NO_LIMIT)  # rank 0 may still write results
            finally:
                notice.cancel()
            store.set(f"{LEFT} {rank.info.rank}", "")
