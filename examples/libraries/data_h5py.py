# /// script
# dependencies = ["h5py==3.16.0"]
# ///
"""h5py.

The data set is made in each process that reads. Open the file there, as below, so that no open file is shared with
forks. HDF5 locks a file that is open for writing, so close the file before training begins. A sample of a compressed
data set costs a whole chunk, so store chunks of one sample.
"""

import h5py

from flyte_ddp import on_demand


class Rows:
    def __init__(self, path, part):
        self.part = h5py.File(path)[part]

    def __len__(self):
        return len(self.part["labels"])

    def __getitem__(self, number):
        return self.part["inputs"][number], self.part["labels"][number]


def samples(source):
    return on_demand(Rows(f"{source}/data.h5", "train"), Rows(f"{source}/data.h5", "test"))


def write(folder, part, inputs, labels):
    with h5py.File(folder / "data.h5", "a") as file:
        file[f"{part}/inputs"], file[f"{part}/labels"] = inputs, labels
