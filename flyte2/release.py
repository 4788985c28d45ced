"""Data set to champion: train, judge against the champion, and promote or keep. Also manual promotion and rollback.

Run it with ``flyte run --local flyte2/release.py release --model_name digits``.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flyte.io import Dir, File

from flyte2 import pods
from flyte2.files import download, download_from_folder, output_file, output_folder
from flyte2.inputs import HyperparametersInput, PolicyInput, to_input
from flyte2.schedules import read_start_time, scheduled_task
from flyte2.training import check_inputs, train_model
from flyte_ddp.core.settings import read_settings
from flyte_ddp.core.user_code.digest import package_digest
from flyte_ddp.datasets.prepared_folder import DESCRIPTION
from flyte_ddp.release.verdict import Verdict
from flyte_ddp.schedules.entries import RELEASING
from flyte_ddp.task_bodies import finished_run, validation
from flyte_ddp.task_bodies import release as bodies
from flyte_ddp.validation.profile import DataProfile
from flyteplugins.ddp.platform import PLATFORM, task


@dataclass
class Model:
    """The weights of a trained model, and the sidecar."""

    model_state: File
    sidecar: File

    def download(self) -> tuple[Path, Path]:
        """Return the local paths of both files."""
        return download(self.model_state), download(self.sidecar)


@dataclass
class Released:
    """The version of the model, the champion's version now, and the outcome in words."""

    version: str
    champion: str
    outcome: str


@dataclass
class Judged:
    """Whether to promote, the verdict with all checks, and a folder with the verdict's page and the exports."""

    promotes: bool
    verdict: Verdict
    files: Dir


@task(pods.DATA, cache=pods.cache_by_content(("data",), package_digest()), retries=pods.RETRIES, timeout=pods.HOURS)
def profile_dataset(data: Dir, data_version: str) -> DataProfile:
    """Read and decode all samples of a data set, and return the profile.

    Runs once for each version of the data set's content.
    """
    from flyte_ddp.validation.profiling import compute_profile

    del data_version  # an input for the cache key only
    return compute_profile(download(data), read_settings())


@task(pods.CHECKS, retries=pods.RETRIES, report=True)
def validate_dataset(
    data: Dir, profile: DataProfile, hp: HyperparametersInput, model_name: str, policy: PolicyInput
) -> list[str]:
    """Reject data that should not be trained on, and return warnings of differences from the champion's data.

    Also rejects a policy that does not fit the data, and a registry that cannot be written to.
    """
    get_ids = partial(download_from_folder, data, validation.TEST_IDS)
    return validation.validate_dataset(
        PLATFORM, profile, hp.check(), model_name=model_name, policy=policy.check(), download_test_ids=get_ids
    )


@task(pods.STORAGE, retries=pods.RETRIES)
def load_finished_run(run: str, data: Dir) -> Model:
    """Return the model of a finished run in place of training. Rejects data that the run was not trained on."""
    description = download_from_folder(data, DESCRIPTION)
    assert description is not None
    result = finished_run.load_finished_run(run, description)
    return Model(output_file(result.model), output_file(result.sidecar))


@task(pods.PREDICTION, retries=pods.RETRIES, timeout=pods.HOURS, report=True)
def judge_model(
    model: Model, data: Dir, profile: DataProfile, model_name: str, policy: PolicyInput, changes: list[str]
) -> Judged:
    """Compare a model with the champion on the test split of a data set, by the checks of a policy.

    Promotes nothing. The registry counts this use of the test split. The verdict shows ``changes``, which are warnings
    about the data.
    """
    registry = bodies.open_registry(model_name)
    verdict, folder = bodies.judge_model(
        PLATFORM, model.download(), download(data), registry, policy.check(), profile=profile, changes=changes
    )
    return Judged(verdict.promotes, verdict, output_folder(folder))


@task(pods.STORAGE, retries=pods.RETRIES)
def carry_out_verdict(model: Model, verdict: Verdict, files: Dir, model_name: str) -> Released:
    """Store a judged model as a version. If the verdict is to promote, make the version the champion.

    If another model was promoted since the judgement, the champion stays.
    """
    return Released(*bodies.carry_out_verdict(model.download(), verdict, download(files), model_name))


@scheduled_task(pods.CHECKS, RELEASING, retries=pods.RETRIES)
async def release(
    model_name: str = "",
    hp: HyperparametersInput = HyperparametersInput(),
    policy: PolicyInput = PolicyInput(),
    run: str = "",
) -> Released:
    """Train a model, or load a finished run's, and promote the model if it passes all checks against the champion.

    Without ``run``, each start trains anew. Returns the version of the model, the champion's version, and the decision
    with its reason. The registry keeps every judged version. The report of judge_model is a page with all checks.

    Args:
        model_name: Name of the model in the registry (FLYTE_DDP_REGISTRY), such as digits.
        hp: Model, data and training settings. Omitted fields have their defaults.
        policy: Requirements on the data and on the new model. Omitted fields have their defaults.
        run: Folder of a finished run to release without training, or its address, such as s3://bucket/runs/NAME.
    """
    policy.check()
    checked = await check_inputs(hp.check(), kickoff_time=await read_start_time(), model_name=model_name, run=run)
    profile = await profile_dataset(checked.data, checked.data_version)
    hp = to_input(checked.hp)
    changes = await validate_dataset(checked.data, profile, hp, model_name, policy)
    if checked.run_version:
        trained = await train_model(hp, checked.data, checked.run_version)
        model = Model(trained.model_state, trained.sidecar)
    else:
        model = await load_finished_run(run, checked.data)
    judged = await judge_model(model, checked.data, profile, model_name, policy, changes)
    return await carry_out_verdict(model, judged.verdict, judged.files, model_name)


@task(pods.STORAGE, retries=pods.RETRIES)
def promote(model_name: str, version: str, reason: str) -> Released:
    """Make a stored version the champion. The log of the registry records the author of this run and the reason.

    Args:
        model_name: Name of the model in the registry.
        version: Version to promote: the SHA-256 of its weights, or at least the first 12 digits.
        reason: Why, in your words.
    """
    return Released(*bodies.promote_version(model_name, version, reason))


@task(pods.STORAGE, retries=pods.RETRIES)
def rollback(model_name: str, reason: str) -> Released:
    """Take back the last promotion: the previous champion is the champion again.

    Args:
        model_name: Name of the model in the registry.
        reason: Why, in your words. The log of the registry keeps the text.
    """
    return Released(*bodies.roll_back_champion(model_name, reason))


@task(pods.PREDICTION, retries=pods.RETRIES, timeout=pods.HOURS, report=True)
def evaluate(
    model_name: str,
    dataset: str,
    version: str = "",
    data_source: str = "",
    test_dataset: str = "",
    policy: PolicyInput = PolicyInput(),
) -> Judged:
    """Judge a stored version against the champion on the test split of any data set. Nothing is promoted.

    Args:
        model_name: Name of the model in the registry.
        dataset: Data set on whose test split both models are judged, as in the hyperparameters.
        version: Version to judge: the SHA-256 of its weights, or at least the first 12 digits. Empty: the champion.
        data_source: Where the files of dataset are, as in the hyperparameters. Empty for the usual places.
        test_dataset: Data set to judge on in place of the tenth of dataset that is held out.
        policy: Requirements on the version. Omitted fields have their defaults.
    """
    verdict, folder = bodies.evaluate_version(
        PLATFORM,
        model_name,
        version,
        dataset=dataset,
        data_source=data_source,
        test_dataset=test_dataset,
        policy=policy.check(),
    )
    return Judged(verdict.promotes, verdict, output_folder(folder))
