"""Reject faulty data, and warn of differences from the champion's data, before a model is trained."""

from collections.abc import Callable
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UnreachableError, UserError, print_to_stderr
from flyte_ddp.pods.paths import read_registry_address
from flyte_ddp.pods.platforms import Platform
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.promotion import read_data_profile
from flyte_ddp.release.registry import Registry
from flyte_ddp.validation.profile import DataProfile, render_profile

TEST_IDS = "test_ids.npy"  # the file of user-defined ids in the folder of a prepared data set
HELD_OUT = (
    "test_dataset is not set: the tenth that is held out for testing changes when the data grow, and the "
    "champion was trained on most of the new tenth; set test_dataset to a separate test set"
)


def validate_dataset(
    platform: Platform,
    profile: DataProfile,
    hp: Hyperparameters,
    *,
    model_name: str,
    policy: Policy,
    download_test_ids: Callable[[], Path | None],
) -> list[str]:
    """Reject data that should not be trained on, and return warnings of differences from the champion's data.

    Also rejects a policy that could not judge any model of this data. Queries the registry, and rejects a registry that
    cannot be written to or whose log has a gap. Prints the warnings, and publishes a page with the profile.

    Args:
        platform: The platform that executes the task.
        profile: The profile of the data.
        hp: Hyperparameters of the training.
        model_name: Name of the model in the registry.
        policy: Requirements on the data and the model.
        download_test_ids: Returns the path of the file TEST_IDS of the data set, or None if there is no such file.

    Raises:
        UserError: The data, the policy or the registry are unfit, or differ too much from the champion's data.
    """
    from flyte_ddp.release.policy_check import check_policy
    from flyte_ddp.validation.profiling import SHIFT, Difference, check_profile, iterate_differences_from_champion

    check_profile(profile, hp, max_duplicates=policy.max_duplicates, max_conflicts=policy.max_conflicts)
    check_policy(policy, hp, profile, read_test_ids(download_test_ids()) if policy.slices else ())
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
    platform.publish_page("Data set", render_profile(profile, hp.dataset, warnings))
    return warnings


def read_test_ids(path: Path | None) -> list[str]:
    """Return the user-defined ids of the test samples from a file, or [] without a file."""
    import numpy as np

    return [*map(str, np.load(path))] if path else []
