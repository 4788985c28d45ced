"""Data sets by name: fingerprint a data set, fetch it into a prepared folder, and open that folder."""

from flyte_ddp.datasets.fetching import fetch, fingerprint, is_whole, needs_no_download
from flyte_ddp.datasets.images import image_arrays
from flyte_ddp.datasets.on_demand_set import on_demand
from flyte_ddp.datasets.prepared import open_prepared
from flyte_ddp.datasets.published import DATASETS
from flyte_ddp.datasets.sample_arrays import SampleArrays, arrays, open_arrays
from flyte_ddp.datasets.table import Table, split_by_id

__all__ = ["DATASETS", "SampleArrays", "arrays", "fetch", "fingerprint", "image_arrays"]
__all__ += ["Table", "is_whole", "needs_no_download", "on_demand", "open_arrays", "open_prepared", "split_by_id"]
