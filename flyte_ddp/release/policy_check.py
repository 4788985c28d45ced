"""Checks of a policy before training."""

from collections.abc import Sequence

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.user_code.callables import load_callable
from flyte_ddp.datasets.prepared import resolve_class_names
from flyte_ddp.objectives import Facts, make_objective
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.scores import check_number_of_calls, needs_call_per_sample
from flyte_ddp.release.slices import group_by_slice, read_slices
from flyte_ddp.validation.profile import DataProfile


def check_policy(policy: Policy, hp: Hyperparameters, profile: DataProfile, test_ids: Sequence[str] = ()) -> None:
    """Raise UserError if the policy cannot judge a model with these hyperparameters and data.

    Reads the file of slices, and imports a user-defined objective. If images are encoded, the ids in the file are not
    checked. If the objective is a user-defined function, the number of test samples is not checked. These ids and the
    function's measures are not known before training.

    Args:
        policy: The policy, of which only ``slices`` is read.
        hp: The hyperparameters.
        profile: The profile of the data set.
        test_ids: The ids of the test samples. If empty, the numbers of the samples are the ids.

    Raises:
        UserError: The file of slices cannot be read, has no rows, or has an unknown id. The objective's measure needs
            a call for each sample, and the test split has more than 20,000 samples. The objective cannot be made.
    """
    samples = profile.test.samples
    if policy.slices and hp.data_kind.encoded:
        read_slices(policy.slices)
    elif policy.slices:
        group_by_slice(policy.slices, test_ids or [*map(str, range(samples))], ())
    if ":" in hp.objective and not isinstance(load_callable(hp.objective), type):
        return
    classes = resolve_class_names(profile.classes, hp, may_be_empty=True)
    facts = Facts(classes, tuple(profile.target_shape), select_by=hp.select_by)
    objective = make_objective(hp.objective, facts, hp.parse_options().get("objective", {}))
    if needs_call_per_sample(objective):
        check_number_of_calls(samples)
