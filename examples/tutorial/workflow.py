"""The tutorial as a Flyte workflow: the training function is the body of a task with ``task_config=DDP(...)``.

    pyflyte run examples/tutorial/workflow.py pytorch_training_wf --hp '{"epochs": 3}'

Changes to the tutorial: the plugin starts the ranks in the task's pod, and saves go to the blob store. A separate task
writes scikit-learn's digits in MNIST's format, so that a single process prepares the data. The weights are a FlyteFile,
not a PythonPickledFile, because torch.save() writes zip files, and flytekit may check the format.
"""

import tempfile
from pathlib import Path
from typing import List, NamedTuple

from flytekit import Resources, task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from examples.sample_data import unpack_mnist_files
from examples.tutorial.tutorial import MODEL_FILE, Hyperparameters, train_mnist
from flyte_ddp import current_rank
from flytekitplugins.ddp import DDP


class TrainingOutputs(NamedTuple):
    epoch_accuracies: List[float]
    model_state: FlyteFile


@task(cache=True, cache_version="1")
def prepare_mnist() -> FlyteDirectory:
    return FlyteDirectory(str(unpack_mnist_files("MNIST", None, Path(tempfile.mkdtemp()))))


@task(task_config=DDP(num_ranks=2), retries=2, requests=Resources(cpu="2", mem="2Gi"))
def pytorch_mnist_task(hp: Hyperparameters, data: FlyteDirectory) -> TrainingOutputs:
    accuracies = train_mnist(hp, data.download())
    return TrainingOutputs(accuracies, FlyteFile(str(current_rank().folder / MODEL_FILE)))


@workflow
def pytorch_training_wf(hp: Hyperparameters = Hyperparameters()) -> TrainingOutputs:
    return pytorch_mnist_task(hp=hp, data=prepare_mnist())
