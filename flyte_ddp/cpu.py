"""Vendor, family, model and instructions of this machine's CPU, and whether bf16 is faster on it."""

import platform
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

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
