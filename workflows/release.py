"""Data set to champion: train, judge against the champion, and promote or keep. Also manual promotion and rollback.

Run it with ``pyflyte run workflows/release.py release_wf --model_name digits``.
"""

from datetime import datetime

from flytekit import conditional, workflow

from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods.platforms import NO_SCHEDULE
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.verdict import Released
from tasks.finished_run import load_finished_run
from tasks.preparation import check_inputs
from tasks.release import Judged, carry_out_verdict, evaluate_version, judge_model, promote_version, roll_back_champion
from tasks.training import train_model
from tasks.validation import profile_dataset, validate_dataset
from workflows.schedules import make_launch_plans


@workflow
def release_wf(
    model_name: str = "",
    hp: Hyperparameters = Hyperparameters(),
    policy: Policy = Policy(),
    kickoff_time: datetime = NO_SCHEDULE,
    run: str = "",
) -> Released:
    """Train a model, or load a finished run's, and promote the model if it passes all checks against the champion.

    Returns the version of the model, the champion's version, and the decision with its reason. The registry keeps every
    judged version. The deck of judge_model is a page with all checks.

    Args:
        model_name: Name of the model in the registry (FLYTE_DDP_REGISTRY), such as digits. Must be given.
        hp: Model, data and training settings. Omitted fields have their defaults.
        policy: Requirements on the data and on the new model. Omitted fields have their defaults.
        kickoff_time: Time at which a schedule started this execution, set by the schedule. Leave 1 January 1970 for
            now.
        run: Folder of a finished run to release without training, or its address, such as s3://bucket/runs/NAME.
    """
    checked = check_inputs(hp=hp, kickoff_time=kickoff_time, model_name=model_name, run=run)
    profile = profile_dataset(data=checked.data, data_version=checked.data_version)
    valid = validate_dataset(data=checked.data, profile=profile, hp=checked.hp, model_name=model_name, policy=policy)
    trained = (
        conditional("model")
        .if_(checked.run_version == "")
        .then(load_finished_run(run=run, data=valid.data))
        .else_()
        .then(train_model(hp=checked.hp, data=valid.data, run_version=checked.run_version))
    )
    model = {"model_state": trained.model_state, "sidecar": trained.sidecar, "model_name": model_name}
    judged = judge_model(**model, data=valid.data, profile=profile, policy=policy, changes=valid.warnings)
    return carry_out_verdict(**model, verdict=judged.verdict, files=judged.files)


@workflow
def promote_wf(model_name: str, version: str, reason: str) -> Released:
    """Make a stored version the champion. The log of the registry records the author of this execution and the reason.

    Returns the version, the champion's version now, and the outcome in words.

    Args:
        model_name: Name of the model in the registry.
        version: Version to promote: the SHA-256 of its weights, or at least the first 12 digits.
        reason: Why, in your words.
    """
    return promote_version(model_name=model_name, version=version, reason=reason)


@workflow
def rollback_wf(model_name: str, reason: str) -> Released:
    """Take back the last promotion: the previous champion is the champion again.

    Returns the version that is the champion again, the champion's version now, and the outcome in words.

    Args:
        model_name: Name of the model in the registry.
        reason: Why, in your words. The log of the registry keeps the text.
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
    """Judge a stored version against the champion on the test split of any data set. Nothing is promoted.

    Returns the policy's decision, the verdict, and a folder with a page of all checks. The verdict is computed as for a
    first judgement on this data.

    Args:
        model_name: Name of the model in the registry.
        dataset: Data set on whose test split both models are judged, as in the hyperparameters.
        version: Version to judge: the SHA-256 of its weights, or at least the first 12 digits. Empty: the champion.
        data_source: Where the files of dataset are, as in the hyperparameters. Empty for the usual places.
        test_dataset: Data set to judge on in place of the tenth of dataset that is held out.
        policy: Requirements on the version. Omitted fields have their defaults.
    """
    return evaluate_version(
        model_name=model_name,
        version=version,
        dataset=dataset,
        data_source=data_source,
        test_dataset=test_dataset,
        policy=policy,
    )


globals().update(make_launch_plans(release_wf, taken=globals()))
