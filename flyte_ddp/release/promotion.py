"""What follows a verdict, or a person's decision: the version is stored, and the log gets an entry or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from flyte_ddp.errors import UnreachableError, UserError
from flyte_ddp.files import file_digest
from flyte_ddp.release import versions
from flyte_ddp.release.card import card
from flyte_ddp.release.lineage import lineage
from flyte_ddp.release.registry import PROMOTE, ROLLBACK, Entry, LostError, Registry, promotions
from flyte_ddp.release.verdict import Verdict
from flyte_ddp.validation.profile import DataProfile

if TYPE_CHECKING:
    from torch import nn

VERDICT, LINEAGE, CARD = "verdict.json", "lineage.json", "README.md"
PROFILE = "data_profile.json"


class Outcome(NamedTuple):
    """What came of a model."""

    version: str  # of the model
    champion: str  # from now on, as far as this one knows; empty if there is none
    reason: str


def store(
    registry: Registry,
    weights: Path,
    sidecar: Path,
    verdict: Verdict,
    beside: Mapping[str, Path | bytes],
    *,
    by: str,
) -> versions.Version:
    """Writes a judged model into the registry, champion or not, so that it can be promoted later by hand.

    Args:
        weights: ``model.pt`` of its run.
        sidecar: ``model.json`` of the same run.
        verdict: on it.
        beside: further files of the version by their names: the page of the verdict, the profile of the data.
        by: the Flyte execution, or the user, that trained it.

    Returns:
        The version; of weights that were stored before and are not promoted now, as it is.

    Raises:
        UserError: the registry cannot be written to, or the verdict is on another model.
    """
    described, about = verdict.to_json(indent=1).encode() + b"\n", json.loads(sidecar.read_bytes())
    name = file_digest(weights)
    if verdict.challenger != name:
        raise UserError(f"verdict: is on version {verdict.challenger[:12]}, not on {name[:12]}; give what was judged")
    if verdict.look:
        judged = f"{verdict.look:08}-{versions.content_digest(described)[:12]}.json"
        with registry.explain_failures("written"):
            versions.upload_file(registry.at("judgements", verdict.test_digest, "verdicts", judged), described)
    stored = versions.find_version(registry, name)
    if stored is not None:
        check_same_task(registry, stored, about)
        if not verdict.promotes:
            return stored
    files: Mapping[str, Path | bytes] = {
        VERDICT: described,
        versions.WEIGHTS: weights,
        versions.SIDECAR: sidecar,
        **beside,
        LINEAGE: lineage(registry.address, registry.name, about, verdict, by=by),
        CARD: card(registry.name, about, verdict, beside),
    }
    return versions.write_version(registry, files)


def check_same_task(registry: Registry, stored: versions.Version, about: Mapping[str, Any]) -> None:
    """Refuses a model whose weights are in the registry already as those of a model with other classes or input.

    Raises:
        UserError: as versions are named by their weights, there can be only one.
    """
    described = sidecar_of(registry, stored)
    for what in ("model", "classes", "input"):
        if described.get(what) != about.get(what):
            raise UserError(
                f"version {stored.name[:12]} is in the registry already, with another {what}: equal weights are one "
                "version; train with another seed"
            )


def carry_out(registry: Registry, version: versions.Version, verdict: Verdict, *, by: str) -> Outcome:
    """Does what a verdict says: makes the version the champion, or leaves the champion as it is.

    Returns:
        The outcome; where somebody else has promoted a model since the judgement, that is no error, and its reason.

    Raises:
        UserError: the registry cannot be read or written, or its log has a gap.
    """
    if not verdict.promotes:
        champion = registry.champion()
        return Outcome(version.name, champion.version if champion else "", f"kept: {verdict.reason}")
    history = registry.history(at_least=verdict.log_number)
    now, after = history[-1] if history else None, history[verdict.log_number :]
    if after and (after[0].version, after[0].by) == (
        version.name,
        by,
    ):  # this task has been here before, and was killed
        registry.renew_copy(after[0].number)
        return Outcome(version.name, history[-1].version, f"promoted: {after[0].reason}")
    values = {"version": version.name, "manifest": version.manifest, "best": verdict.best, "reason": verdict.reason}
    try:
        winner = after[0] if after else None
        if winner is None:
            registry.append_entry(now, by=by, action=PROMOTE, **values)
            return Outcome(version.name, version.name, f"promoted: {verdict.reason}")
    except LostError as lost:
        winner = lost.winner
    return Outcome(version.name, registry.history()[-1].version, f"not promoted: {LostError(winner).message}")


def promote(registry: Registry, version: str, reason: str, *, by: str, once: bool = False) -> Entry:
    """Makes a version the champion because a person says so.

    Args:
        registry: of the model.
        version: the SHA-256 of its weights.
        reason: why.
        by: the Flyte execution, or a user.
        once: whether ``by`` does this only once, so that an entry of its own is of an earlier try.

    Raises:
        UserError: there is no such version, it is the champion, no reason is given, or somebody was faster.
    """
    history = registry.history()
    if once and (earlier := earlier_try(registry, history, by, PROMOTE, version)):
        return earlier
    found, before = versions.read_version(registry, version), history[-1] if history else None
    if before is not None and before.version == version:
        raise UserError(f"version {version[:12]} is the champion already, since {before.time}")
    versions.check_files(registry, found)
    best = before.best if before and comparable(registry, before.best, found) else version
    values = {"version": version, "manifest": found.manifest, "best": best}
    return registry.append_entry(before, by=by, action=PROMOTE, reason=given(reason), **values)


def earlier_try(registry: Registry, history: list[Entry], by: str, action: str, version: str = "") -> Entry | None:
    """The entry that an execution has written, which was killed before it could say so; None if there is none."""
    for entry in history:
        if (entry.by, entry.action) == (by, action) and version in ("", entry.version):
            registry.renew_copy(history[-1].number)
            return entry
    return None


def comparable(registry: Registry, best: str, version: versions.Version) -> bool:
    """Whether a version can be compared with the best one so far, without which not_worse would promote nothing."""
    try:
        one, other = (sidecar_of(registry, found) for found in (versions.read_version(registry, best), version))
    except UnreachableError:
        raise
    except UserError:  # it is gone, or altered
        return False
    return (one.get("classes"), one.get("input")) == (other.get("classes"), other.get("input"))


def sidecar_of(registry: Registry, version: versions.Version) -> dict[str, Any]:
    """What describes a version."""
    with TemporaryDirectory() as folder:
        versions.fetch_files(registry, version, Path(folder), (versions.SIDECAR,))
        found: dict[str, Any] = json.loads(Path(folder, versions.SIDECAR).read_bytes())
        return found


def roll_back(registry: Registry, reason: str, *, by: str, once: bool = False) -> Entry:
    """Makes the champion before the present one the champion again; see :func:`promote` for the arguments.

    What was the best version then is that again, too: who takes a model back does not want others compared with it.

    Raises:
        UserError: there was none, no reason is given, or somebody was faster.
    """
    history = registry.history()
    if once and (earlier := earlier_try(registry, history, by, ROLLBACK)):
        return earlier
    standing = promotions(history).standing
    if len(standing) < 2:
        raise UserError(f"model {registry.name!r}: there is no champion before the present one; nothing was changed")
    target = standing[-2]
    versions.check_files(registry, versions.read_version(registry, target.version, target.manifest))
    values = {"version": target.version, "manifest": target.manifest, "best": target.best}
    return registry.append_entry(history[-1], by=by, action=ROLLBACK, reason=given(reason), **values)


def given(reason: str) -> str:
    """A person's reason.

    Raises:
        UserError: it is empty.
    """
    if not reason.strip():
        raise UserError("reason='': must say why; it is kept in the registry's log")
    return reason.strip()


def champion_files(registry: Registry, folder: Path) -> tuple[Path, Path]:
    """Puts the champion's weights and sidecar into a folder, and returns their paths.

    Raises:
        UserError: there is no champion, or it cannot be read.
    """
    entry = registry.champion()
    if entry is None:
        raise UserError(f"registry {registry.address!r}: {registry.name} has no champion; promote a version first")
    return stored_files(registry, entry.version, folder, entry.manifest)


def champion_profile(registry: Registry, entry: Entry) -> DataProfile | None:
    """What the data were like that the champion of an entry was trained on; None if its version does not say.

    Raises:
        UserError: the registry cannot be read, or the file was altered.
    """
    version = versions.read_version(registry, entry.version, entry.manifest)
    if PROFILE not in version.files:
        return None
    with TemporaryDirectory() as folder:
        versions.fetch_files(registry, version, Path(folder), (PROFILE,))
        try:
            return DataProfile.from_json(Path(folder, PROFILE).read_text(encoding="utf-8"))
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{PROFILE} of version {version.name[:12]}: is another release's of this library") from None


def load_champion(address: str, name: str, device: str = "cpu") -> tuple[nn.Module, dict[str, Any]]:
    """The champion in evaluation mode, and its sidecar; runs the code that the sidecar names, so trust the registry.

    Args:
        address: of the registry: a folder, or an address of S3, Google Cloud Storage or Azure Blob Storage.
        name: of the model in it.
        device: where it is to be.

    Raises:
        UserError: there is no champion, or it cannot be read.
    """
    from flyte_ddp.models.artifacts import load_model

    with TemporaryDirectory() as folder:
        return load_model(*champion_files(Registry(address, name), Path(folder)), device)


def stored_files(registry: Registry, version: str, folder: Path, manifest: str = "") -> tuple[Path, Path]:
    """The same of any version; see :func:`flyte_ddp.release.versions.find_version` for ``manifest``."""
    versions.fetch_files(registry, versions.read_version(registry, version, manifest), folder)
    return folder / versions.WEIGHTS, folder / versions.SIDECAR
