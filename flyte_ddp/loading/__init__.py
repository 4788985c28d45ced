"""From a prepared data set to batches on the device."""

from __future__ import annotations

from flyte_ddp.loading.opening import Splits, open_splits, open_tests
from flyte_ddp.loading.split import Split

__all__ = ["Split", "Splits", "open_splits", "open_tests"]
