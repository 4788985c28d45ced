# /// script
# dependencies = [
#     "pylance==14.0.2", "lance-namespace==0.13.0", "lance-namespace-urllib3-client==0.13.0", "pyarrow==26.0.1",
# ]
# ///
"""Lance.

Lance warns that it is not fork-safe. Open the data set in each process, as below. `take` returns rows by position, and
a deletion changes positions. With a `version`, later writers change nothing.
"""

import lance
import pyarrow as pa

from flyte_ddp import on_demand


class Rows:
    def __init__(self, path):
        self.rows = lance.dataset(path, version=1)

    def __len__(self):
        return self.rows.count_rows()

    def __getitem__(self, number):
        row = self.rows.take([number])
        return row["inputs"].combine_chunks().flatten().to_numpy(), row["label"][0].as_py()


def samples(source):
    return on_demand(Rows(f"{source}/train.lance"), Rows(f"{source}/test.lance"))


def write(folder, part, inputs, labels):
    rows = pa.FixedSizeListArray.from_arrays(inputs.ravel(), inputs.shape[1])
    lance.write_dataset(pa.table({"inputs": rows, "label": labels}), folder / f"{part}.lance")
