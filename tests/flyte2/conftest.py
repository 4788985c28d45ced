"""Flyte 2's tasks in this process, and an undisturbed run, with which tests compare runs of both fronts and of pods."""

import signal
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from flyte2_cli import LONG
from training_runs import QUIET

from flyte_ddp.config import Hyperparameters
from flyte_ddp.run import run_training

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NAMES = (
    "training",
    "elastic_training",
    "release",
    "prediction",
    "monitor",
    "sweep",
    "shards",
    "pods",
    "schedules",
    "inputs",
)


@pytest.fixture(scope="session")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of LONG, trained by the library without any front."""
    result = run_training(Hyperparameters(**LONG), digits, tmp_path_factory.mktemp("undisturbed") / "run", QUIET)
    weights: dict[str, torch.Tensor] = torch.load(result.model, weights_only=True)
    return weights


@pytest.fixture(scope="session")
def flyte2() -> dict[str, ModuleType]:
    """The modules of flyte2, as somebody imports them who deploys to a cluster without GPUs.

    The import changes the handlers of signals in this process. Other tests expect the former handlers.
    """
    handlers = [signal.getsignal(number) for number in STOPS]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("FLYTE_DDP_PROFILE", "sandbox")
        patch.setenv("FLYTE_DDP_REGISTRY", "s3://bucket/models")
        modules = {name: import_module(f"flyte2.{name}") for name in NAMES}
    for number, handler in zip(STOPS, handlers, strict=True):
        signal.signal(number, handler)
    return modules
