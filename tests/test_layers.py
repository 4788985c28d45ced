"""The layers: what imports what, and what importing costs."""

from __future__ import annotations

import re
import subprocess
import sys

from cli import ROOT

HEAVY = ("torch", "torchvision", "wandb", "matplotlib", "sklearn", "botocore", "ray", "dask")


def test_importing_the_workflows_imports_nothing_heavy() -> None:
    code = (
        "import sys, workflows.training, workflows.prediction\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_the_launcher_starts_ranks_without_torch() -> None:
    modules = "flyte_ddp.run, flyte_ddp.launch.spawn, flyte_ddp.report.report, flyte_ddp.tracking.wandb_run"
    code = f"import sys, {modules}\nprint('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_what_is_going_to_be_trained_is_shown_without_torch() -> None:
    """In a pod whose whole work takes less time than that import."""
    code = (
        "import sys; from flyte_ddp.config import Hyperparameters; from flyte_ddp.report.previews import of_run\n"
        "print(len(of_run(Hyperparameters(), None, 'run')) > 1000, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True False"


def test_the_library_knows_neither_flytekit_nor_its_callers() -> None:
    imports = re.compile(r"^\s*(?:from|import) (flytekit|tasks|workflows)\b", re.MULTILINE)
    files = list((ROOT / "flyte_ddp").rglob("*.py"))
    assert len(files) > 30
    assert not [path for path in files if imports.search(path.read_text())]


def test_shards_know_nothing_of_data_sets() -> None:
    """But for the command line, which packs whatever is a data set."""
    files = [path for path in (ROOT / "flyte_ddp" / "shards").glob("*.py") if path.name != "__main__.py"]
    assert len(files) > 10
    assert not [path for path in files if re.search(r"\bflyte_ddp\.datasets\b|import datasets", path.read_text())]
