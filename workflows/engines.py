"""The training workflows of engines, which differ in the task that trains."""

from importlib import import_module
from typing import Any

from flytekit import workflow

from flyte_ddp.config import Hyperparameters
from tasks.command_line import is_engine_installed
from tasks.preparation import check_inputs
from tasks.training import TrainingOutputs
from workflows.schedules import make_launch_plans

DESCRIPTION = """Train a model on {}. A run that was trained before is answered from the cache.

Returns accuracies, weights, sidecar, report and metrics, as training_wf does. The registration sets the number of
nodes (FLYTE_DDP_NODES) and their size (FLYTE_DDP_PROFILE).

Args:
    hp: What to train, on which data, and how. Fields that are left out have their defaults.
"""


def make_training_workflow(engine: str, place: str) -> dict[str, Any]:
    """Return ENGINE_training_wf and its launch plans by name, for workflows/ENGINE_training.py.

    Prints a note and returns nothing if the engine is not installed. ``place``, in words, is what it trains on.
    """
    if not is_engine_installed(engine):
        return {}
    train = getattr(import_module(f"tasks.{engine}_training"), f"train_on_{engine}")

    def training_wf(hp: Hyperparameters = Hyperparameters()) -> TrainingOutputs:
        checked = check_inputs(hp=hp, engine=engine)
        return train(hp=checked.hp, data=checked.data, run_version=checked.run_version)

    name, module = f"{engine}_training_wf", f"workflows.{engine}_training"
    training_wf.__name__, training_wf.__module__ = name, module  # by which Flyte finds the workflow
    training_wf.__doc__ = DESCRIPTION.format(place)
    made = workflow(training_wf)
    return {name: made, **make_launch_plans(made, taken=(name,))}
