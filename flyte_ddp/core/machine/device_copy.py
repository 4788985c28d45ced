"""Copies of tensors to a device without waiting, and of whole states to the CPU."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device through page-locked memory, without waiting for the copy.

    If the device is a CPU, returns the same tensor.
    """
    if device.type == "cpu":
        return values
    # A copy from ordinary memory would block the host in every batch until the device has finished all earlier work.
    # torch keeps page-locked memory until the device has read it.
    return values.pin_memory().to(device, non_blocking=True)


def copy_to_cpu(value: Any) -> Any:
    """Return a deep copy of a value, with all tensors detached and on the CPU. Waits for the device.

    A state_dict keeps the attribute ``_metadata``.
    """
    return map_state_leaves(value, lambda leaf: leaf.detach().to("cpu", copy=True), copy.deepcopy)


def map_state_leaves(value: Any, of_tensor: Callable[[Tensor], Tensor], of_other: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples, in which each leaf is replaced.

    A tensor is replaced by ``of_tensor(tensor)``, and any other leaf by ``of_other(leaf)``. Objects of other container
    classes, also of subclasses, count as leaves.
    """
    if isinstance(value, Tensor):
        return of_tensor(value)
    if type(value) in (dict, OrderedDict):
        result = copy.copy(value)  # with ``_metadata``, which a new dict would not have
        result.update({key: map_state_leaves(item, of_tensor, of_other) for key, item in value.items()})
        return result
    if type(value) in (list, tuple):
        return type(value)(map_state_leaves(item, of_tensor, of_other) for item in value)
    return of_other(value)
