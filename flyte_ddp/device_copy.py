"""Copy tensors to a device without waiting for it."""

import torch
from torch import Tensor


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor on the device, by page-locked memory without waiting; on a CPU the same tensor."""
    if device.type == "cpu":
        return values
    # A copy from ordinary memory would block the host in every batch until the device has finished all earlier work.
    # torch keeps page-locked memory until the device has read it.
    return values.pin_memory().to(device, non_blocking=True)
