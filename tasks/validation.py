"""Tasks between fetching a data set and training: profile the samples, and reject faulty data."""

from pathlib import Path
from typing import List, NamedTuple

from flytekit import Deck
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UnreachableError, UserError, print_to_stderr
from flyte_ddp.core.settings import read_settings
from flyte_ddp.core.user_code.digest import package_digest
from flyte_ddp.pods.paths import read_registry_address
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.promotion import read_data_profile
from flyte_ddp.release.registry import Registry
from flyte_ddp.validation.profile import DataProfile, render_profile
from tasks import pods
from tasks.flyte import download_from_folder, flyte_task

HELD_OUT = (
    "test_dataset is not set: the tenth that is held out for testing changes when the data grow, and the "
    "champion was trained on most of the new tenth; set test_dataset to a separate test set"
)


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
    from flyte_ddp.release.policy_check import check_policy
    from flyte_ddp.validation.profiling import SHIFT, Difference, check_profile, iterate_differences_from_champion

    check_profile(profile, hp, max_duplicates=policy.max_duplicates, max_conflicts=policy.max_conflicts)
    check_policy(policy, hp, profile, read_test_ids(data) if policy.slices else ())
    registry = Registry(read_registry_address(), model_name)
    # A registry that cannot be written to, or whose log has a gap, must be rejected before training.
    registry.check_storage_never_overwrites()
    history = registry.read_log()
    warnings = [HELD_OUT] if hp.data_kind.prefix and not hp.test_dataset else []
    found: list[Difference] = []
    try:
        champions = read_data_profile(registry, history[-1]) if history else None
        if champions is not None:
            found += iterate_differences_from_champion(profile, champions, min(SHIFT, policy.max_shift))
    except UnreachableError:
        raise
    except UserError as error:  # the champion's profile is damaged or missing, so no data are compared
        warnings.append(f"the data are not compared with the champion's: {error}")
    warnings += [each.text for each in found]
    for warning in warnings:
        print_to_stderr(f"warning: {warning}")
    if too_far := [each.text for each in found if each.share > policy.max_shift]:
        fix = "find out why, or raise max_shift in --policy"
        raise UserError("\n".join(f"max_shift={policy.max_shift:g}: {text}; {fix}" for text in too_far))
    Deck("Data set", render_profile(profile, hp.dataset, warnings))
    return Validated(data, warnings)


def read_test_ids(data: FlyteDirectory) -> list[str]:
    """Return the user-defined ids of the test samples, or [] if the data set has none.

    Downloads only the file test_ids.npy.
    """
    import numpy as np

    path = download_from_folder(data, "test_ids.npy")
    return [*map(str, np.load(path))] if path else []
