"""Choice of a training's backend, gradient strategy, precision and memory order.

This module replaces every ``auto`` of the hyperparameters. No choice depends on timings, because timings would make
results unrepeatable. A value that the ranks cannot have raises UserError.
"""

import sys
from dataclasses import dataclass

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine.resources import Bf16, World


@dataclass(frozen=True)
class HardwareSettings:
    """What the user and the model ask of the hardware."""

    strategy: str  # ddp, hooks, shared_memory or auto
    precision: str  # fp32, bf16, fp64 or auto
    channels_last: str  # on, off or auto
    batch_size: int
    accumulation_steps: int
    bf16_devices: tuple[str, ...] = ("cuda",)  # devices on which precision="auto" chooses bf16 if it is faster there
    channels_last_devices: tuple[str, ...] = ()  # devices on which channels_last="auto" chooses channels-last


@dataclass(frozen=True)
class Hardware(World):
    """The ranks of a run and their arithmetic, equal on all ranks."""

    strategy: str = "ddp"  # or hooks, shared_memory
    precision: str = "fp32"  # or bf16, fp64
    channels_last: bool = False


def choose_hardware(wanted: HardwareSettings, world: World, bf16: Bf16) -> Hardware:
    """Replace each ``auto`` of the hyperparameters by a value that fits the ranks' machines, such as a precision.

    ``bf16`` is the lowest support of bf16 among the devices.

    Raises:
        UserError: The batch size is too small for the ranks, a device has no bf16, or the ranks cannot use shared
            memory.
    """
    device_type = world.device_type
    check_batch_size(wanted.batch_size, wanted.accumulation_steps, world.num_ranks)
    precision = wanted.precision
    if precision == "auto":
        precision = "bf16" if bf16 is Bf16.FASTER and device_type in wanted.bf16_devices else "fp32"
    elif precision == "bf16" and bf16 is Bf16.NONE:
        raise UserError(
            f"precision='bf16': this {'GPU' if device_type == 'cuda' else 'CPU'} does not support bf16; use "
            "precision='fp32' or 'auto'"
        )
    by_default = wanted.channels_last == "auto" and device_type in wanted.channels_last_devices
    channels_last = wanted.channels_last == "on" or by_default
    strategy = choose_gradient_averaging(wanted.strategy, world)
    return Hardware(**vars(world), strategy=strategy, precision=precision, channels_last=channels_last)


def check_batch_size(batch_size: int, accumulation_steps: int, num_ranks: int) -> None:
    """Raise UserError if ``batch_size`` is less than the number of ranks times ``accumulation_steps``."""
    if batch_size < num_ranks * accumulation_steps:
        raise UserError(
            f"batch_size={batch_size}: must be at least ranks x accumulation_steps = "
            f"{num_ranks} x {accumulation_steps}; raise batch_size, or lower num_ranks or accumulation_steps"
        )


def choose_gradient_averaging(wanted: str, world: World) -> str:
    """Return the strategy that averages gradients, for the hyperparameter ``wanted``.

    For "auto", returns "shared_memory" if all ranks are on CPUs of one Linux host, else "ddp".

    Raises:
        UserError: ``wanted`` is "shared_memory", but the ranks cannot use shared memory.
    """
    possible = world.device_type == "cpu" and sys.platform == "linux"
    if wanted == "shared_memory" and not possible:
        raise UserError(
            f"strategy='shared_memory': requires CPU ranks on Linux, but the ranks are on {world.device_type} and "
            f"{sys.platform}; use strategy='ddp' or 'auto'"
        )
    if wanted == "shared_memory" and world.num_nodes > 1:
        raise UserError(
            "strategy='shared_memory': requires all ranks on one host, but the ranks are on "
            f"{', '.join(sorted({*world.hosts}))}; use strategy='ddp' or 'auto'"
        )
    return wanted if wanted != "auto" else "shared_memory" if possible and world.num_nodes == 1 else "ddp"
