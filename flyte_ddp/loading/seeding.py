"""Seed the random generators that a user's own decoding and augmentation draw from, for one sample at a time.

So the draws depend on seed, epoch and sample alone, whichever process loads the sample, and in whatever order.
"""

import hashlib
import inspect
import random
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from flyte_ddp.parallel.training_pass import Generators

GLOBAL = Generators(torch.default_generator, random, np.random)


def seed_for(purpose: str, seed: int, epoch: int, sample: int, transforms: Iterable[Any] = ()) -> None:
    """Seed this process's generators (Python, NumPy, torch) and ``transforms`` for one sample and ``purpose``."""
    packed = struct.pack("<3q", seed, epoch, sample)
    hashed = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()).digest()
    bits = int.from_bytes(hashed, "little")
    GLOBAL.seed_each(bits)
    for transform in transforms:
        transform.set_random_seed(bits % 2**32)


def find_seeded_transforms(own: Any, method: str = "__call__") -> list[Any]:
    """Return the objects with ``set_random_seed`` that a function, or an object's ``method``, uses, each once."""
    function = inspect.unwrap(own if inspect.isroutine(own) else getattr(type(own), method))
    function = getattr(function, "__func__", function)  # of a bound method
    found = [own, *(value for _, value in inspect.getmembers_static(own))]
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        found += [*used.globals.values(), *used.nonlocals.values()]
    seeded = (each for each in found if callable(getattr(each, "set_random_seed", None)) and not isinstance(each, type))
    return list({id(each): each for each in seeded}.values())
