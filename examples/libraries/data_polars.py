# /// script
# dependencies = ["polars==2.1.0"]
# ///
"""polars.

The order of rows decides which sample is which, and `group_by`, `unique` and joins may return another order in each
call: sort, or give `maintain_order=True`, to a join `maintain_order="left"`. A LazyFrame has no rows yet, and `arrays`
refuses it: give what `collect()` returns. Polars' threads and forked processes do not go together, so take `arrays`,
which reads once, and not `on_demand`.
"""

import polars as pl

from flyte_ddp import arrays


def read(path):
    table = pl.scan_parquet(path).sort("id").collect()
    return table.drop("id", "label").to_numpy(), table["label"], table["id"]


def samples(source):
    return arrays(read(f"{source}/train.parquet"), read(f"{source}/test.parquet"))


def write(folder, part, inputs, labels):
    columns = {f"x{place:02}": values for place, values in enumerate(inputs.T)}
    pl.DataFrame({"id": range(len(labels)), **columns, "label": labels}).write_parquet(folder / f"{part}.parquet")
