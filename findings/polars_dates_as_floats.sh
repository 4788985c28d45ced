#!/usr/bin/env bash
# polars 2.1.0: to_numpy() of a frame makes floats of dates that stand beside a column of floats, without a word.
#
# The frame of the dates alone becomes datetime64, as a series of them does, and one with texts becomes objects that hold
# dates. Beside floats a date is its days since 1970, and a time its microseconds, so that the unit of the column is lost
# and a model trains on them. pandas returns objects for the same columns. np.asarray(frame[name]) of each column, and
# np.column_stack of those, raises instead.
#
# Seen on 29 November 2026, Python 3.11, numpy 2.4.6:
#   dates: datetime64[D]
#   dates and texts: object
#   dates and floats: float64 [[0.0, 1.5], [1.0, 2.5]]
#   times and floats: float64 [[0.0, 1.5], [86400000000.0, 2.5]]
#   pandas: object
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check polars==2.1.0 pandas==3.1.1 numpy==2.4.6
cat > "$folder/dates.py" <<'END'
import numpy as np, pandas, polars
days = np.arange(2).astype("datetime64[D]")
times = days.astype("datetime64[us]")
print("dates:", polars.DataFrame({"t": days}).to_numpy().dtype)
print("dates and texts:", polars.DataFrame({"t": days, "x": ["a", "b"]}).to_numpy().dtype)
for name, column in (("dates", days), ("times", times)):
    found = polars.DataFrame({"t": column, "x": [1.5, 2.5]}).to_numpy()
    print(f"{name} and floats:", found.dtype, found.tolist())
print("pandas:", pandas.DataFrame({"t": times, "x": [1.5, 2.5]}).to_numpy().dtype)
END
"$folder/venv/bin/python" "$folder/dates.py" | tee "$folder/seen"
diff "$folder/seen" - <<'END'
dates: datetime64[D]
dates and texts: object
dates and floats: float64 [[0.0, 1.5], [1.0, 2.5]]
times and floats: float64 [[0.0, 1.5], [86400000000.0, 2.5]]
pandas: object
END
