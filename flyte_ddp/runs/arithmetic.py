"""What decides how a run rounds: number of ranks, devices, precision. Imports torch only to look at devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyte_ddp.cpu import read_cpu
from flyte_ddp.hardware import Hardware

if TYPE_CHECKING:
    import torch

LABELS = {"num_ranks": "ranks", "threads": "threads of each rank", "channels_last": "channels last"}


@dataclass(frozen=True)
class Arithmetic:
    """Two runs that are otherwise the same get the same bits if this is the same, too."""

    num_ranks: int
    devices: str  # of all ranks, in their order
    precision: str
    threads: int
    channels_last: str  # on or off
    strategy: str  # empty for one rank, which has none

    def changes(self, before: Iterable[Arithmetic]) -> str:
        """Return in words what was different; empty if nothing was."""
        words = []
        for name, now in vars(self).items():
            earlier = [*dict.fromkeys(getattr(one, name) for one in before)]
            if "" not in (now, *earlier) and earlier != [now]:
                words.append(f"{LABELS.get(name, name)} {' and '.join(map(str, earlier))}, now {now}")
        return "; ".join(words)


def of_this_run(hardware: Hardware, device: torch.device) -> Arithmetic:
    """Return what this run trains in. A collective: all ranks must call it."""
    import torch

    from flyte_ddp.parallel.distributed import objects_of_all_ranks

    own = torch.cuda.get_device_name(device) if device.type == "cuda" else str(read_cpu())
    devices = objects_of_all_ranks(own)
    return Arithmetic(
        num_ranks=len(devices),
        devices=", ".join(devices if len(set(devices)) > 1 else devices[:1]),
        precision=hardware.precision,
        threads=hardware.threads,
        channels_last="on" if hardware.channels_last else "off",
        strategy=hardware.strategy if len(devices) > 1 else "",
    )
