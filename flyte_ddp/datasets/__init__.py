"""What a data set's name means: its fingerprint, fetching it, opening it."""

from __future__ import annotations

from flyte_ddp.datasets.arrays import ImageArrays, image_arrays, open_arrays
from flyte_ddp.datasets.fetching import DATASETS, fetch, fingerprint
from flyte_ddp.datasets.prepared import open_prepared

__all__ = ["DATASETS", "ImageArrays", "fetch", "fingerprint", "image_arrays", "open_arrays", "open_prepared"]
