"""Distributed data parallel training in plain PyTorch: the library below the Flyte tasks and workflows.

The names below are the public API. Importing this package is cheap: each name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flyte_ddp import results
    from flyte_ddp.config import Hyperparameters
    from flyte_ddp.datasets import fetch, image_arrays
    from flyte_ddp.errors import RankError, StoppedError, UnreachableError, UserError
    from flyte_ddp.models.artifacts import load_model
    from flyte_ddp.release.promotion import load_champion
    from flyte_ddp.run import Result, run_training
    from flyte_ddp.settings import Settings

__version__ = "0.1.0"
__all__ = [
    "Hyperparameters",
    "RankError",
    "Result",
    "Settings",
    "StoppedError",
    "UnreachableError",
    "UserError",
    "fetch",
    "image_arrays",
    "load_champion",
    "load_model",
    "results",
    "run_training",
]
MODULES = {
    "Hyperparameters": "config",
    "RankError": "errors",
    "Result": "run",
    "Settings": "settings",
    "StoppedError": "errors",
    "UnreachableError": "errors",
    "UserError": "errors",
    "fetch": "datasets",
    "image_arrays": "datasets",
    "load_champion": "release.promotion",
    "load_model": "models.artifacts",
    "results": "results",
    "run_training": "run",
}


def __getattr__(name: str) -> Any:
    """Import the module that MODULES gives for a public name, and return the object of that name there.

    Raises:
        AttributeError: MODULES does not have the name.
    """
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{MODULES[name]}")
    return module if MODULES[name] == name else getattr(module, name)
