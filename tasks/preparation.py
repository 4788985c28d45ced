"""Tasks that come before training: check what was asked for, and fetch the data set."""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

from flytekit import HashMethod, task
from flytekit.types.directory import FlyteDirectory

from flyte_ddp import hardware, identity
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, fingerprint, is_whole
from flyte_ddp.run_folder import is_finished
from flyte_ddp.settings import from_environment
from tasks import places, pods, recovery


class CheckedInputs(NamedTuple):
    """What identifies the data and the run; locally with a token of the folder that holds them."""

    data_version: str
    run_version: str


NO_SCHEDULE = datetime(1970, 1, 1, tzinfo=timezone.utc)  # kickoff time of a retraining that no schedule started


def content_digest(data: FlyteDirectory) -> str:
    """The digest of a prepared data set's content: what training is cached by."""
    digest: str = json.loads((Path(data.path) / "dataset.json").read_text())["digest"]
    return digest


PreparedData = Annotated[FlyteDirectory, HashMethod(content_digest)]


@recovery.mistakes_in_inputs
@task(**pods.light_pod(), retries=2)
@recovery.retried()
def check_inputs(hp: Hyperparameters, kickoff_time: Optional[datetime] = None, engine: str = "") -> CheckedInputs:
    """Check hyperparameters and identify the data, before any GPU pod starts.

    The engine (elastic, ray or dask; none for training in one pod) decides how many GPUs there will be.

    Never cached. Its outputs change exactly when training has to run again: with the data, the code, the weights to
    start from, or the kickoff time of a schedule that retrains at every tick.
    """
    pods.check_code()
    identity.check_known_image_size(hp)
    hardware.check_requested(hp, *pods.nodes_and_ranks(engine))
    data = fingerprint(hp.dataset, hp.data_source, hp.test_dataset)
    if kickoff_time == NO_SCHEDULE:
        kickoff_time = datetime.now(timezone.utc)
    run = places.free_run(identity.run_name(hp, data, trigger=kickoff_time.isoformat() if kickoff_time else ""))
    return CheckedInputs(
        data_version=places.with_token(f"datasets/{data}", complete=is_whole(places.folder_for(f"datasets/{data}"))),
        run_version=places.with_token(run, complete=is_finished(places.folder_for(run))),
    )


@task(**pods.data_pod(), retries=2, cache=pods.by_content(ignored_inputs=("data_source",)))
@recovery.retried()
def fetch_dataset(dataset: str, data_source: str, test_dataset: str, data_version: str) -> PreparedData:
    """Download, verify and prepare a data set, once for each version of its content."""
    pods.check_code()
    folder = places.folder_for(places.without_token(data_version))
    fetch(dataset, data_source, folder, test_dataset=test_dataset, progress=from_environment().progress)
    return places.directory(folder)
