"""Which weights a checkpoint may hold, and when a state may be copied."""

import math
import threading
from pathlib import Path

import pytest
import torch
from states import make_state

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.training.checkpointing import is_finite
from flyte_ddp.datasets.sample_arrays import open_arrays
from flyte_ddp.plans.resolve import detect_hardware


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 3.0, -3.0])
@pytest.mark.parametrize("place", [0, 1000, 4095])
def test_a_number_that_is_not_finite_is_found(dtype: torch.dtype, number: float, place: int) -> None:
    weights = torch.full((4096,), torch.finfo(dtype).max if dtype != torch.complex64 else 1.0, dtype=dtype)
    weights[place] = number
    assert is_finite(weights.view(64, 64).T) == math.isfinite(number) == bool(weights.isfinite().all())


@pytest.mark.parametrize("weights", [torch.empty(0, 3), torch.tensor(1.0), torch.ones(2) > 0])
def test_other_tensors_are_finite(weights: torch.Tensor) -> None:
    assert is_finite(weights)


def test_blocks_without_snapshots_may_be_nested(digits: Path) -> None:
    hp = Hyperparameters(num_ranks=1)
    state, seen = make_state(hp, detect_hardware(hp), open_arrays(digits)), list[bool]()

    def nest() -> None:
        with state.exclude_snapshots():
            with state.exclude_snapshots():
                pass
            seen.append(state.inconsistent)

    thread = threading.Thread(target=nest, daemon=True)
    thread.start()
    thread.join(10)
    state.splits.close()
    assert (seen, state.inconsistent) == ([True], False)
