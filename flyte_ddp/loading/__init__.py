"""From a prepared data set to batches on the device."""

from __future__ import annotations

from flyte_ddp.loading.opening import open_splits, open_tests
from flyte_ddp.loading.split import Split, Splits

__all__ = ["Split", "Splits", "open_splits", "open_tests"]
