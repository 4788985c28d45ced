"""What importing costs; what may import what is held by import-linter (``make lint``)."""

import subprocess
import sys

import pytest
from cli import ROOT

HEAVY = ("torch", "torchvision", "wandb", "matplotlib", "sklearn", "boto3", "botocore", "ray", "dask", "distributed")
LAUNCHER = "flyte_ddp.run, flyte_ddp.training.job, flyte_ddp.report.report, flyte_ddp.tracking.wandb_run"
IDENTITY = (
    "from flyte_ddp.config import Hyperparameters; from flyte_ddp.runs.identity import run_name\n"
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
        pytest.param(f"import {LAUNCHER}", ("torch", "wandb"), id="what starts ranks"),
        pytest.param("import flyte_ddp.loops.run_ranks", ("numpy", *HEAVY), id="what starts ranks of own functions"),
        pytest.param(IDENTITY, ("torch", "torchvision"), id="what identifies a run with torchvision's weights"),
        pytest.param("import flyte_ddp.release.__main__", ("scipy", "flytekit", *HEAVY), id="what reads a registry"),
        pytest.param("import flyte_ddp", ("numpy", "torch", "flytekit"), id="the package"),
    ],
)
def test_imports_nothing_heavy(code: str, absent: tuple[str, ...]) -> None:
    code += f"\nimport sys; print([name for name in {absent} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
