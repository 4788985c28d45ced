# /// script
# dependencies = ["datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "pyarrow==26.0.1"]
# ///
"""datasets (Hugging Face).

`with_format("numpy")` returns arrays. Without it, items are lists. `map`, `filter`, `sort` and `shuffle` write
`cache-*.arrow` beside the data. The cache files do not change the identity of the data, and later processes reuse them.
A machine without the cache repeats the work. To avoid this, do the work before, and store the result by `save_to_disk`.
"""

from datasets import Dataset, load_from_disk

from flyte_ddp import on_demand


class Rows:
    def __init__(self, path):
        self.rows = load_from_disk(path).with_format("numpy")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        return row["inputs"], row["label"]


def samples(source):
    return on_demand(Rows(f"{source}/train"), Rows(f"{source}/test"))


def write(folder, part, inputs, labels):
    Dataset.from_dict({"inputs": list(inputs), "label": labels}).save_to_disk(folder / part)
