"""Data sets by name: fingerprint a data set, fetch it into a prepared folder, and open that folder."""

from flyte_ddp.datasets.arrays import ImageArrays, image_arrays, open_arrays
from flyte_ddp.datasets.fetching import fetch, fingerprint, is_quickly_prepared, is_whole
from flyte_ddp.datasets.prepared import open_prepared
from flyte_ddp.datasets.published import DATASETS

__all__ = ["DATASETS", "ImageArrays", "fetch", "fingerprint", "image_arrays"]
__all__ += ["is_quickly_prepared", "is_whole", "open_arrays", "open_prepared"]
