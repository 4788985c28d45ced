# /// script
# dependencies = [
#     "mosaicml-streaming==0.13.0", "brotli==1.2.1", "python-snappy==0.7.3", "cramjam==2.14.0", "zstd==1.5.7.2",
#     "xxhash==3.8.2", "boto3==1.43.117", "s3transfer==0.19.3", "transformers==4.57.6", "huggingface-hub==0.36.2",
#     "tokenizers==0.22.2", "regex==2026.11.19", "catalogue==2.0.10",
# ]
# ///
"""mosaicml-streaming.

`StreamingDataset` is a stream, and is rejected as a set on demand. In ranks, the constructor waits for all ranks. Two
processes that start at the same time can use the same name in shared memory. `LocalDataset` reads the same folder by
number, without ranks and shared names.
"""

from streaming.base import LocalDataset, MDSWriter

from flyte_ddp import on_demand


class Rows:
    def __init__(self, path):
        self.rows = LocalDataset(path)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        return row["inputs"], row["label"]


def samples(source):
    return on_demand(Rows(f"{source}/train"), Rows(f"{source}/test"))


def write(folder, part, inputs, labels):
    columns = {"inputs": "ndarray:float32", "label": "int"}
    with MDSWriter(out=str(folder / part), columns=columns, size_limit=2_000) as writer:
        for row, label in zip(inputs, labels.tolist(), strict=True):
            writer.write({"inputs": row, "label": label})
