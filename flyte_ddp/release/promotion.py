"""Stores versions, promotes a version by a verdict or a person's decision, and reads the champion.

Every function raises UserError if the registry cannot be read or written, or if a file was altered. A function that
appends to the log first reads the whole log, and tests the storage with a small file.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import SIDECAR, WEIGHTS, file_digest
from flyte_ddp.core.models.sidecar import Sidecar, parse_sidecar, read_sidecar
from flyte_ddp.release.promotion_log import PROMOTE, ROLLBACK, Entry, LostError, replay_promotions
from flyte_ddp.release.registry import DAMAGED, Registry, Version, damaged_file_error
from flyte_ddp.release.task import Task, has_same_preprocessing
from flyte_ddp.release.verdict import Released, Verdict
from flyte_ddp.validation.profile import DataProfile

if TYPE_CHECKING:
    from torch import nn

PROFILE, REFERENCE, VERDICT = "data_profile.json", "reference.npz", "verdict.json"


def store_version(
    registry: Registry, weights: Path, sidecar: Path, verdict: Verdict, further_files: Mapping[str, Path | bytes]
) -> Version:
    """Upload a judged model with its verdict, and return the stored version. Does not promote the version.

    If the registry already has the weights, a promoting verdict writes a new revision. Any other verdict then writes
    nothing, and the newest revision is returned.

    Args:
        registry: The registry of the model.
        weights: The model's ``model.pt``.
        sidecar: The model's ``model.json``.
        verdict: The verdict on this model.
        further_files: Contents or paths of more files to store, by name.

    Raises:
        UserError: The verdict is about another model, or the weights are stored with another name, threshold, task or
            preprocessing.
    """
    name = file_digest(weights)
    if verdict.challenger != name:
        raise UserError(f"verdict: is about version {verdict.challenger[:12]}, not {name[:12]}; give the judged files")
    stored = registry.find_version(name)
    if stored is not None:
        new, old = read_sidecar(sidecar), read_stored_sidecar(registry, stored)
        differs = {
            "model": new.model != old.model,
            "threshold": new.threshold != old.threshold,
            **dict.fromkeys(Task.from_sidecar(new).list_changes(Task.from_sidecar(old)), True),
            "positive class": False,
            "preprocessing": not has_same_preprocessing(new, old),
        }
        if changed := [name for name, is_changed in differs.items() if is_changed]:
            raise UserError(
                f"version {name[:12]} is already in the registry, with another {changed[0]}; equal weights are the "
                "same version, so train with another seed"
            )
        if not verdict.promotes:
            return stored
    files = {VERDICT: verdict.to_json(indent=1).encode() + b"\n", WEIGHTS: weights, SIDECAR: sidecar, **further_files}
    return registry.write_version(files)


def apply_verdict(registry: Registry, version: Version, verdict: Verdict, *, by: str) -> Released:
    """Make a stored version the champion if its verdict promotes, and return version, champion and outcome.

    Appends an entry to the log. If another writer has appended an entry since the judgement, the version is not
    promoted, and the outcome names this entry. If an earlier call by the same ``by`` (the Flyte execution or user) has
    promoted the version, returns the earlier outcome.
    """
    if not verdict.promotes:
        champion = registry.read_champion()
        return Released(version.name, champion.version if champion else "", f"kept: {verdict.outcome}")
    history = registry.read_log(at_least=verdict.log_number)
    if len(history) == verdict.log_number:
        try:
            append_to_log(registry, history, version, action=PROMOTE, best=verdict.best, reason=verdict.outcome, by=by)
            return Released(version.name, version.name, f"promoted: {verdict.outcome}")
        except LostError as lost:
            winner = lost.winner
    else:
        winner = history[verdict.log_number]
        if (winner.version, winner.by) == (version.name, by):  # an earlier try of this task, which was killed
            return Released(version.name, history[-1].version, f"promoted: {winner.reason}")
    return Released(version.name, registry.read_log()[-1].version, f"not promoted: {LostError(winner).message}")


def promote_version(registry: Registry, version: str, reason: str, *, by: str, idempotent: bool = False) -> Entry:
    """Make a version the champion by a person's decision, and return the new log entry.

    Reads and verifies all files of the version. Appends an entry to the log. The version also becomes the best version.

    Args:
        registry: The registry of the model.
        version: The version's name, or at least the first 12 digits.
        reason: The reason, a text for people.
        by: The Flyte execution or user.
        idempotent: Whether a repeated call by the same ``by`` returns the first promotion of the version, and changes
            nothing.

    Raises:
        UserError: The version is missing or is the champion, the reason is blank, or another entry was written first.
    """
    version, history = registry.complete_version_name(version), registry.read_log()
    if idempotent and (earlier := find_earlier_try(history, by, PROMOTE, version)):
        return earlier
    found, before = registry.read_version(version), history[-1] if history else None
    if before is not None and before.version == version:
        raise UserError(f"version {version[:12]} is already the champion, since {before.time}")
    registry.verify_files(found)
    return append_to_log(registry, history, found, action=PROMOTE, best=version, reason=reason, by=by)


def roll_back_champion(registry: Registry, reason: str, *, by: str, idempotent: bool = False) -> Entry:
    """Make the previous champion the champion again, and return the new log entry.

    The previous champion is the version of the last promotion but one that no rollback has undone. Reads and verifies
    all files of the version. Appends an entry to the log.

    Args:
        registry: The registry of the model.
        reason: The reason, a text for people.
        by: The Flyte execution or user.
        idempotent: Whether a repeated call by the same ``by`` returns the first rollback, and changes nothing.

    Raises:
        UserError: No previous champion exists, the reason is blank, or another entry was written first.
    """
    history = registry.read_log()
    if idempotent and (earlier := find_earlier_try(history, by, ROLLBACK)):
        return earlier
    standing, _ = replay_promotions(history)
    if len(standing) < 2:
        registry.check_model_exists()
        raise UserError(f"model {registry.name!r}: has no previous champion; nothing was changed")
    target = standing[-2]
    version = registry.read_version(target.version, target.manifest)
    registry.verify_files(version)
    return append_to_log(registry, history, version, action=ROLLBACK, best=target.best, reason=reason, by=by)


def append_to_log(registry: Registry, log: list[Entry], version: Version, **values: str) -> Entry:
    return registry.append_entry(log[-1] if log else None, version=version.name, manifest=version.manifest, **values)


def find_earlier_try(log: list[Entry], by: str, action: str, version: str = "") -> Entry | None:
    found = (entry for entry in log if (entry.by, entry.action) == (by, action) and version in ("", entry.version))
    return next(found, None)


def download_version(registry: Registry, version: str, folder: Path, manifest: str = "") -> tuple[Path, Path]:
    """Download a version's model.pt and model.json into a folder, and return both paths. Replaces existing files.

    ``manifest`` is the SHA-256 of a revision's manifest. The default is the newest revision.
    """
    found = registry.read_version(version, manifest)
    return registry.download_file(found, WEIGHTS, folder), registry.download_file(found, SIDECAR, folder)


def download_champion(registry: Registry, folder: Path) -> tuple[Path, Path]:
    """Download the champion's model.pt and model.json into an existing folder, and return both paths.

    Replaces existing files. Raises UserError if the model has no champion.
    """
    entry = require_champion(registry)
    return download_version(registry, entry.version, folder, entry.manifest)


def require_champion(registry: Registry) -> Entry:
    """Return the log's entry that names the champion. Raises UserError if the model has no champion."""
    entry = registry.read_champion()
    if entry is None:
        registry.check_model_exists()
        raise UserError(f"registry {registry.address!r}: {registry.name} has no champion; promote a version first")
    return entry


