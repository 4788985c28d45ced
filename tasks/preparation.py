"""Tasks that come before training: check what was asked for, and fetch the data set."""

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Optional

from flytekit import Deck, FlyteContextManager, dynamic, task
from flytekit.core.context_manager import ExecutionState
from flytekit.types.directory import FlyteDirectory

from flyte_ddp import datasets, hardware
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.runs import identity
from flyte_ddp.runs.run_folder import is_finished
from flyte_ddp.settings import check_wandb, from_environment
from tasks import places, pods, recovery


class CheckedInputs(NamedTuple):
    """What training needs: every hyperparameter, the prepared data set, and what identifies it and the run."""

    hp: Hyperparameters
    data: FlyteDirectory
    data_version: str
    run_version: str


NO_SCHEDULE = datetime(1970, 1, 1, tzinfo=UTC)  # kickoff time of a retraining that no schedule started


@task(**pods.data_pod(), cache=pods.by_content(ignored_inputs=("data_source",)))
@recovery.guarded()
def fetch_dataset(dataset: str, data_source: str, test_dataset: str, data_version: str) -> FlyteDirectory:
    """Download, verify and prepare a data set, once for each version of its content."""
    return prepared(dataset, data_source, test_dataset, data_version)


@recovery.mistakes_in_inputs
@dynamic(**pods.with_registry(pods.light_pod()), **pods.WITH_DECK)
@recovery.guarded()
def check_inputs(
    hp: Hyperparameters,
    kickoff_time: Optional[datetime] = None,
    engine: str = "",
    model_name: Optional[str] = None,
) -> CheckedInputs:
    """Check hyperparameters, identify the run, and prepare the data, before any GPU pod starts.

    The engine (elastic, ray or dask; none for training in one pod) decides how many GPUs there will be. Of data that
    are not downloaded as a whole (the digits, shards, streams, image folders) there is little to prepare, so that it is
    done at once; others are fetched by a task of its own, with a larger disk. The model's name in the registry, and the
    registry's address, are checked where the run is for a release (model_name is given).

    Never cached. Its outputs change exactly when training has to run again: with the data, the code, the weights to
    start from, or the kickoff time of a schedule that retrains at every tick.
    """
    if places.is_local():  # what pods of a cluster have was checked when it was registered
        check_wandb()
    if model_name is not None:
        check_release(model_name)
    identity.check_known_image_size(hp)
    hardware.check_requested(hp, *pods.nodes_and_ranks(engine))
    fingerprint = datasets.fingerprint(hp.dataset, hp.data_source, hp.test_dataset)
    if kickoff_time == NO_SCHEDULE:
        kickoff_time = datetime.now(UTC)
    name = identity.run_name(hp, fingerprint, trigger=kickoff_time.isoformat() if kickoff_time else "")
    run = places.free_run(name)
    data = f"datasets/{fingerprint}"
    data_version = places.with_token(data, complete=datasets.is_whole(places.folder_for(data)))
    of_data = (hp.dataset, hp.data_source, hp.test_dataset, data_version)
    at_once = datasets.is_quickly_prepared(hp.dataset)
    found = prepared(*of_data) if at_once else fetch_dataset(*of_data)
    show_plan(hp, places.folder_for(data) if at_once else None, run)
    return CheckedInputs(
        hp=hp,
        data=found,
        data_version=data_version,
        run_version=places.with_token(run, complete=is_finished(places.folder_for(run))),
    )


def check_release(model_name: str) -> None:
    """Refuse a release without a model's name or without a registry, before data are fetched and a model is trained.

    Raises:
        UserError: the name is empty or has other characters than the registry takes, or pods were given no registry.
    """
    from flyte_ddp.release.registry import Registry

    if not model_name:
        raise UserError("model_name is empty: give the name of the model in the registry, such as digits")
    Registry(places.registry(), model_name)


def show_plan(hp: Hyperparameters, data: Optional[Path], run: str) -> None:
    """In a pod: the page of the task in the console."""
    if places.is_local():
        return
    from flyte_ddp.report import previews

    context = FlyteContextManager.current_context()
    # flytekit writes no pages of dynamic tasks, so the context says that this is an ordinary one.
    state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with suppress(Exception), FlyteContextManager.with_context(context.with_execution_state(state)):
        Deck("What is trained", previews.of_run(hp, data, run))
        Deck.publish()


def prepared(dataset: str, data_source: str, test_dataset: str, data_version: str) -> FlyteDirectory:
    """The folder of a data set, which is fetched if it is not there."""
    folder = places.folder_for(data_version)
    progress = from_environment().progress
    return places.directory(datasets.fetch(dataset, data_source, folder, test_dataset=test_dataset, progress=progress))
