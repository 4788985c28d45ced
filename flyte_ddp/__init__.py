"""Distributed data parallel training in plain PyTorch: the library below the Flyte tasks and workflows.

``NAMES`` lists the public API. Importing this package is cheap because each name is imported at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flyte_ddp.core.machine.streams import open_missing_streams
from flyte_ddp.core.user_code.version import VERSION

if TYPE_CHECKING:
    from flyte_ddp.config import Hyperparameters as Hyperparameters
    from flyte_ddp.core import results as results
    from flyte_ddp.core.errors import RankError as RankError
    from flyte_ddp.core.errors import StoppedError as StoppedError
    from flyte_ddp.core.errors import UnreachableError as UnreachableError
    from flyte_ddp.core.errors import UserError as UserError
    from flyte_ddp.core.loops.current_rank import CurrentRank as CurrentRank
    from flyte_ddp.core.loops.current_rank import current_rank as current_rank
    from flyte_ddp.core.parallel.exchange import across_ranks as across_ranks
    from flyte_ddp.core.parallel.sharing import batches as batches
    from flyte_ddp.core.parallel.sharing import evaluation_batches as evaluation_batches
    from flyte_ddp.core.parallel.sharing import sum_over_ranks as sum_over_ranks
    from flyte_ddp.core.settings import Settings as Settings
    from flyte_ddp.core.training.optimizer_state import load_optimizer_state as load_optimizer_state
    from flyte_ddp.datasets import Table as Table
    from flyte_ddp.datasets import arrays as arrays
    from flyte_ddp.datasets import fetch as fetch
    from flyte_ddp.datasets import image_arrays as image_arrays
    from flyte_ddp.datasets import on_demand as on_demand
    from flyte_ddp.datasets import split_by_id as split_by_id
    from flyte_ddp.models.artifacts import load_model as load_model
    from flyte_ddp.predict.new_rows import load_preprocessing as load_preprocessing
    from flyte_ddp.predict.new_rows import read_new_rows as read_new_rows
    from flyte_ddp.release.promotion import load_champion as load_champion
    from flyte_ddp.run import Result as Result
    from flyte_ddp.run import run_training as run_training
    from flyte_ddp.run_function import run_ranks as run_ranks

__version__ = VERSION
open_missing_streams()
NAMES = {  # by module
    "config": ("Hyperparameters",),
    "core.errors": ("RankError", "StoppedError", "UnreachableError", "UserError"),
    "core.loops.current_rank": ("CurrentRank", "current_rank"),
    "core.parallel.exchange": ("across_ranks",),
    "core.parallel.sharing": ("batches", "evaluation_batches", "sum_over_ranks"),
    "core.results": ("results",),  # the module itself
    "core.settings": ("Settings",),
    "core.training.optimizer_state": ("load_optimizer_state",),
    "datasets": ("Table", "arrays", "fetch", "image_arrays", "on_demand", "split_by_id"),
    "models.artifacts": ("load_model",),
    "predict.new_rows": ("load_preprocessing", "read_new_rows"),
    "release.promotion": ("load_champion",),
    "run": ("Result", "run_training"),
    "run_function": ("run_ranks",),
}
MODULES = {name: module for module, names in NAMES.items() for name in names}
__all__ = list(MODULES)


def __getattr__(name: str) -> Any:
    """Import the module of a public name, and return the object.

    Raises:
        AttributeError: The name is not public.
    """
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{MODULES[name]}")
    return module if name == "results" else getattr(module, name)
