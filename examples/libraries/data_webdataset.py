# /// script
# dependencies = ["webdataset==1.0.2"]
# ///
"""webdataset.

A WebDataset is a stream. `split_by_node` gives ranks different numbers of samples, and a killed run starts anew. The
tars of `ShardWriter` are shards, whose samples can be read by number. Make the index of the shards by `python -m
flyte_ddp.shards create` ([data larger than memory](large-data.md)).
"""

from flyte_ddp import on_demand
from flyte_ddp.shards.dataset import ShardDataset


class Rows:
    def __init__(self, index, cache):
        self.samples = ShardDataset(index, cache)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        sample = self.samples[number]
        return sample[".npy"], sample[".cls"]


def samples(source):
    return on_demand(Rows(f"{source}/train.json", "/tmp/shards"), Rows(f"{source}/test.json", "/tmp/shards"))


def write(folder, part, inputs, labels):
    from webdataset import ShardWriter

    from flyte_ddp.shards.scanning import create_index

    with ShardWriter(f"{folder}/{part}-%03d.tar", maxcount=20, verbose=0) as writer:
        for number, (row, label) in enumerate(zip(inputs, labels, strict=True)):
            writer.write({"__key__": f"{number:06}", "npy": row, "cls": int(label)})
    create_index(sorted(map(str, folder.glob(f"{part}-*.tar"))), folder / f"{part}.json")
