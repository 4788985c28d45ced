"""Compare a model with the champion, promote a model, and take a promotion back."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from flyte_ddp.core.machine import resources
from flyte_ddp.core.settings import read_settings
from flyte_ddp.pods import paths
from flyte_ddp.pods.outcomes import print_outcome
from flyte_ddp.pods.platforms import Platform, describe_author, is_in_pod
from flyte_ddp.pods.run_inputs import find_or_fetch_data_set
from flyte_ddp.release import promotion
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.promotion_log import Entry
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.verdict import Released, Verdict
from flyte_ddp.validation.profile import DataProfile


class Judgement(NamedTuple):
    """The verdict, and the folder with the verdict's page and the files that a promotion stores."""

    verdict: Verdict
    folder: Path


def open_registry(model_name: str) -> Registry:
    return Registry(paths.read_registry_address(), model_name)


def judge_model(
    platform: Platform,
    model: tuple[Path, Path],
    data: Path,
    registry: Registry,
    policy: Policy,
    *,
    profile: DataProfile | None = None,
    changes: Sequence[str] = (),
) -> Judgement:
    """Compare a model with the champion on a prepared data set, and publish the verdict's page.

    Makes a new folder, and writes the page into the folder. Only with the ``profile`` of the data, the verdict may
    promote, and the registry counts the comparison. The folder then also gets exports, profile, reference, and digests
    that identify the samples. Promotes nothing.

    Args:
        platform: The platform that executes the task.
        model: The paths of model.pt and model.json.
        data: The folder of the prepared data set.
        registry: The registry of the model.
        policy: The checks to pass.
        profile: The profile of the data.
        changes: Notes on the data, which the verdict shows.
    """
    from flyte_ddp.predict.sample_columns import Reference
    from flyte_ddp.release.judge import judge_challenger
    from flyte_ddp.release.page import write_verdict_page
    from flyte_ddp.release.samples import SAMPLES

    resources.check_expected_gpus(resources.count_gpus())
    with paths.make_dated_folder("verdicts") as folder:
        judgement = judge_challenger(
            *model,
            data,
            registry,
            policy,
            settings=read_settings(),
            may_promote=profile is not None,
            exports=folder if profile is not None else None,
            changes=changes,
        )
        page = write_verdict_page(judgement, registry.name, folder / "verdict.html")
        if profile is not None:
            (folder / promotion.PROFILE).write_text(profile.to_json(indent=1), encoding="utf-8")
            if (evaluation := judgement.full_evaluation) is not None:
                judgement.identify_samples().write(folder / SAMPLES)
                if evaluation.monitoring_columns:
                    Reference(evaluation.monitoring_columns, evaluation.columns).write_file(
                        folder / promotion.REFERENCE
                    )
    platform.publish_page("Verdict", page.read_text(encoding="ascii"))
    paths.print_local_files(f"{judgement.verdict.describe()}; written to", {page: "all checks, to open in a browser"})
    return Judgement(judgement.verdict, folder)


def evaluate_version(
    platform: Platform,
    model_name: str,
    version: str,
    *,
    dataset: str,
    data_source: str,
    test_dataset: str,
    policy: Policy,
) -> Judgement:
    """Compare a stored version with the champion on the test split of any data set, and publish the verdict's page.

    Makes a new folder for the page. Promotes nothing. An empty ``version`` means the champion.
    """
    from flyte_ddp.predict.predict import read_sample_setting  # imports torch, as the judgement does

    registry = open_registry(model_name)
    with TemporaryDirectory() as temporary:
        fetched = Path(temporary)
        if version:
            model = promotion.download_version(registry, registry.complete_version_name(version), fetched)
        else:
            model = promotion.download_champion(registry, fetched)
        data = find_or_fetch_data_set(dataset, data_source, test_dataset, sample=read_sample_setting(model[1]))
        return judge_model(platform, model, data, registry, policy)


def carry_out_verdict(model: tuple[Path, Path], verdict: Verdict, files: Path, model_name: str) -> Released:
    """Store a judged model as a version. If the verdict is to promote, make the version the champion.

    If another model was promoted since the judgement, the champion stays. In a local run, prints the outcome.

    Args:
        model: The paths of model.pt and model.json.
        verdict: The verdict of ``judge_model``.
        files: The folder of ``judge_model``, whose files are stored beside the model.
        model_name: Name of the model in the registry.
    """
    registry = open_registry(model_name)
    beside = {path.name: path for path in sorted(files.iterdir())}
    version = promotion.store_version(registry, *model, verdict, beside)
    return print_release(promotion.apply_verdict(registry, version, verdict, by=describe_author()))


def promote_version(model_name: str, version: str, reason: str) -> Released:
    """Make a stored version the champion, and return the outcome. The log records the reason.

    In a local run, prints the outcome.
    """
    registry = open_registry(model_name)
    entry = promotion.promote_version(registry, version, reason, by=describe_author(), idempotent=is_in_pod())
    return print_champion(registry, entry)


def roll_back_champion(model_name: str, reason: str) -> Released:
    """Make the previous champion the champion again, and return the outcome. The log records the reason.

    In a local run, prints the outcome.
    """
    registry = open_registry(model_name)
    entry = promotion.roll_back_champion(registry, reason, by=describe_author(), idempotent=is_in_pod())
    return print_champion(registry, entry)


def print_champion(registry: Registry, entry: Entry) -> Released:
    """Return the outcome of a new log entry, with the champion now, and print a summary in a local run."""
    now = registry.read_champion() or entry  # after a retry of this task another entry may be newer
    return print_release(Released(entry.version, now.version, f"entry {entry.number} of the log: {entry.reason}"))


def print_release(released: Released) -> Released:
    """Return the outcome, and print a summary in a local run."""
    print_outcome(f"{released.outcome}; champion {released.champion[:12] or 'none'}")
    return released
