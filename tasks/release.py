"""Tasks that release a model: comparison with the champion, promotion and rollback. None of them is cached."""

from pathlib import Path
from typing import List, NamedTuple

from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.release.policy import Policy
from flyte_ddp.release.verdict import Released, Verdict
from flyte_ddp.task_bodies import release
from flyte_ddp.validation.profile import DataProfile
from tasks import pods
from tasks.flyte import PLATFORM, PythonPickledFile, flyte_task, output_folder
from tasks.input_form import KnownTransformer

TypeEngine.register(KnownTransformer(Verdict))


class Judged(NamedTuple):
    """Whether to promote, the verdict with all checks, and a folder with the verdict's page and the exports."""

    promotes: bool
    verdict: Verdict
    files: FlyteDirectory


@flyte_task(**pods.prediction_pod_options())
def judge_model(
    model_state: PythonPickledFile,
    sidecar: FlyteFile,
    data: FlyteDirectory,
    profile: DataProfile,
    model_name: str,
    policy: Policy,
    changes: List[str],
) -> Judged:
    """Compare a model with the champion on the test split of a data set, by the checks of a policy.

    Promotes nothing. The registry counts the comparison. The verdict shows ``changes``, which are notes on the data.
    """
    model, registry = (Path(model_state.download()), Path(sidecar.download())), release.open_registry(model_name)
    verdict, folder = release.judge_model(
        PLATFORM, model, Path(data.download()), registry, policy, profile=profile, changes=changes
    )
    return Judged(verdict.promotes, verdict, output_folder(folder))


@flyte_task(**pods.prediction_pod_options())
def evaluate_version(
    model_name: str, version: str, dataset: str, data_source: str, test_dataset: str, policy: Policy
) -> Judged:
    """Compare a stored version with the champion on the test split of any data set.

    Promotes nothing. An empty ``version`` means the champion.
    """
    verdict, folder = release.evaluate_version(
        PLATFORM,
        model_name,
        version,
        dataset=dataset,
        data_source=data_source,
        test_dataset=test_dataset,
        policy=policy,
    )
    return Judged(verdict.promotes, verdict, output_folder(folder))


@flyte_task(**pods.storing_pod_options())
def carry_out_verdict(
    model_state: PythonPickledFile, sidecar: FlyteFile, verdict: Verdict, files: FlyteDirectory, model_name: str
) -> Released:
    """Store a judged model as a version. If the verdict is to promote, make the version the champion.

    If another model was promoted since the judgement, the champion stays.
    """
    model = Path(model_state.download()), Path(sidecar.download())
    return release.carry_out_verdict(model, verdict, Path(files.download()), model_name)


@flyte_task(**pods.storing_pod_options())
def promote_version(model_name: str, version: str, reason: str) -> Released:
    """Make a stored version the champion, at the request of a user. The log records the reason."""
    return release.promote_version(model_name, version, reason)


@flyte_task(**pods.storing_pod_options())
def roll_back_champion(model_name: str, reason: str) -> Released:
    """Make the previous champion the champion again. The log records the reason."""
    return release.roll_back_champion(model_name, reason)
