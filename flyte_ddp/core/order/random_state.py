"""The state of the global random generators of a process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the state of the global generators of Python, NumPy and torch (CPU) after the block. Imports torch.

    The generators of GPUs are not restored.
    """
    import torch

    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch)
