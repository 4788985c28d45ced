"""Choice of a training's backend, gradient strategy, precision and memory order.

This module replaces every ``auto`` of the hyperparameters. No choice depends on timings, because timings would make
results unrepeatable. A value that the ranks cannot have raises UserError.
"""

import os
import sys
from dataclasses import dataclass

from flyte_ddp import catalog
from flyte_ddp.config import Hyperparameters, check_batch_size
from flyte_ddp.errors import UserError
from flyte_ddp.machine.resources import Bf16, Request, World, bf16_support, choose_local_device_type, detect_world
from flyte_ddp.settings import REQUESTED_GPUS


@dataclass(frozen=True)
class Hardware(World):
    """The ranks of a run and their arithmetic, equal on all ranks."""

    strategy: str = "ddp"  # or hooks, shared_memory
    precision: str = "fp32"  # or bf16, fp64
    channels_last: bool = False


def detect_hardware(hp: Hyperparameters) -> Hardware:
    """Return the Hardware of a run whose ranks are all on this machine.

    Raises:
        UserError: The machine lacks the GPUs or the bf16 that ``hp`` requires, or ``hp`` does not fit the ranks.
    """
    world = detect_world(request_ranks(hp))
    return choose_hardware(hp, world, bf16_support(world.device_type))


def request_ranks(hp: Hyperparameters) -> Request:
    return Request(hp.num_ranks, hp.backend, most=hp.batch_size)


def check_requested_resources(hp: Hyperparameters, nodes: int = 1, ranks: int = 0, capacity: int = 0) -> None:
    """Raise UserError if the GPUs requested for training pods (FLYTE_DDP_GPUS) do not fit ``hp``.

    Also raises UserError if the number of ranks, the batch size or the strategy does not fit. Does nothing if
    FLYTE_DDP_GPUS is not set.

    Args:
        hp: The hyperparameters.
        nodes: The largest number of training pods.
        ranks: The number of ranks that the engine starts (0: decided by ``hp``).
        capacity: The largest number of ranks without GPUs (0: no limit).
    """
    requested = os.environ.get(REQUESTED_GPUS)
    if requested is None:
        return
    gpus = nodes * int(requested)
    who = "the training pod requests" if nodes == 1 else f"the {nodes} training pods request"
    device_type = choose_local_device_type(request_ranks(hp), gpus, who, ", or register with another profile")
    if ranks and hp.num_ranks not in (0, ranks):
        raise UserError(
            f"num_ranks={hp.num_ranks}: {who} {ranks} Elastic worker(s), each of which is a rank; set num_ranks to "
            f"{ranks}, or 0, or register with another number of nodes (FLYTE_DDP_NODES) or another profile"
        )
    if device_type == "cpu" and 0 < capacity < hp.num_ranks:
        raise UserError(
            f"num_ranks={hp.num_ranks}: {who} capacity for {capacity} rank(s) without GPUs; set num_ranks to at most "
            f"{capacity}, or 0, or register with more nodes (FLYTE_DDP_NODES) or a larger profile"
        )
    ranks = ranks or hp.num_ranks or (gpus if device_type == "cuda" else 1)
    # Only a training pod can detect bf16, so this check assumes it.
    choose_hardware(hp, World(ranks, device_type), Bf16.FASTER)


def choose_hardware(hp: Hyperparameters, world: World, bf16: Bf16) -> Hardware:
    """Return the Hardware of a run on the ranks of ``world``, without any ``auto``.

    ``bf16`` is the lowest support among the devices.

    Raises:
        UserError: The batch size is too small for the ranks, a device has no bf16, or the ranks cannot use shared
            memory.
    """
    device_type = world.device_type
    check_batch_size(hp.batch_size, hp.accumulation_steps, world.num_ranks)
    small = hp.model in catalog.SMALL_MODELS
    # A user-defined model may need the usual order: `x.view(len(x), -1)` after a convolution fails with channels_last.
    is_channels_last_faster = small or (device_type == "cuda" and hp.model in catalog.TORCHVISION_MODELS)
    precision = hp.precision
    if precision == "auto":
        precision = "bf16" if bf16 is Bf16.FASTER and (device_type == "cuda" or small) else "fp32"
    elif precision == "bf16" and bf16 is Bf16.NONE:
        raise UserError(
            f"precision='bf16': this {'GPU' if device_type == 'cuda' else 'CPU'} does not support bf16; use "
            "precision='fp32' or 'auto'"
        )
    channels_last = hp.channels_last == "on" or (hp.channels_last == "auto" and is_channels_last_faster)
    strategy = choose_strategy(hp, world)
    return Hardware(**vars(world), strategy=strategy, precision=precision, channels_last=channels_last)


def choose_strategy(hp: Hyperparameters, world: World) -> str:
    """Return the gradient strategy of ``hp``.

    For "auto", returns shared memory if all ranks are on CPUs of one Linux host, else ddp.

    Raises:
        UserError: The ranks cannot use shared memory.
    """
    possible = world.device_type == "cpu" and sys.platform == "linux"
    if hp.strategy == "shared_memory" and not possible:
        raise UserError(
            f"strategy='shared_memory': requires CPU ranks on Linux, but the ranks are on {world.device_type} and "
            f"{sys.platform}; use strategy='ddp' or 'auto'"
        )
    if hp.strategy == "shared_memory" and world.num_nodes > 1:
        raise UserError(
            "strategy='shared_memory': requires all ranks on one host, but the ranks are on "
            f"{', '.join(sorted({*world.hosts}))}; use strategy='ddp' or 'auto'"
        )
    return hp.strategy if hp.strategy != "auto" else "shared_memory" if possible and world.num_nodes == 1 else "ddp"
