# /// script
# dependencies = ["zarr==3.1.6", "numcodecs==0.16.6", "donfig==0.8.1.post1"]
# ///
"""zarr.

A sample costs a whole chunk, so store chunks of one sample. If there would be too many files, store shards of many
chunks. A chunk that was never written is read as the fill value, without an error.
"""

import zarr

from flyte_ddp import on_demand


class Rows:
    def __init__(self, group):
        self.inputs, self.labels = group["inputs"], group["labels"][:]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        return self.inputs[number], self.labels[number]


def samples(source):
    store = zarr.open_group(source, mode="r")
    return on_demand(Rows(store["train"]), Rows(store["test"]))


def write(folder, part, inputs, labels):
    group = zarr.open_group(folder).create_group(part)
    group.create_array("inputs", data=inputs, chunks=(1, *inputs.shape[1:]), shards=(len(inputs), *inputs.shape[1:]))
    group.create_array("labels", data=labels)
