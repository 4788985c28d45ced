# /// script
# dependencies = ["polars==2.1.0"]
# ///
"""polars.

The order of rows sets the numbers of the samples. `group_by`, `unique` and joins may return another order in each call.
Sort the rows, or set `maintain_order=True`, for a join `maintain_order="left"`. A LazyFrame has no rows yet, and is
rejected by `arrays`. Pass the result of `collect()`. Polars' threads do not work in forked processes. Therefore use
`arrays`, which reads once, and not `on_demand`.
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
