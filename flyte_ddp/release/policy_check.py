"""Checks of a policy before training."""

from collections.abc import Sequence

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.user_code.callables import load_callable
from flyte_ddp.datasets.prepared import resolve_class_names
from flyte_ddp.objectives import Facts, make_objective
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.scores import check_number_of_calls, needs_calls
from flyte_ddp.release.slices import group_by_slice, read_slices
from flyte_ddp.validation.profile import DataProfile


def check_policy(policy: Policy, hp: Hyperparameters, profile: DataProfile, test_ids: Sequence[str] = ()) -> None:
    """Raise UserError if the policy cannot judge a model with these hyperparameters and data.

    Reads the file of slices, and imports a user-defined objective. Ids of encoded images and measures of a user-defined
    objective function are not known before training, and are not checked.

    Args:
        policy: The policy, of which slices and the number of samples are checked.
        test_ids: The ids of the test samples. If empty, the numbers of the samples are the ids.
    """
    samples = profile.test.samples
    if policy.slices and hp.encoded_kind:
        read_slices(policy.slices)
    elif policy.slices:
        group_by_slice(policy.slices, test_ids or [*map(str, range(samples))], ())
    if ":" in hp.objective and not isinstance(load_callable(hp.objective), type):
        return
    classes = resolve_class_names(profile.classes, hp, of_numbers=True)
    facts = Facts(classes, tuple(profile.target_shape), select_by=hp.select_by)
    objective = make_objective(hp.objective, facts, hp.parse_options().get("objective", {}))
    if needs_calls(objective):
        check_number_of_calls(samples)
