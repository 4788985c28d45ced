# /// script
# dependencies = ["rasterio==1.4.4", "affine==3.0.1", "click-plugins==1.1.1.2", "cligj==0.7.2"]
# ///
"""rasterio.

An open file serves a single process and a single thread. Open the file in the process that reads, as below.
`statistics()` writes `.aux.xml` beside the file unless GDAL_PAM_ENABLED is NO. Missing pixels have the number `nodata`.
`read(masked=True)` returns a masked array. Masked arrays are rejected, so fill the missing pixels.
"""

from pathlib import Path

import numpy as np
import rasterio
from rasterio.windows import Window

from flyte_ddp import on_demand

SHAPE = (2, 8, 8)


class Tiles:
    def __init__(self, path):
        self.file, self.labels = rasterio.open(path), np.load(Path(path).with_suffix(".npy"))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        tile = self.file.read(window=Window(8 * number, 0, 8, 8))
        return tile.astype(np.float32), self.labels[number]


def samples(source):
    return on_demand(Tiles(f"{source}/train.tif"), Tiles(f"{source}/test.tif"))


def write(folder, part, inputs, labels):
    np.save(folder / f"{part}.npy", labels)
    scene = np.concatenate(inputs, axis=2).astype(np.uint8)
    form = {"driver": "GTiff", "count": 2, "height": 8, "width": scene.shape[2], "dtype": "uint8"}
    place = rasterio.transform.from_origin(0, 100, 10, 10)
    with rasterio.open(folder / f"{part}.tif", "w", **form, transform=place) as file:
        file.write(scene)
