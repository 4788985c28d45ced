# /// script
# dependencies = ["pyarrow==26.0.1"]
# ///
"""pyarrow.

A memory-mapped Arrow file is read by sample. From Parquet, whole columns of a row group are read, so use `arrays`,
which reads the file once. `pyarrow.dataset` reads files in the order of their names, `part-10` before `part-2`.
`write_dataset` keeps the order of rows only with `preserve_order=True`. Sort the rows by an id.
"""

import pyarrow as pa

from flyte_ddp import on_demand


class Rows:
    def __init__(self, path):
        self.rows = pa.ipc.open_file(pa.memory_map(path)).read_all()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows["inputs"][number].values.to_numpy(), self.rows["label"][number].as_py()


def samples(source):
    return on_demand(Rows(f"{source}/train.arrow"), Rows(f"{source}/test.arrow"))


def write(folder, part, inputs, labels):
    rows = pa.FixedSizeListArray.from_arrays(inputs.ravel(), inputs.shape[1])
    table = pa.table({"inputs": rows, "label": labels})
    with pa.ipc.new_file(folder / f"{part}.arrow", table.schema) as file:
        file.write_table(table)
