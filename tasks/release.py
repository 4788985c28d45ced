"""Tasks that release a model: the judgement against the champion, promotion, and the way back. None is ever cached."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp import hardware
from flyte_ddp.datasets import fetch, fingerprint
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.promotion import (
    PROFILE,
    carry_out,
    champion_files,
    promote,
    roll_back,
    store,
    stored_files,
)
from flyte_ddp.release.registry import Entry, Registry
from flyte_ddp.release.verdict import Verdict
from flyte_ddp.release.wandb_mirror import mirror_champion
from flyte_ddp.settings import from_environment
from flyte_ddp.validation.profile import DataProfile
from tasks import places, pods, recovery, tracking
from tasks.pickled_file import PythonPickledFile


class Judged(NamedTuple):
    """A verdict: whether to promote, the checks behind that, and files: the page that shows them, and exports."""

    promotes: bool
    verdict: Verdict
    files: FlyteDirectory


class Released(NamedTuple):
    """What came of a model: its version, the champion's, and why."""

    version: str
    champion: str
    outcome: str


@recovery.mistakes_in_inputs
@task(**pods.with_registry(pods.prediction_pod()))
@recovery.guarded()
def judge_model(
    model_state: PythonPickledFile,
    sidecar: FlyteFile,
    data: FlyteDirectory,
    profile: DataProfile,
    model_name: str,
    policy: Policy,
) -> Judged:
    """Compare a model with the champion on the test split of a data set, by the checks of a policy."""
    registry = Registry(places.registry(), model_name)
    files = Path(model_state.download()), Path(sidecar.download())
    with places.new_folder("verdicts") as folder:
        found = judged(*files, Path(data.download()), registry, policy, folder, counts=True)
        (folder / PROFILE).write_text(profile.to_json(indent=1), encoding="utf-8")
        return found


@recovery.mistakes_in_inputs
@task(**pods.with_registry(pods.prediction_pod()))
@recovery.guarded()
def evaluate_version(
    model_name: str, version: str, dataset: str, data_source: str, test_dataset: str, policy: Policy
) -> Judged:
    """Compare a version with the champion on the test split of any data set, which decides nothing."""
    registry = Registry(places.registry(), model_name)
    with TemporaryDirectory() as folder:
        files = stored_files(registry, version, Path(folder)) if version else champion_files(registry, Path(folder))
        place = places.folder_for(f"datasets/{fingerprint(dataset, data_source, test_dataset)}")
        progress = from_environment().progress
        data = fetch(dataset, data_source, place, test_dataset=test_dataset, progress=progress)
        with places.new_folder("verdicts") as made:
            return judged(*files, data, registry, policy, made, counts=False)


def judged(
    model: Path, sidecar: Path, data: Path, registry: Registry, policy: Policy, folder: Path, *, counts: bool
) -> Judged:
    """The verdict on a model, with its page and exports in a folder."""
    from flyte_ddp.release.judge import judge
    from flyte_ddp.release.page import write_page

    hardware.check_expected_gpus(hardware.visible_gpus())
    settings, exports = from_environment(), folder if counts else None
    judgement = judge(model, sidecar, data, registry, policy, settings=settings, counts=counts, exports=exports)
    page = write_page(judgement, registry.name, folder / "verdict.html")
    Deck("Verdict", page.read_text(encoding="ascii"))
    places.tell(f"{judgement.verdict.told()}; made in", {page: "all checks, to open in a browser"})
    return Judged(judgement.verdict.promotes, judgement.verdict, places.directory(folder))


@task(**pods.promoting_pod())
@recovery.guarded()
def promote_challenger(
    model_state: PythonPickledFile, sidecar: FlyteFile, verdict: Verdict, files: FlyteDirectory, model_name: str
) -> Released:
    """Store a version, and make it the champion."""
    return carried_out(model_state, sidecar, verdict, files, Registry(places.registry(), model_name))


@task(**pods.storing_pod())
@recovery.guarded()
def keep_champion(
    model_state: PythonPickledFile, sidecar: FlyteFile, verdict: Verdict, files: FlyteDirectory, model_name: str
) -> Released:
    """Store a version, and leave the champion as it is."""
    return carried_out(model_state, sidecar, verdict, files, Registry(places.registry(), model_name))


def carried_out(
    model_state: PythonPickledFile, sidecar: FlyteFile, verdict: Verdict, files: FlyteDirectory, registry: Registry
) -> Released:
    """What a verdict says, done."""
    model = Path(model_state.download()), Path(sidecar.download())
    beside = {path.name: path for path in sorted(Path(files.download()).iterdir())}
    version = store(registry, *model, verdict, beside, by=places.who())
    outcome = carry_out(registry, version, verdict, by=places.who())
    if verdict.promotes:
        mirror_champion(registry, version.name, tracking.settings(f"{registry.name}-champion"))
    return shown(Released(*outcome))


def decided(registry: Registry, entry: Entry) -> Released:
    """The new champion."""
    mirror_champion(registry, entry.version, tracking.settings(f"{registry.name}-champion"))
    now = registry.champion() or entry  # somebody may have been here since an earlier try of this task
    return shown(Released(entry.version, now.version, f"champion {entry.number}: {entry.reason}"))


def shown(released: Released) -> Released:
    """The same, which a local run also prints."""
    if places.is_local():
        print(f"{released.outcome}; champion {released.champion[:12] or 'none'}", flush=True)
    return released


def launched() -> dict[str, Any]:
    """Who wants something, and whether that one wants it only once, as an execution does."""
    return {"by": places.who(), "once": not places.is_local()}


@task(**pods.promoting_pod())
@recovery.guarded()
def promote_version(model_name: str, version: str, reason: str) -> Released:
    """Make a stored version the champion, as the person who launched this says."""
    registry = Registry(places.registry(), model_name)
    return decided(registry, promote(registry, version, reason, **launched()))


@task(**pods.promoting_pod())
@recovery.guarded()
def roll_back_champion(model_name: str, reason: str) -> Released:
    """Make the champion before the present one the champion again."""
    registry = Registry(places.registry(), model_name)
    return decided(registry, roll_back(registry, reason, **launched()))
