"""Cores, GPUs and bf16 of this machine, and its capacity for ranks. Knows no hyperparameters."""

import math
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.settings import REQUESTED_GPUS

MOST_CPU_RANKS = 4
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
WIDEST_FIRST = (*BF16_INSTRUCTIONS, "avx512_vnni", "avx512f", "avx2", "avx", "sve", "asimd")


class Bf16(IntEnum):
    """Whether training in bf16 is possible and faster on a device.

    The minimum over devices holds for all devices.
    """

    NONE = 0  # bf16 would be emulated
    SLOWER = 1  # than fp32, or never measured
    FASTER = 2


# Vendor, family, instruction and result; the first row that matches a CPU counts. The comments have measured samples/s
# of the tutorial's network (channels-last, batches of 128, one thread if not stated otherwise) in fp32 and in bf16.
# `git show 49b6f202:benchmarks/bf16.py` is the program that measured them.
MEASURED = (
    ("GenuineIntel", "6", "amx_bf16", Bf16.FASTER),  # 6,275 to 10,875; on 2 threads 11,413 to 18,478
    ("GenuineIntel", "6", "avx512_bf16", Bf16.SLOWER),  # model 207 without AMX: 4,881 to 3,351
    ("AuthenticAMD", "25", "avx512_bf16", Bf16.FASTER),  # model 17: 1.48 times as fast, on a busy machine
    ("AuthenticAMD", "26", "avx512_bf16", Bf16.FASTER),  # model 2: 6,990 to 10,630
)


@dataclass(frozen=True)
class Cpu:
    """A CPU as described by /proc/cpuinfo. Missing fields are empty."""

    vendor: str
    family: str
    model: str
    flags: frozenset[str]

    def __str__(self) -> str:
        """Return the facts that determine rounding: vendor, family, model and widest vector instructions."""
        widest = next((flag for flag in WIDEST_FIRST if flag in self.flags), "")
        parts = {"": self.vendor or platform.machine(), "family": self.family, "model": self.model, "with": widest}
        return " ".join(f"{name} {value}" for name, value in parts.items() if value).lstrip()

    def look_up_bf16_speed(self) -> Bf16:
        """Return whether bf16 is faster than fp32 on this CPU, by the table MEASURED of vendors and families.

        If the table lacks the CPU, returns SLOWER for a CPU with AMX or AVX-512 instructions for bf16, else NONE. ARM
        is not in the table.
        """
        for vendor, family, flag, worth in MEASURED:
            if (vendor, family) == (self.vendor, self.family) and flag in self.flags:
                return worth
        return Bf16.SLOWER if self.flags.intersection(BF16_INSTRUCTIONS) else Bf16.NONE


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """Return the first CPU that /proc/cpuinfo describes, on x86 and ARM.

    If the file does not exist, all fields are empty.
    """
    first = cpuinfo.read_text().strip().partition("\n\n")[0] if cpuinfo.exists() else ""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    names = [("vendor_id", "CPU implementer"), ("cpu family", "CPU architecture"), ("model", "CPU part")]
    vendor, family, model, flags = (
        facts.get(x86) or facts.get(arm, "") for x86, arm in (*names, ("flags", "Features"))
    )
    return Cpu(vendor, family, model, frozenset(flags.split()))


@dataclass(frozen=True)
class Request:
    """The ranks that a run requests from a machine or a cluster."""

    num_ranks: int = 0  # 0: as many as there is capacity for
    backend: str = "auto"  # gloo: CPUs; nccl: GPUs; auto: GPUs if there are any
    most: int = sys.maxsize  # ranks on CPUs, if num_ranks is 0
    exact: bool = False  # whether fewer ranks than num_ranks are rejected
    threads: int = 0  # CPU threads for each rank; 0: its share of the cores


@dataclass(frozen=True)
class World:
    """The ranks of a run and their resources, equal on all ranks."""

    num_ranks: int
    device_type: str = "cpu"  # or cuda: a GPU for each rank
    threads: int = 1  # CPU threads for each rank
    hosts: tuple[str, ...] = ()  # addresses at which other ranks reach a rank's host, by rank; set by the launcher

    @property
    def backend(self) -> str:
        return "nccl" if self.device_type == "cuda" else "gloo"

    @property
    def num_nodes(self) -> int:
        return max(1, len({*self.hosts}))


