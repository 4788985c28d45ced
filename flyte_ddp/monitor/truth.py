"""Reads the truth of a window's samples from a file of the user."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.text.formatting import format_count, join_first
from flyte_ddp.objectives import Classification, Regression
from flyte_ddp.predict.prediction_batches import Batch, SavedModel
from flyte_ddp.release.slices import read_id_table

UNKNOWN = ("", "nan", "none", "null", "na", "n/a", "<na>", "nat")  # truths that are not known yet, in lower case
WHOLE_NUMBER = re.compile(r"0*([0-9]+)(?:\.0*)?")


class TruthFile:
    """The truths of a CSV file by id, as texts. The constructor reads the file, with retries.

    An id in another form, such as 1.0 or 001 for 1, matches if no other id has the same form. If an id occurs several
    times, the last known truth counts.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.truths = dict[str, str]()
        for _, name, truth in read_id_table("truth", "truth", address):
            if not is_unknown(truth) or name not in self.truths:  # the last known truth counts
                self.truths[name] = truth
        self.by_form = index_by_form(self.truths)
        self.users = dict[str, str]()  # the matching sample of each id of the file
        self.missing = list[str]()  # samples without an id in the file

    def look_up(self, sample: str) -> str:
        """Return a sample's truth, or "" if the file lacks the id.

        Records in ``users`` which sample has matched an id, or in ``missing`` the sample without an id. Raises
        UserError if an id of the file matches two samples.
        """
        name = sample if sample in self.truths else self.by_form.get(normalize_form(sample))
        if name is None:
            self.missing.append(sample)
            return ""
        if (other := self.users.setdefault(name, sample)) != sample:
            rule = f"id {name!r} matches two samples, {other!r} and {sample!r}"
            raise UserError(f"truth={self.address!r}: {rule}; write the ids as in a table of predictions")
        return self.truths[name]

    def check_and_describe_ids(self) -> str:
        """Return a note on ids that the file writes in another form, or "". Call this after all calls of look_up().

        Raises UserError if no id of the file has the form of a sample's id.
        """
        forms = {*map(mask_numbers, self.truths)}
        if forms and not self.users and forms.isdisjoint(map(mask_numbers, self.missing)):
            rule = f"has none of the ids of the samples, such as {join_first(self.missing, 2)}"
            raise UserError(f"truth={self.address!r}: {rule}; give the ids of a table of predictions")
        others = [f"{name} for {sample}" for name, sample in self.users.items() if name != sample]
        return f"{format_count(len(others), 'id')} are written differently: {join_first(others, 2)}" if others else ""


def add_truth_to_batches(model: SavedModel, address: str, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches with the truths of the user's file at ``address``, as classes or as targets.

    The file is read at the first ``next()``. A class that the model does not know is passed on. After the last batch,
    prints a note if no truth is known, or if ids are in another form.

    Raises:
        UserError: The model predicts neither classes nor one number for each sample, or the file cannot be read. A
            truth is not a number. The ids do not fit the samples.
    """
    file, classifies = TruthFile(address), isinstance(model.objective, Classification)
    if not classifies and (not isinstance(model.objective, Regression) or model.objective.facts.target_shape):
        rule = "needs a model that predicts classes, or one number for each sample"
        raise UserError(f"truth={address!r}: {rule}; give a dataset, which has its own truth")
    classes, known = {**index_by_form(model.classes), **{name: name for name in model.classes}}, 0
    for batch in batches:
        truths = [file.look_up(name) for name in batch.ids]
        if classifies:
            truths = [truth_to_class(truth, classes) for truth in truths]
            known += sum(truth != "" for truth in truths)
            yield batch._replace(truths=truths)
        else:
            try:
                numbers = [math.nan if is_unknown(truth) else float(truth) for truth in truths]
            except ValueError as error:
                raise UserError(f"truth={address!r}: {error}; give a number for each id") from None
            known += sum(not math.isnan(number) for number in numbers)
            yield batch._replace(targets=torch.tensor(numbers, device=model.device))
    note = file.check_and_describe_ids()
    if not known:
        note = "no sample has a truth yet"
    if note:
        Progress(model.settings.progress).print_note(f"truth={address!r}: {note}")


def truth_to_class(truth: str, classes: Mapping[str, str]) -> str:
    """Return the name of a truth's class, or "" for an unknown truth. Any other text is returned unchanged.

    ``classes`` has the names of classes by name, and by the forms of :func:`normalize_form`.
    """
    if truth in classes:
        return classes[truth]
    return "" if is_unknown(truth) else classes.get(normalize_form(truth), truth)


def is_unknown(truth: str) -> bool:
    return truth.strip().lower() in UNKNOWN


def normalize_form(text: str) -> str:
    """Return a text without spaces at the ends. A whole number such as 007 or 7.0 becomes 7."""
    text = text.strip()
    number = WHOLE_NUMBER.fullmatch(text)
    return number[1] if number else text


def index_by_form(names: Iterable[str]) -> dict[str, str]:
    """Return the names by the forms of :func:`normalize_form`, without forms that several names share."""
    found = dict[str, str]()
    shared = set[str]()
    for name in names:
        if found.setdefault(form := normalize_form(name), name) != name:
            shared.add(form)
    return {form: name for form, name in found.items() if form not in shared}


def mask_numbers(name: str) -> str:
    """Return an id in which each word with a digit is replaced by 0: a17.png becomes 0.png."""
    return re.sub(r"[A-Za-z]*[0-9][A-Za-z0-9]*", "0", name)


def make_known_truth_mask(batch: Batch) -> NDArray[np.bool_]:
    """Return for each sample of a batch whether the truth is known, [n]."""
    targets = batch.targets
    if batch.truths is not None:
        return np.array([truth != "" for truth in batch.truths])
    if isinstance(targets, Tensor) and targets.dim() == 1 and targets.is_floating_point():
        return np.asarray(~targets.isnan().cpu().numpy())
    return np.full(len(batch.ids), targets is not None)
