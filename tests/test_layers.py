"""What importing costs; what may import what is held by import-linter (``make lint``)."""

import subprocess
import sys

import pytest
from cli import ROOT

HEAVY = ("torch", "torchvision", "wandb", "matplotlib", "sklearn", "boto3", "botocore", "ray", "dask", "distributed")
LAUNCHER = "flyte_ddp.run, flyte_ddp.core.training.plan, flyte_ddp.report.report, flyte_ddp.tracking.wandb_run"
FIRST_STEPS = """
import tempfile
from dataclasses import replace
from pathlib import Path
from flyte_ddp import Hyperparameters, fetch, run_training
from flyte_ddp.core.settings import read_settings
settings = replace(read_settings(), wandb_mode="disabled", progress="off")
with tempfile.TemporaryDirectory() as folder:
    data = fetch("digits", "", Path(folder, "data"), progress="off")
    run_training(Hyperparameters(dataset="digits", max_steps=2, num_ranks=1), data, Path(folder, "run"), settings)
"""
IDENTITY = (
    "from flyte_ddp.config import Hyperparameters; from flyte_ddp.plans.identity import run_name\n"
    "run_name(Hyperparameters(model='resnet18', init_from='torchvision:DEFAULT'), 'data')"
)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        pytest.param(
            "import workflows.training, workflows.prediction, workflows.sweep",
            HEAVY,
            marks=pytest.mark.slow,
            id="workflows",
        ),
        pytest.param(
            "import tasks.training",
            ("numpy", "mashumaro.jsonschema", "flyte_ddp.datasets", "flyte_ddp.report.report", *HEAVY),
            id="the tasks of a training",
        ),
        pytest.param(
            "import workflows.elastic_training", ("torch",), marks=pytest.mark.slow, id="what registers Elastic"
        ),
        pytest.param(FIRST_STEPS, ("sympy", "torch._dynamo", "torchvision"), marks=pytest.mark.slow, id="a training"),
        pytest.param(f"import {LAUNCHER}", ("torch", "wandb"), id="what starts ranks"),
        pytest.param("import flyte_ddp.run_function", ("numpy", *HEAVY), id="what starts ranks of own functions"),
        pytest.param(IDENTITY, ("torch", "torchvision"), id="what identifies a run with torchvision's weights"),
        pytest.param("import flyte_ddp.release.__main__", ("scipy", "flytekit", *HEAVY), id="what reads a registry"),
        pytest.param("import flyte_ddp", ("numpy", "torch", "flytekit"), id="the package"),
    ],
)
def test_imports_nothing_heavy(code: str, absent: tuple[str, ...]) -> None:
    code += f"\nimport sys; print([name for name in {absent} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
