"""Raw rows through model.json and model.onnx in a process that cannot import torch: against torch's predictions."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from predictions import predict_rows
from training_runs import QUIET, train_in

from flyte_ddp import Hyperparameters, fetch
from flyte_ddp.datasets import open_prepared
from flyte_ddp.export.exporting import export_onnx_if_equal
from flyte_ddp.predict.prediction_batches import SavedModel

pytest.importorskip("onnxruntime")
ROWS = """
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from flyte_ddp import Table

class Customers(Table):
    test = 0.3

    def read(self, source):
        table = pd.read_csv(source)
        return table[["age", "income", "city"]], table.get("bought"), table["id"]

    def fit(self, rows, targets):
        numbers = make_pipeline(SimpleImputer(), StandardScaler())
        return make_column_transformer(
            (numbers, ["age", "income"]), (OneHotEncoder(handle_unknown="ignore"), ["city"]), sparse_threshold=0
        ).fit(rows)

    def prepare(self, fitted, rows):
        return fitted.transform(rows)
"""
MODEL = """
from torch import nn

def net(num_classes, input_shape):
    return nn.Sequential(nn.Linear(*input_shape, 16), nn.ReLU(), nn.Linear(16, num_classes))
"""
SERVE = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTorch())
import numpy as np, onnxruntime, pandas as pd
from flyte_ddp import load_preprocessing
preprocessing = load_preprocessing("run/model.json")
inputs = preprocessing.prepare(pd.read_csv("new.csv")[["city", "income", "age"]])
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
logits, = session.run(["outputs"], {"inputs": inputs})
np.save("logits.npy", logits)
assert type(preprocessing.fitted).__name__ == "ColumnTransformer"
"""


def write_customers(path: Path, rows: int, seed: int, cities: str, *, bought: bool) -> None:
    random = np.random.default_rng(seed)
    age, income = random.normal(40, 12, rows).round(2), random.lognormal(10, 1, rows).round(2)
    table = pd.DataFrame({"id": np.arange(rows), "age": age, "income": income, "city": random.choice([*cities], rows)})
    if bought:
        table["bought"] = np.where(age + random.normal(0, 5, rows) > 40, "yes", "no")
    table.loc[random.random(rows) < 0.1, "age"] = np.nan
    table.loc[random.random(rows) < 0.1, "income"] = np.nan
    table.loc[random.random(rows) < 0.1, "city"] = None
    table.to_csv(path, index=False)


@pytest.mark.slow
def test_500_raw_rows_with_gaps_and_unknown_categories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("customer_rows.py").write_text(ROWS)
    Path("customer_model.py").write_text(MODEL)
    write_customers(tmp_path / "table.csv", 400, 0, "ABC", bought=True)
    write_customers(tmp_path / "new.csv", 500, 1, "ABCXYZ", bought=False)
    own = {"dataset": "customer_rows:Customers", "model": "customer_model:net"}
    hp = Hyperparameters(num_ranks=1, epochs=3, optimizer="adamw", precision="fp32", batch_size=32, **own)
    data = fetch(hp.dataset, "table.csv", tmp_path / "data", progress="off")
    result = train_in(tmp_path / "run", hp, data)
    assert export_onnx_if_equal(SavedModel(result.model, result.sidecar, QUIET), open_prepared(data), tmp_path).passed
    expected = predict_rows(result.model, result.sidecar, tmp_path / "out.csv", settings=QUIET, table=Path("new.csv"))
    done = subprocess.run([sys.executable, "-c", SERVE], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logits = np.load("logits.npy").astype(np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    names = json.loads(result.sidecar.read_text())["classes"]
    found = np.array([[float(row[f"score_{name}"]) for name in names] for row in expected])
    assert found.shape == (500, 2)
    np.testing.assert_allclose(shares, found, atol=1e-5)
