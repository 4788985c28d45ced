# /// script
# dependencies = ["xarray==2026.9.0", "h5netcdf==1.8.2", "h5py==3.16.0"]
# ///
"""xarray.

Files are read when a value is requested. `isel` selects by position, and `sel` by label. In packed files
(`scale_factor`) and files with missing values, integers become floats with NaN. NaN is rejected, so fill the missing
values. `transpose` sets the order of the dimensions, which differs between files.
"""

import xarray as xr

from flyte_ddp import on_demand


class Rows:
    def __init__(self, path):
        self.rows = xr.open_dataset(path, engine="h5netcdf").transpose("sample", ...)

    def __len__(self):
        return self.rows.sizes["sample"]

    def __getitem__(self, number):
        row = self.rows.isel(sample=number)
        return row["inputs"].values, int(row["label"])


def samples(source):
    return on_demand(Rows(f"{source}/train.nc"), Rows(f"{source}/test.nc"))


def write(folder, part, inputs, labels):
    variables = {"inputs": (("sample", "feature"), inputs), "label": ("sample", labels)}
    xr.Dataset(variables).to_netcdf(folder / f"{part}.nc", engine="h5netcdf")
