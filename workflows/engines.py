"""The training workflows of the engines, which differ only in the training task."""

from importlib import import_module
from typing import Any

from flytekit import workflow

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import print_to_stderr
from flyte_ddp.schedules.entries import read_schedules
from tasks.preparation import check_inputs
from tasks.training import TrainingOutputs
from workflows.schedules import describe_why_skipped, make_launch_plans

DESCRIPTION = """Train a model on {}. A run that was trained before is answered from the cache.

Returns accuracies, weights, sidecar, report and metrics, as training_wf does. The registration sets the number of
nodes (FLYTE_DDP_NODES) and their size (FLYTE_DDP_PROFILE).

Args:
    hp: Model, data and training settings. Omitted fields have their defaults.
"""


def make_training_workflow(engine: str, place: str) -> dict[str, Any]:
    """Return ENGINE_training_wf and its launch plans by name, for workflows/ENGINE_training.py.

    If the engine is not installed, prints a note and returns {}. ``place`` describes the cluster in the workflow's
    help.
    """
    name, module = f"{engine}_training_wf", f"workflows.{engine}_training"
    if reason := describe_why_skipped(name):
        plans = [schedule.name for schedule in read_schedules() if schedule.workflow == name]
        print_to_stderr(f"{' with '.join(filter(None, (name, ', '.join(plans))))} is skipped: {reason}")
        return {}
    train = getattr(import_module(f"tasks.{engine}_training"), f"train_on_{engine}")

    def training_wf(hp: Hyperparameters = Hyperparameters()) -> TrainingOutputs:
        checked = check_inputs(hp=hp, engine=engine)
        return train(hp=checked.hp, data=checked.data, run_version=checked.run_version)

    training_wf.__name__, training_wf.__module__ = name, module  # Flyte finds the workflow by name and module
    training_wf.__doc__ = DESCRIPTION.format(place)
    made = workflow(training_wf)
    return {name: made, **make_launch_plans(made, taken=(name,))}
