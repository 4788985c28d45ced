"""Copies from the host to a device that the host does not wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on the device; for a CPU the tensor itself.

    A copy of ordinary memory waits until the device has done all that it was given before: in every batch the host
    would lose its lead. This one goes through page-locked memory, which torch keeps until it is copied.
    """
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)
