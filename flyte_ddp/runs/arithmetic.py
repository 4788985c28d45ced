"""What decides how a run rounds: number of ranks, devices, precision. Imports torch only to look at devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyte_ddp.cpu import read_cpu
from flyte_ddp.hardware import Hardware

if TYPE_CHECKING:
    import torch

FIELD_NAMES = {"num_ranks": "ranks", "threads": "threads of each rank", "channels_last": "channels last"}  # for texts


@dataclass(frozen=True)
class Arithmetic:
    """The settings that decide rounding: equal runs with equal values get the same bits."""

    num_ranks: int
    devices: str  # of all ranks, by rank; one name if all are equal
    precision: str
    threads: int
    channels_last: str  # "on" or "off"
    strategy: str  # of gradients; empty for one rank

    def describe_changes(self, before: Iterable[Arithmetic]) -> str:
        """Return the values that differ from those of ``before`` as text, such as "ranks 2, now 4"; "" if none does."""
        words = []
        for name, now in vars(self).items():
            earlier = [*dict.fromkeys(getattr(one, name) for one in before)]
            if "" not in (now, *earlier) and earlier != [now]:
                words.append(f"{FIELD_NAMES.get(name, name)} {' and '.join(map(str, earlier))}, now {now}")
        return "; ".join(words)


def detect_arithmetic(hardware: Hardware, device: torch.device) -> Arithmetic:
    """Return the rounding settings of this run. All ranks must call it: it collects their devices. Imports torch."""
    import torch

    from flyte_ddp.parallel.distributed import gather_objects

    own = torch.cuda.get_device_name(device) if device.type == "cuda" else str(read_cpu())
    devices = gather_objects(own)
    return Arithmetic(
        num_ranks=len(devices),
        devices=", ".join(devices if len(set(devices)) > 1 else devices[:1]),
        precision=hardware.precision,
        threads=hardware.threads,
        channels_last="on" if hardware.channels_last else "off",
        strategy=hardware.strategy if len(devices) > 1 else "",
    )
