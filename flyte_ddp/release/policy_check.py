"""What of a policy is refused before training; its slices, parts of a test split that are checked as classes are."""

import csv
import io
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.catalog import encoded_kind
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.prepared import resolve_class_names
from flyte_ddp.errors import UserError
from flyte_ddp.objectives import Facts, make_objective
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.scores import needs_calls, refuse_many_calls
from flyte_ddp.user_code.callables import load_callable
from flyte_ddp.validation.profile import DataProfile


def check_policy(policy: Policy, hp: Hyperparameters, profile: DataProfile, test_ids: Sequence[str] = ()) -> None:
    """Raise a UserError if a model of these hyperparameters and data could not be judged by the policy.

    Without ``test_ids`` the test samples go by their numbers. Measures of an own objective that is a function, and the
    ids of encoded images, are not known here, and not checked.
    """
    samples = profile.test.samples
    if policy.slices and encoded_kind(hp.dataset):
        read_slices_file(policy.slices)
    elif policy.slices:
        group_by_slice(policy.slices, test_ids or [*map(str, range(samples))], ())
    if ":" in hp.objective and not isinstance(load_callable(hp.objective), type):
        return
    classes = resolve_class_names(profile.classes, hp, of_numbers=True)
    facts = Facts(classes, tuple(profile.target_shape), select_by=hp.select_by)
    objective = make_objective(hp.objective, facts, hp.parse_options().get("objective", {}))
    if needs_calls(objective):
        refuse_many_calls(samples)


def read_slices_file(address: str) -> list[tuple[int, str, str]]:
    """Return line number, id and slice of each row of a CSV file, read with retries; UserError if malformed."""
    try:
        content = storage.retry(address, storage.read_file)
    except storage.UnavailableError as failure:
        raise failure.to_user_error(f"slices={address!r}: cannot be read: {failure}; check the address") from None
    try:
        text = content.decode("utf-8-sig")  # Excel begins its files with a byte order mark
        table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        return [(table.line_num, row["id"], row["slice"]) for row in table]
    except (UnicodeDecodeError, csv.Error, KeyError) as error:
        raise UserError(f"slices={address!r}: must be CSV in UTF-8 with the columns id and slice ({error})") from None


def group_by_slice(address: str, ids: Sequence[str], undecoded: Collection[str]) -> dict[str, NDArray[np.int64]]:
    """Return the ascending positions in ``ids`` of each slice's samples; UserError for an id in neither list."""
    places = {name: place for place, name in enumerate(ids)}
    members: dict[str, set[int]] = {}
    for line, sample, name in read_slices_file(address):
        if name and sample in places:
            members.setdefault(name, set()).add(places[sample])
        elif not name or sample not in undecoded:
            what = "is not in the test split" if name else "has no slice"
            raise UserError(f"slices={address!r}: id {sample!r} in line {line} {what}; correct it")
    return {name: np.array(sorted(found), dtype=np.int64) for name, found in members.items()}
