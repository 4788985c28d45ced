"""Data set to champion: train, judge against the champion, and promote or keep; and what a person decides.

Run it with ``pyflyte run workflows/release.py release_wf --model_name digits``.
"""

from datetime import datetime

from flytekit import conditional, workflow

from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods.environment import REGISTRY_VARIABLE
from flyte_ddp.pods.preparation import NO_SCHEDULE
from flyte_ddp.release.policy import Policy
from tasks.preparation import check_inputs
from tasks.release import (
    Judged,
    Released,
    evaluate_version,
    judge_model,
    keep_champion,
    promote_challenger,
    promote_version,
    roll_back_champion,
)
from tasks.training import train_model
from tasks.validation import profile_dataset, validate_dataset
from workflows.schedules import make_launch_plans


@workflow
def release_wf(
    model_name: str = "",
    hp: Hyperparameters = Hyperparameters(),
    policy: Policy = Policy(),
    kickoff_time: datetime = NO_SCHEDULE,
) -> Released:
    """Train an image classifier, judge it against the champion of that name, and promote it if the verdict says so.

    In: hp as of training_wf; model_name, which names a model in the registry (FLYTE_DDP_REGISTRY); policy, what a
    challenger must show; kickoff_time, which a schedule fills in (by hand it stays 1 January 1970, which means now).
    Out: the version that was trained, the champion's, and what was decided and why; the deck of judge_model is the
    verdict's page.

    Args:
        model_name: Name of the model in the registry, such as digits. Must be given: without it nothing is trained.
        hp: What to train, on which data and how; what is left out has its default.
        policy: What the data must be like and what a challenger must show; what is left out has its default.
        kickoff_time: A schedule's tick, which the schedule fills in. Leave 1 January 1970, which means now.
    """
    checked = check_inputs(hp=hp, kickoff_time=kickoff_time, model_name=model_name)
    profile = profile_dataset(data=checked.data, data_version=checked.data_version)
    validated = validate_dataset(
        data=checked.data, profile=profile, hp=checked.hp, model_name=model_name, policy=policy
    )
    trained = train_model(hp=checked.hp, data=validated.data, run_version=checked.run_version)
    judged = judge_model(
        model_state=trained.model_state,
        sidecar=trained.sidecar,
        data=validated.data,
        profile=profile,
        model_name=model_name,
        policy=policy,
    )
    challenger = {
        "model_state": trained.model_state,
        "sidecar": trained.sidecar,
        "verdict": judged.verdict,
        "files": judged.files,
        "model_name": model_name,
    }
    return (
        conditional("gate")
        .if_(judged.promotes.is_true())
        .then(promote_challenger(**challenger))
        .else_()
        .then(keep_champion(**challenger))
    )


@workflow
def promote_wf(model_name: str, version: str, reason: str) -> Released:
    """Make a stored version the champion: whoever launches this approves it, and Flyte and the log record that.

    In: the version, the SHA-256 of its weights, as release_wf returns it; and why. Out: the version and the champion.

    Args:
        model_name: Name of the model in the registry.
        version: SHA-256 of the weights to promote, as release_wf returns it.
        reason: Why; the log keeps it.
    """
    return promote_version(model_name=model_name, version=version, reason=reason)


@workflow
def rollback_wf(model_name: str, reason: str) -> Released:
    """Take the last promotion back: the champion before it is the champion again.

    In: why. Out: the version that is champion from now on.

    Args:
        model_name: Name of the model in the registry.
        reason: Why; the log keeps it.
    """
    return roll_back_champion(model_name=model_name, reason=reason)


@workflow
def evaluate_wf(
    model_name: str,
    dataset: str,
    version: str = "",
    data_source: str = "",
    test_dataset: str = "",
    policy: Policy = Policy(),
) -> Judged:
    """Judge a stored version against the champion on the test split of any data set; nothing is promoted.

    In: the version (empty: the champion itself), and the data set as in the hyperparameters. Out: the verdict, as of a
    first look at these data, and its page.

    Args:
        model_name: Name of the model in the registry.
        dataset: Data set on whose test split both models are judged, as in the hyperparameters.
        version: SHA-256 of the weights to judge, as release_wf returns it. Empty judges the champion.
        data_source: Where the files of dataset are, as in the hyperparameters. Empty for the usual places.
        test_dataset: Data set to judge on in place of the tenth of dataset that is held out.
        policy: What the version must show; what is left out has its default.
    """
    return evaluate_version(
        model_name=model_name,
        version=version,
        dataset=dataset,
        data_source=data_source,
        test_dataset=test_dataset,
        policy=policy,
    )


globals().update(make_launch_plans(release_wf, taken=globals(), needs=REGISTRY_VARIABLE))
