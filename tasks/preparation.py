"""Tasks that come before training: check the inputs, and fetch the data set."""

from datetime import datetime
from typing import NamedTuple, Optional

from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.config import Hyperparameters
from tasks import pods
from tasks.flyte import flyte_task, output_folder


class CheckedInputs(NamedTuple):
    """Inputs of training: all hyperparameters, the prepared data set, and the versions of the data and the run.

    The run's version is empty if nothing is to be trained.
    """

    hp: Hyperparameters
    data: FlyteDirectory
    data_version: str
    run_version: str


@flyte_task(**pods.data_pod_options(), cache=pods.cache_by_content(ignored_inputs=("data_source",)))
def fetch_dataset(dataset: str, data_source: str, test_dataset: str, data_version: str) -> FlyteDirectory:
    """Download, verify and prepare a data set, once for each version of the content, and return the folder.

    The data_version is an output of check_inputs. The other inputs are the hyperparameters of the same names.
    """
    from flyte_ddp.pods.run_inputs import find_or_fetch_data_set

    return output_folder(find_or_fetch_data_set(dataset, data_source, test_dataset, data_version))


@flyte_task(**pods.registry_pod_options(), execution_mode=PythonFunctionTask.ExecutionBehavior.DYNAMIC)
def check_inputs(
    hp: Hyperparameters,
    kickoff_time: Optional[datetime] = None,
    engine: str = "",
    model_name: Optional[str] = None,
    run: str = "",
) -> CheckedInputs:
    """Check hyperparameters, identify the run, and prepare the data, before any GPU pod starts.

    The engine is elastic, ray, dask, or empty for training in a single pod. If a data set is downloaded as a whole, the
    task fetch_dataset prepares the data on a larger disk. With a model_name also checks the registry's address. Given
    the folder or address of a finished ``run``, returns the hyperparameters of the run, and an empty run_version.

    This task is never cached. The outputs change exactly when training has to run again. This is the case for new data,
    code or initial weights, and at each kickoff time of a schedule that always retrains.
    """
    from flyte_ddp.datasets import needs_no_download
    from flyte_ddp.pods.run_inputs import find_or_fetch_data_set
    from flyte_ddp.task_bodies.preparation import check_training_inputs

    hp, data_version, run_version = check_training_inputs(hp, kickoff_time, engine, model_name, run)
    data_inputs = (hp.dataset, hp.data_source, hp.test_dataset, data_version)
    if needs_no_download(hp.dataset):
        data = output_folder(find_or_fetch_data_set(*data_inputs, sample=hp.sample))
    else:
        data = fetch_dataset(*data_inputs)
    return CheckedInputs(hp=hp, data=data, data_version=data_version, run_version=run_version)
