# /// script
# dependencies = ["soundfile==0.14.0"]
# ///
"""soundfile.

Arrays are [frames, channels], and [frames] for a single channel. With `always_2d=True` all arrays have two dimensions.
Values are from -1 to 1, unless `dtype="int16"` requests the stored values. Sample rates differ between files, so check
the second return value. Clips of different lengths need `collate: "padded"`.
"""

from pathlib import Path

import numpy as np
import soundfile as sf

from flyte_ddp import on_demand

SHAPE = (64, 1)


class Clips:
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.flac"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, number):
        clip, rate = sf.read(self.paths[number], dtype="int16", always_2d=True)
        assert rate == 16_000
        return clip.astype(np.float32), int(self.paths[number].stem.split("_")[1])


def samples(source):
    return on_demand(Clips(f"{source}/train"), Clips(f"{source}/test"))


def write(folder, part, inputs, labels):
    (folder / part).mkdir()
    for number, (clip, label) in enumerate(zip(inputs, labels, strict=True)):
        sf.write(folder / part / f"{number:04}_{label}.flac", clip.astype(np.int16), 16_000)
