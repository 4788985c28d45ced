"""User-defined tables: plans, which a newly fitted encoder would number differently, with models."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.preprocessing import OrdinalEncoder, StandardScaler
from torch import Tensor, nn

from flyte_ddp import Table, arrays
from flyte_ddp.datasets import SampleArrays

PLANS = "bcde"  # every second plan has the class "yes", except in a tenth of the rows


def write_plans(
    path: Path, rows: int = 1500, *, seed: int = 0, first: str = "", columns: str = "id plan size y"
) -> Path:
    """Write rows in the order of ``columns``. With ``first``, an additional first row has this plan."""
    random = np.random.default_rng(seed)
    plans = random.choice([*PLANS], rows)
    right = np.isin(plans, ["b", "d"]) != (random.random(rows) < 0.1)
    sizes = random.normal(50, 20, rows)
    table = [
        {"id": f"{seed}-{row}", "plan": plans[row], "size": f"{sizes[row]:.3f}", "y": "yes" if right[row] else "no"}
        for row in range(rows)
    ]
    if first:
        table.insert(0, {"id": f"{seed}-new", "plan": first, "size": "50", "y": "yes"})
    with path.open("w") as file:
        csv.writer(file).writerow(columns.split())
        csv.writer(file).writerows([[row[name] for name in columns.split()] for row in table])
    return path


def read_plans(source: str) -> tuple[Any, Any, Any]:
    with Path(source).open() as file:
        rows = [*csv.DictReader(file)]
    plans = np.array([row["plan"] for row in rows], dtype=object)
    sizes = np.array([float(row["size"] or "nan") for row in rows])
    targets = [row["y"] for row in rows] if "y" in rows[0] else None
    return {"plan": plans, "size": sizes}, targets, [row["id"] for row in rows]


class Plans(Table):
    test = 0.4

    def read(self, source: str) -> tuple[Any, Any, Any]:
        return read_plans(source)

    def fit(self, rows: Any, targets: Any) -> Any:
        codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1).fit(rows["plan"][:, None])
        return {"plan": codes, "size": StandardScaler().fit(rows["size"][:, None])}

    def prepare(self, fitted: Any, rows: Any) -> Any:
        plans = fitted["plan"].transform(rows["plan"][:, None])[:, 0].astype(int) + 1
        return {"plan": plans, "size": fitted["size"].transform(rows["size"][:, None])}


def plans_by_arrays(source: str) -> SampleArrays:
    """Return the same table by ``arrays``. The data set's fit makes the inputs, and the rows are not kept."""
    rows, targets, ids = read_plans(source)
    fitted = Plans().fit(rows, targets)
    inputs, half, numbers = (
        Plans().prepare(fitted, rows),
        len(ids) // 2,
        np.array([target == "yes" for target in targets]),
    )
    sides = (
        ({name: leaf[part] for name, leaf in inputs.items()}, numbers[part], ids[part])
        for part in (slice(half), slice(half, None))
    )
    return arrays(*sides, classes=["no", "yes"], preprocessing=fitted, prepare=prepare_plans)


def prepare_plans(fitted: Any, source: str) -> Any:
    rows, _, ids = read_plans(source)
    return Plans().prepare(fitted, rows), ids


class Model(nn.Module):
    def __init__(self, num_classes: int, input_shape: Any) -> None:
        super().__init__()
        self.plan = nn.Embedding(len(PLANS) + 2, 8)
        self.head = nn.Linear(8 + input_shape["size"][0], num_classes)

    def forward(self, plan: Tensor, size: Tensor) -> Tensor:
        return self.head(torch.cat([self.plan(plan), size], 1))


class Crippled(Model):
    """A model with one plan less."""

    def forward(self, plan: Tensor, size: Tensor) -> Tensor:
        return super().forward(plan.clamp(max=len(PLANS) - 1), size)


def coded(source: str) -> SampleArrays:
    """Return points of two classes by a source "SEED-NAMES-CLASSES". With NAMES "bare", classes have no names."""
    seed, named, order = source.split("-")
    random = np.random.default_rng(int(seed))
    points = random.normal(size=(900, 3)).astype(np.float32)
    names = ["cold", "hot"] if order == "cold" else ["hot", "cold"]
    numbers = np.array([names.index("hot" if point.sum() > 0 else "cold") for point in points])
    sides = ((points[part], numbers[part]) for part in (slice(600), slice(600, None)))
    return arrays(*sides, classes=names if named == "named" else ())


def points_model(num_classes: int, input_shape: Any) -> nn.Module:
    return nn.Linear(3, num_classes)
