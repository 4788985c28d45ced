"""Choose a run's ranks, device, backend, gradient strategy, precision, memory order and threads for a machine.

Every ``auto`` of the hyperparameters is decided here, never by timings, which would make results unrepeatable.
"""

import math
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from flyte_ddp import catalog
from flyte_ddp.config import Hyperparameters, check_batch_size
from flyte_ddp.errors import UserError
from flyte_ddp.settings import REQUESTED_GPUS

MOST_CPU_RANKS = 4
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
WIDEST_FIRST = (*BF16_INSTRUCTIONS, "avx512_vnni", "avx512f", "avx2", "avx", "sve", "asimd")


class Bf16(IntEnum):
    """Whether training in bf16 is possible and faster on a device; the minimum over devices holds for all of them."""

    NONE = 0  # it would be emulated
    SLOWER = 1  # than fp32, or never measured
    FASTER = 2


# Vendor, family, instruction and result; the first row that matches a CPU counts. The comments have measured samples/s
# of the tutorial's network (channels-last, batches of 128, one thread if not stated otherwise) in fp32 and in bf16.
# `python -m benchmarks bf16` measures the present machine.
MEASURED = (
    ("GenuineIntel", "6", "amx_bf16", Bf16.FASTER),  # 6,275 to 10,875; on 2 threads 11,413 to 18,478
    ("GenuineIntel", "6", "avx512_bf16", Bf16.SLOWER),  # model 207 without AMX: 4,881 to 3,351
    ("AuthenticAMD", "25", "avx512_bf16", Bf16.FASTER),  # model 17: 1.48 times as fast, on a busy machine
    ("AuthenticAMD", "26", "avx512_bf16", Bf16.FASTER),  # model 2: 6,990 to 10,630
)


@dataclass(frozen=True)
class Cpu:
    """A CPU as /proc/cpuinfo describes it; fields that it does not have are empty."""

    vendor: str
    family: str
    model: str
    flags: frozenset[str]

    def __str__(self) -> str:
        """Return what decides how the CPU rounds: vendor, family, model and widest vector instructions, as text."""
        widest = next((flag for flag in WIDEST_FIRST if flag in self.flags), "")
        parts = {"": self.vendor or platform.machine(), "family": self.family, "model": self.model, "with": widest}
        return " ".join(f"{name} {value}" for name, value in parts.items() if value).lstrip()

    def bf16_support(self) -> Bf16:
        """Return whether bf16 is faster than fp32 in training the two small CNNs; SLOWER if that was never measured."""
        for vendor, family, flag, worth in MEASURED:
            if (vendor, family) == (self.vendor, self.family) and flag in self.flags:
                return worth
        return Bf16.SLOWER if self.flags.intersection(BF16_INSTRUCTIONS) else Bf16.NONE


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """Return the first CPU that /proc/cpuinfo describes on x86 and ARM; without that file all fields are empty."""
    first = cpuinfo.read_text().strip().partition("\n\n")[0] if cpuinfo.exists() else ""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    names = [("vendor_id", "CPU implementer"), ("cpu family", "CPU architecture"), ("model", "CPU part")]
    vendor, family, model, flags = (
        facts.get(x86) or facts.get(arm, "") for x86, arm in (*names, ("flags", "Features"))
    )
    return Cpu(vendor, family, model, frozenset(flags.split()))


@dataclass(frozen=True)
class Hardware:
    """What a run uses of the machines; equal on all ranks."""

    num_ranks: int
    device_type: str  # cuda or cpu
    backend: str  # nccl or gloo
    strategy: str  # ddp, hooks or shared_memory
    precision: str  # fp32, bf16 or fp64
    channels_last: bool
    threads: int  # for each rank


def count_cores() -> int:
    """Return how many CPU cores this process may use by its affinity mask and its cgroup's quota; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(allowed, read_cpu_quota())))


def read_cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the CPU quota of the cgroup (version 2 or 1) below ``root``, in cores; infinity if there is none."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError):
            quota, period = " ".join((root / name).read_text() for name in names).split()
            return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf


def count_gpus(devices: Path = Path("/dev")) -> int:
    """Return how many GPUs torch sees; imports torch only if ``devices`` has a GPU driver's file, such as nvidia0."""
    if not any((devices / name).exists() for name in ("nvidiactl", "nvidia0", "kfd", "dxg")):
        return 0
    import torch

    return torch.cuda.device_count()


def bf16_support(device_type: str) -> Bf16:
    """Return the Bf16 of this machine's devices of a type; "cuda" means the current GPU, and initialises CUDA here.

    CPUs by the table MEASURED; every GPU that computes in bf16 without emulation counts as FASTER.
    """
    if device_type == "cpu":
        return read_cpu().bf16_support()
    import torch

    return Bf16.FASTER if torch.cuda.is_bf16_supported(including_emulation=False) else Bf16.NONE


