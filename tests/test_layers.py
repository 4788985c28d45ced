"""What importing costs; what may import what is held by import-linter (``make lint``)."""

import subprocess
import sys

import pytest
from cli import ROOT

HEAVY = ("torch", "torchvision", "wandb", "matplotlib", "sklearn", "boto3", "botocore", "ray", "dask", "distributed")


@pytest.mark.slow
def test_importing_the_workflows_imports_nothing_heavy() -> None:
    code = (
        "import sys, workflows.training, workflows.prediction\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_the_launcher_starts_ranks_without_torch_and_wandb() -> None:
    modules = "flyte_ddp.run, flyte_ddp.launch.spawn, flyte_ddp.report.report, flyte_ddp.tracking.wandb_run"
    code = f"import sys, {modules}\nprint('torch' in sys.modules, 'wandb' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False False"


def test_what_is_going_to_be_trained_is_shown_without_torch() -> None:
    """In a pod whose whole work takes less time than that import."""
    code = (
        "import sys; from flyte_ddp.config import Hyperparameters\n"
        "from flyte_ddp.report.previews import render_run_preview\n"
        "print(len(render_run_preview(Hyperparameters(), None, 'run')) > 1000, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True False"
