"""Tasks between fetching a data set and training: profile the samples, and reject faulty data."""

from functools import partial
from pathlib import Path
from typing import List, NamedTuple

from flytekit.types.directory import FlyteDirectory

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import read_settings
from flyte_ddp.core.user_code.digest import package_digest
from flyte_ddp.release.policy import Policy
from flyte_ddp.task_bodies import validation
from flyte_ddp.validation.profile import DataProfile
from tasks import pods
from tasks.flyte import PLATFORM, download_from_folder, flyte_task


class Validated(NamedTuple):
    """The data set, unchanged, and warnings, such as differences from the champion's data set."""

    data: FlyteDirectory
    warnings: List[str]


@flyte_task(**pods.data_pod_options(), cache=pods.cache_by_content(ignored_inputs=("data",), code=package_digest()))
def profile_dataset(data: FlyteDirectory, data_version: str) -> DataProfile:
    """Read and decode all samples of a data set, and return the profile.

    Runs once for each version of the data set's content.
    """
    from flyte_ddp.validation.profiling import compute_profile

    del data_version  # an input for the cache key only
    return compute_profile(Path(data.download()), read_settings())


@flyte_task(**pods.registry_pod_options(), **pods.WITH_DECK)
def validate_dataset(
    data: FlyteDirectory, profile: DataProfile, hp: Hyperparameters, model_name: str, policy: Policy
) -> Validated:
    """Reject data that should not be trained on, and warn of differences from the champion's data.

    Also rejects a policy that could not judge any model of this data. Also rejects a registry that cannot be written to
    or whose log has a gap.
    """
    download_test_ids = partial(download_from_folder, data, validation.TEST_IDS)
    warnings = validation.validate_dataset(
        PLATFORM, profile, hp, model_name=model_name, policy=policy, download_test_ids=download_test_ids
    )
    return Validated(data, warnings)
