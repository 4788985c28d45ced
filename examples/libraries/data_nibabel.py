# /// script
# dependencies = ["nibabel==5.4.2", "importlib-resources==7.1.0"]
# ///
"""nibabel.

`get_fdata()` returns float64 and caches the array in the image. `np.asarray(image.dataobj, np.float32)` avoids both.
The axes depend on the scanner, and `as_closest_canonical` gives all images the same axes. Sort the result of `glob`,
which is in the order of the disk.
"""

from pathlib import Path

import nibabel as nib
import numpy as np

from flyte_ddp import on_demand

SHAPE = (4, 4, 2)


class Scans:
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.nii.gz"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, number):
        image = nib.as_closest_canonical(nib.load(self.paths[number]))
        return np.asarray(image.dataobj, np.float32), int(self.paths[number].name.split("_")[1][0])


def samples(source):
    return on_demand(Scans(f"{source}/train"), Scans(f"{source}/test"))


def write(folder, part, inputs, labels):
    (folder / part).mkdir()
    for number, (volume, label) in enumerate(zip(inputs, labels, strict=True)):
        nib.save(nib.Nifti1Image(volume, np.eye(4)), folder / part / f"{number:04}_{label}.nii.gz")
