"""Tasks between the data set and training: it is looked through once, and refused if something is wrong with it."""

from pathlib import Path
from typing import List, NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.catalog import encoded_kind
from flyte_ddp.code_digest import package_digest
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UnreachableError, UserError
from flyte_ddp.formatting import counted
from flyte_ddp.progress import Progress
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.promotion import champion_profile
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.slices import read_slices
from flyte_ddp.settings import from_environment
from flyte_ddp.validation.profile import DataProfile
from tasks import places, pods, recovery

HELD_OUT = (
    "test_dataset is not set: the tenth that is held out for testing is another one when the data grow, and the "
    "champion was trained on most of it; give a test set of its own"
)


class Validated(NamedTuple):
    """The data set, as it came, and in what it is unlike the champion's."""

    data: FlyteDirectory
    warnings: List[str]


@task(**pods.data_pod(), cache=pods.by_content(ignored_inputs=("data",), code=package_digest()))
@recovery.guarded()
def profile_dataset(data: FlyteDirectory, data_version: str) -> DataProfile:
    """Look at all samples of a data set, once for each version of its content."""
    from flyte_ddp.validation.profiling import profile

    del data_version  # which the cache goes by
    return profile(Path(data.download()), from_environment())


@recovery.mistakes_in_inputs
@task(**pods.with_registry(pods.light_pod()), **pods.WITH_DECK)
@recovery.guarded()
def validate_dataset(
    data: FlyteDirectory, profile: DataProfile, hp: Hyperparameters, model_name: str, policy: Policy
) -> Validated:
    """Refuse data that should not be trained on, and say in what they are unlike the champion's."""
    from flyte_ddp.validation.validate import check, differences

    check(profile, hp, max_duplicates=policy.max_duplicates, max_conflicts=policy.max_conflicts)
    registry = Registry(places.registry(), model_name)
    registry.check_store()  # not hours later, when there is a champion to be written
    history = registry.history()  # likewise if it has a gap
    champion = history[-1] if history else None
    if policy.slices:
        read_slices(policy.slices)
    warnings = [HELD_OUT] if encoded_kind(hp.dataset) and not hp.test_dataset else []
    try:
        champions = champion_profile(registry, champion) if champion is not None else None
        warnings += [*differences(profile, champions)] if champions is not None else []
    except UnreachableError:
        raise
    except UserError as error:  # of the champion's version: the judgement compares nothing then, or does not need this
        warnings.append(f"the champion's data are not known: {error}")
    for warning in warnings:
        Progress(from_environment().progress).note(f"warning: {warning}")
    Deck("Data set", page(profile, hp, warnings))
    return Validated(data, warnings)


def page(found: DataProfile, hp: Hyperparameters, warnings: List[str]) -> str:
    """What the data set is like, for the console."""
    from flyte_ddp.report.page import rendered

    facts = [("Warning", warning) for warning in warnings]
    for name, split in {"Training": found.training, "Test": found.test}.items():
        numbers = sorted(split.labels.values())
        classes = f"{len(numbers):,} classes of {numbers[0]:,} to {numbers[-1]:,}"
        modes = ", ".join(f"{mode} {number:,}" for mode, number in split.modes.items())
        unusable = f"; {split.undecodable:,} cannot be decoded" if split.undecodable else ""
        facts.append((name, f"{counted(split.samples, 'sample')} in {classes}; {modes}{unusable}"))
    facts.append(("Test samples that are training samples, too", f"{found.duplicates:,}"))
    facts.append(("Samples with equal pixels and different labels", f"{found.conflicts:,}"))
    return rendered("preview.html", title=hp.dataset, heading="What the data set is like", facts=facts)
