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
    "config": ["Hyperparameters"],
    "datasets": ["fetch", "image_arrays"],
    "errors": ["RankError", "StoppedError", "UnreachableError", "UserError"],
    "models.artifacts": ["load_model"],
    "release.promotion": ["load_champion"],
    "run": ["Result", "run_training"],
    "settings": ["Settings"],
}


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name, and return the object of that name; for ``results`` the module.

    Raises:
        AttributeError: the name is not public.
    """
    if name == "results":
        return import_module(f"{__name__}.results")
    for module, names in MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