def count_cores() -> int:
    """Return how many CPU cores this process may use, at least 1.

    The number respects the affinity mask and the cgroup's quota.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(allowed, read_cpu_quota())))


def read_cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the CPU quota of the cgroup (version 2 or 1) below ``root``, in cores.

    Returns infinity without a quota.
    """
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError):
            quota, period = " ".join((root / name).read_text() for name in names).split()
            return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf


def count_gpus(devices: Path = Path("/dev")) -> int:
    """Return how many GPUs torch sees.

    Imports torch only if ``devices`` has a GPU driver's file, and otherwise returns 0.
    """
    if not any((devices / name).exists() for name in ("nvidiactl", "nvidia0", "kfd", "dxg")):
        return 0
    import torch

    return torch.cuda.device_count()


def detect_bf16_support(device_type: str) -> Bf16:
    """Return the Bf16 of the CPU or of the current GPU. For a GPU initialises CUDA."""
    if device_type == "cpu":
        return read_cpu().look_up_bf16_speed()
    import torch

    return Bf16.FASTER if torch.cuda.is_bf16_supported(including_emulation=False) else Bf16.NONE


def detect_world(request: Request) -> World:
    """Choose the ranks of a run on this machine: how many, on GPUs or CPUs, and with how many threads.

    For ``num_ranks`` 0, chooses a rank for each GPU or, on CPUs, for each core, but at most 4 and at most
    ``request.most``. Each rank has an equal share of the cores as threads.

    Raises:
        UserError: ``backend`` is nccl and the machine has no GPU, or the machine has fewer GPUs than ranks.
        UserError: The machine has another number of GPUs than FLYTE_DDP_GPUS.
    """
    gpus = count_gpus()
    check_expected_gpus(gpus)
    device_type = choose_local_device_type(request, gpus, "this process sees")
    most = gpus if device_type == "cuda" else min(count_cores(), MOST_CPU_RANKS, request.most)
    num_ranks = request.num_ranks or most
    return World(num_ranks, device_type, max(1, count_cores() // num_ranks))


def check_expected_gpus(visible: int) -> None:
    """Raise UserError if the number of visible GPUs is not FLYTE_DDP_GPUS.

    FLYTE_DDP_GPUS is the number of GPUs requested for this pod. If the variable is not set, does nothing.
    """
    expected = os.environ.get(REQUESTED_GPUS)
    if expected is not None and int(expected) != visible:
        raise UserError(
            f"{visible} GPU(s) visible but {expected} requested for this task ({REQUESTED_GPUS}={expected}): "
            "register with the resource profile that fits the nodes, or fix the node's GPU driver"
        )


def choose_device_type(backend: str, has_gpus: bool, lack: str, other_fix: str = "") -> str:
    """Return "cuda" if GPUs exist and ``backend`` is not gloo, else "cpu".

    Args:
        backend: "auto", "gloo" or "nccl".
        has_gpus: Whether GPUs exist.
        lack: The reason in the error, such as "the Ray cluster has no GPU".
        other_fix: A further fix at the end of the error.

    Raises:
        UserError: ``backend`` is nccl, and no GPU exists.
    """
    if backend == "nccl" and not has_gpus:
        raise UserError(f"backend='nccl': {lack}; use backend='gloo' or 'auto'{other_fix}")
    return "cuda" if has_gpus and backend != "gloo" else "cpu"


def choose_local_device_type(request: Request, gpus: int, who_has: str, other_fix: str = "") -> str:
    """Return "cuda" or "cpu" for a request on a machine with ``gpus`` GPUs, a GPU for each rank.

    ``who_has`` is a part of the error, such as "this process sees". ``other_fix`` is a further fix in the error.

    Raises:
        UserError: ``backend`` is nccl and no GPU exists, or fewer GPUs than ranks exist.
    """
    device_type = choose_device_type(request.backend, gpus > 0, f"{who_has} no GPU", other_fix)
    if device_type == "cuda" and request.num_ranks > gpus:
        raise UserError(
            f"num_ranks={request.num_ranks}: {who_has} {gpus} GPU(s) and each rank needs one; "
            f"set num_ranks to at most {gpus}, or 0 for all of them{other_fix}"
        )
    return device_type
