"""Load batches of a prepared data set onto the device."""

from flyte_ddp.loading.opening import open_splits, open_test_split
from flyte_ddp.loading.split import Split, Splits

__all__ = ["Split", "Splits", "open_splits", "open_test_split"]
