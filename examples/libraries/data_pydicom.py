# /// script
# dependencies = ["pydicom==3.0.2"]
# ///
"""pydicom.

`pixel_array` has the stored numbers. `apply_rescale` converts the numbers to Hounsfield units, by factors that differ
between scanners. Slices of a series are in the order of `InstanceNumber`, not of file names. Lossless JPEG, JPEG-LS and
HTJ2K also need `pylibjpeg` with its plugins in the image. Pillow decodes other JPEG.
"""

from pathlib import Path

import numpy as np
import pydicom
from pydicom.pixels import apply_rescale

from flyte_ddp import on_demand

SHAPE = (6, 6)


class Slices:
    def __init__(self, folder):
        files = {path: pydicom.dcmread(path, stop_before_pixels=True) for path in Path(folder).glob("*.dcm")}
        self.paths = sorted(files, key=lambda path: files[path].InstanceNumber)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, number):
        file = pydicom.dcmread(self.paths[number])
        return apply_rescale(file.pixel_array, file).astype(np.float32), int(file.PatientID)


def samples(source):
    return on_demand(Slices(f"{source}/train"), Slices(f"{source}/test"))


def write(folder, part, inputs, labels):
    (folder / part).mkdir()
    for number, (pixels, label) in enumerate(zip(inputs, labels, strict=True)):
        file = pydicom.Dataset()
        file.file_meta = pydicom.dataset.FileMetaDataset()
        file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        file.SOPClassUID, file.SOPInstanceUID = pydicom.uid.CTImageStorage, pydicom.uid.generate_uid()
        file.PatientID, file.InstanceNumber = str(label), number
        file.RescaleSlope, file.RescaleIntercept = 1, -1000
        file.set_pixel_data((pixels + 1000).astype(np.uint16), "MONOCHROME2", 16)
        file.save_as(folder / part / f"{99 - number}.dcm", enforce_file_format=True)