def detect_hardware(hp: Hyperparameters) -> Hardware:
    """Return the Hardware of a run whose ranks are all on this machine.

    Imports torch if there are GPUs; if ranks use them, initialises CUDA, so forks of this process can use no GPU.
    Raises UserError if the machine does not have what the hyperparameters need, if the batch has too few samples for
    the ranks, or if this is a pod that does not see the GPUs that were requested for it.
    """
    gpus = count_gpus()
    check_expected_gpus(gpus)
    device_type = choose_device_type(hp, gpus, "this process sees")
    num_ranks = hp.num_ranks or (gpus if device_type == "cuda" else min(count_cores(), MOST_CPU_RANKS, hp.batch_size))
    threads = max(1, count_cores() // num_ranks)
    return choose_hardware(hp, device_type, num_ranks, threads=threads, bf16=bf16_support(device_type))


def check_expected_gpus(visible: int) -> None:
    """Raise UserError if FLYTE_DDP_GPUS, the GPUs requested for this pod, is set and is not the number ``visible``."""
    expected = os.environ.get(REQUESTED_GPUS)
    if expected is not None and int(expected) != visible:
        raise UserError(
            f"{visible} GPU(s) visible but {expected} requested for this task ({REQUESTED_GPUS}={expected}): "
            "register with the resource profile that fits the nodes, or fix the node's GPU driver"
        )


def check_requested_resources(hp: Hyperparameters, nodes: int = 1, ranks: int = 0, capacity: int = 0) -> None:
    """Raise UserError if the GPUs that are requested for training pods do not fit ``hp``.

    Refuses nccl without GPUs, more ranks than GPUs (without any: than ``capacity``), ``num_ranks`` other than
    ``ranks``, a batch with fewer samples than ranks x accumulation steps, and a strategy that the devices do not allow.
    Assumes that the pods have bf16: only they can tell. Does nothing if FLYTE_DDP_GPUS is not set, as outside pods.

    Args:
        nodes: largest number of training pods.
        ranks: number of ranks that the engine starts; ``hp.num_ranks`` must be 0 or equal. 0: ``hp.num_ranks`` decides.
        capacity: largest number of ranks without GPUs; 0: no limit.
    """
    requested = os.environ.get(REQUESTED_GPUS)
    if requested is None:
        return
    gpus = nodes * int(requested)
    who = "the training pod requests" if nodes == 1 else f"the {nodes} training pods request"
    device_type = choose_device_type(hp, gpus, who, other_fix=", or register with another profile")
    if ranks and hp.num_ranks not in (0, ranks):
        raise UserError(
            f"num_ranks={hp.num_ranks}: {who} {ranks} worker(s) of Elastic, each a rank; set num_ranks to {ranks}, or "
            "0, or register with another number of nodes (FLYTE_DDP_NODES) or another profile"
        )
    if device_type == "cpu" and 0 < capacity < hp.num_ranks:
        raise UserError(
            f"num_ranks={hp.num_ranks}: {who} capacity for {capacity} rank(s) without GPUs; set num_ranks to at most "
            f"{capacity}, or 0, or register with more nodes (FLYTE_DDP_NODES) or a larger profile"
        )
    ranks = ranks or hp.num_ranks or (gpus if device_type == "cuda" else 1)
    # Only the training pods know whether they have bf16.
    choose_hardware(hp, device_type, ranks, threads=1, bf16=Bf16.FASTER)


def choose_device_type(hp: Hyperparameters, gpus: int, who_has: str, other_fix: str = "") -> str:
    """Return "cuda" if there are GPUs and ``hp.backend`` is not gloo, else "cpu".

    Raises UserError if nccl is asked for without GPUs, or each rank cannot have a GPU of its own. ``who_has`` is
    subject and verb of the error, such as "this process sees"; ``other_fix`` is more advice at its end.
    """
    if hp.backend == "nccl" and not gpus:
        raise UserError(f"backend='nccl': {who_has} no GPU; use backend='gloo' or 'auto'{other_fix}")
    device_type = "cuda" if gpus and hp.backend != "gloo" else "cpu"
    if device_type == "cuda" and hp.num_ranks > gpus:
        raise UserError(
            f"num_ranks={hp.num_ranks}: {who_has} {gpus} GPU(s) and each rank needs one; "
            f"set num_ranks to at most {gpus}, or 0 for all of them{other_fix}"
        )
    return device_type


def choose_hardware(hp: Hyperparameters, device_type: str, num_ranks: int, *, threads: int, bf16: Bf16) -> Hardware:
    """Return the Hardware of ``num_ranks`` ranks with ``threads`` CPU threads each; decide every ``auto`` of ``hp``.

    ``bf16`` is the support of the device that supports it least. Raises UserError if the batch has too few samples for
    the ranks, or the devices cannot do what ``hp`` asks for.
    """
    check_batch_size(hp, num_ranks)
    small = hp.model in catalog.SMALL_MODELS
    # A user's own model may rely on the usual order: `x.view(len(x), -1)` after a convolution fails with channels_last.
    faster_in_order = small or (device_type == "cuda" and hp.model in catalog.TORCHVISION_MODELS)
    precision = hp.precision
    if precision == "auto":
        precision = "bf16" if bf16 is Bf16.FASTER and (device_type == "cuda" or small) else "fp32"
    elif precision == "bf16" and bf16 is Bf16.NONE:
        raise UserError(
            f"precision='bf16': this {'GPU' if device_type == 'cuda' else 'CPU'} has no bf16 arithmetic; "
            "use precision='fp32' or 'auto'"
        )
    return Hardware(
        num_ranks=num_ranks,
        device_type=device_type,
        backend="nccl" if device_type == "cuda" else "gloo",
        strategy=choose_strategy(hp, device_type),
        precision=precision,
        channels_last=hp.channels_last == "on" or (hp.channels_last == "auto" and faster_in_order),
        threads=threads,
    )


def choose_strategy(hp: Hyperparameters, device_type: str) -> str:
    """Return the gradient strategy of ``hp``; for "auto" shared memory on CPUs under Linux, else ddp.

    Raises UserError if ``hp`` asks for shared memory, and the ranks are on GPUs or not on Linux.
    """
    possible = device_type == "cpu" and sys.platform == "linux"
    if hp.strategy == "shared_memory" and not possible:
        raise UserError(
            f"strategy='shared_memory': needs CPU ranks on Linux, these are on {device_type} and {sys.platform}; "
            "use strategy='ddp' or 'auto'"
        )
    return hp.strategy if hp.strategy != "auto" else "shared_memory" if possible else "ddp"
