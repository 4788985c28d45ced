# /// script
# dependencies = ["litdata==0.2.76", "boto3==1.43.117", "s3transfer==0.19.3", "tifffile==2026.3.3"]
# ///
"""litdata.

`StreamingDataset` is a stream, and is rejected as a set on demand. In a rank, `StreamingDataset` finds the process
group, and `len()` would be the rank's share. `Cache` reads the same chunks by number, without ranks.
"""

from litdata.streaming import Cache

from flyte_ddp import on_demand


class Rows:
    def __init__(self, path):
        self.path, self.cache = path, Cache(path, chunk_bytes="64MB")

    def __len__(self):
        return len(self.cache)

    def __getitem__(self, number):
        return self.cache[number]


def samples(source):
    return on_demand(Rows(f"{source}/train"), Rows(f"{source}/test"))


def write(folder, part, inputs, labels):
    cache = Cache(str(folder / part), chunk_size=20)
    for number, sample in enumerate(zip(inputs, labels.tolist(), strict=True)):
        cache[number] = sample
    cache.done()
    cache.merge()