def read_stored_sidecar(registry: Registry, version: Version) -> Sidecar:
    return parse_sidecar(registry.read_version_file(version, SIDECAR), registry.file_address(version, SIDECAR))


def read_verdict(registry: Registry, version: Version) -> Verdict | None:
    """Return the verdict that is stored with a version, or None if the version was stored without a verdict.

    Raises UserError if the file is missing, damaged or was altered.
    """
    if VERDICT not in version.files:
        return None
    content = registry.read_version_file(version, VERDICT)
    try:
        return Verdict.from_json(content)
    except DAMAGED:
        raise damaged_file_error(registry.file_address(version, VERDICT)) from None


def read_data_profile(registry: Registry, entry: Entry) -> DataProfile | None:
    """Return the profile of an entry's training data, or None if the version has no profile.

    Raises UserError if another release of the library wrote the profile.
    """
    version = registry.read_version(entry.version, entry.manifest)
    if PROFILE not in version.files:
        return None
    content = registry.read_version_file(version, PROFILE)
    try:
        return DataProfile.from_json(content)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{PROFILE} of version {version.name[:12]}: is from another release of flyte-ddp") from None


def load_champion(address: str, name: str, device: str = "cpu") -> "tuple[nn.Module, Sidecar]":
    """Download the champion, and return the model in evaluation mode on ``device``, and the sidecar.

    Runs the code that the sidecar names, so trust the registry as you trust code. Draws random numbers.

    Args:
        address: A folder, or an address of S3, Google Cloud Storage or Azure.
        name: The name of the model in the registry.

    Raises:
        UserError: The model has no champion, or the champion cannot be read or loaded.
    """
    from flyte_ddp.models.artifacts import load_model

    with TemporaryDirectory() as folder:
        return load_model(*download_champion(Registry(address, name), Path(folder)), device)
