"""Predicts a window of samples with the champion, and compares the window with the held-out samples."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from itertools import compress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import SIDECAR, WEIGHTS
from flyte_ddp.core.objectives.objective import map_float_tensors
from flyte_ddp.core.objectives.table_columns import describe_samples, format_sample_inputs
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.samples.leaves import Leaves, name_leaves
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.formatting import format_count, join_first
from flyte_ddp.core.training.evaluate import compute_batch_columns
from flyte_ddp.core.user_code.source import translate_user_errors
from flyte_ddp.datasets import open_prepared
from flyte_ddp.datasets.encoded.samples import BadSamples
from flyte_ddp.monitor.compare import SAMPLES, compare_columns, rate_unusual_samples
from flyte_ddp.monitor.score import HeldOut, score_window
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.monitor.truth import add_truth_to_batches, make_known_truth_mask
from flyte_ddp.monitor.window import FEWEST, Window
from flyte_ddp.pods.run_inputs import find_or_fetch_data_set
from flyte_ddp.predict.answer_table import mark_rows_with_nan
from flyte_ddp.predict.predict import read_sample_setting, restore_images
from flyte_ddp.predict.prediction_batches import (
    Batch,
    SavedModel,
    list_image_files,
    read_image_batches,
    read_test_batches,
)
from flyte_ddp.predict.row_batches import read_row_batches
from flyte_ddp.predict.sample_columns import (
    Reference,
    SampleColumns,
    compute_sample_columns,
    draw_random_samples,
    join_columns,
)
from flyte_ddp.release.evaluation import select_targets
from flyte_ddp.release.promotion import REFERENCE, VERDICT
from flyte_ddp.release.promotion_log import Entry
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.verdict import Verdict
from flyte_ddp.report.figures import Picture

MOST_BAD = 0.1  # of all samples
PICTURED = 24
ROW, INPUT = "row ", "input "  # prefixes of columns' names: of rows as they were read, and of inputs


@dataclass
class WatchedModel:
    """The champion's model, and the samples of a window that the model has predicted."""

    model: SavedModel
    reference: SampleColumns  # of the held-out samples
    bad: BadSamples = field(default_factory=lambda: BadSamples(sys.maxsize))
    ids: list[str] = field(default_factory=list)
    digest: Any = field(default_factory=sha256)  # of the inputs, because outputs depend on the number of threads
    columns: SampleColumns = field(default_factory=dict)
    measured: list[dict[str, Tensor]] = field(default_factory=list)  # by batch, the objective's columns [n, ...]
    unusual: list[tuple[float, Picture]] = field(default_factory=list)  # the first PICTURED (24)

    def predict_batches(self, batches: Iterable[Batch]) -> None:
        """Predict all batches of a window, and fill the fields of this object. Call this method once.

        Samples whose outputs are NaN are recorded in ``bad``, and have no columns.

        Raises:
            UserError: User-defined code fails, a truth does not fit the model, or columns have other names than the
                reference.
        """
        parts, model = [], self.model
        for batch in batches:
            chosen = np.array(batch.decoded)
            if not chosen.any():
                continue
            ids = np.array(batch.ids)[chosen]
            for leaf in name_leaves(batch.inputs).values():
                is_tensor = isinstance(leaf, Tensor)
                self.digest.update(leaf.cpu().flatten().view(torch.uint8).numpy() if is_tensor else repr(leaf).encode())
            with translate_user_errors(f"model {model.sidecar.model!r} on samples {ids[0]} to {ids[-1]}"):
                outputs = model.compute_outputs(batch.inputs)
                columns = compute_sample_columns(model, batch.inputs, outputs, batch.rows)
            if columns.keys() != self.reference.keys():
                names = f"the columns {join_first(columns)}, and the held-out samples {join_first(self.reference)}"
                raise UserError(f"samples {ids[0]} to {ids[-1]} have {names}: the names must be the same in each batch")
            usable = ~mark_rows_with_nan(outputs, len(ids))
            self.bad.names |= dict.fromkeys(ids[~usable].tolist(), "its outputs are NaN")
            self.ids += ids[usable].tolist()
            parts.append({name: values[usable] for name, values in columns.items()})
            truths = [*compress(describe_truths(model, batch), chosen)]
            self.keep_unusual_samples(batch.inputs, ids, truths, columns, np.flatnonzero(usable))
            known = usable & make_known_truth_mask(batch)[chosen]
            if known.any():
                chosen[chosen] = known
                targets = select_targets(model, batch, chosen.tolist())
                if not known.all():
                    outputs = map_float_tensors(outputs, lambda values: values[known])  # noqa: B023
                with torch.no_grad():
                    found = compute_batch_columns(model.objective, outputs, targets, int(known.sum()))
                self.measured.append({name: column.double().cpu() for name, column in found.items()})
        self.columns = join_columns(parts)

    def keep_unusual_samples(
        self,
        inputs: Leaves,
        ids: NDArray[np.str_],
        truths: Sequence[str],
        columns: SampleColumns,
        usable: NDArray[np.int64],
    ) -> None:
        """Update ``unusual``, the pictures of the most unusual samples so far, with the samples of a batch.

        Args:
            inputs: The model's inputs of n samples.
            ids: The ids of the samples [n].
            truths: The truths [n] as texts, "" if unknown.
            columns: The columns of the samples, which are compared with the reference.
            usable: The positions of the samples that may be kept.
        """
        ratings, spec = rate_unusual_samples(self.reference, columns), self.model.spec
        first = usable[np.argsort(-ratings[usable], kind="stable")[:PICTURED]]
        images = restore_images(inputs, first, spec)
        predictions = describe_samples(columns, "prediction", len(ids))  # type: ignore[arg-type]
        scores = columns.get("confidence", [None] * len(ids))
        given = {name: values for name, values in columns.items() if name.startswith(ROW)}
        given = given or {name: values for name, values in columns.items() if name.startswith(INPUT)}
        for place, image in zip(first.tolist(), images, strict=False):
            facts = str(ids[place]), image, predictions[place], truths[place], scores[place]
            picture = Picture(*facts, values=format_sample_inputs(given, place))  # type: ignore[arg-type]
            self.unusual.append((float(ratings[place]), picture))
        self.unusual = sorted(self.unusual, key=lambda each: -each[0])[:PICTURED]


def describe_truths(model: SavedModel, batch: Batch) -> Sequence[str]:
    """Return the truth of each of a batch's samples as text, or "" for an unknown truth."""
    if batch.truths is not None or batch.targets is None:
        return batch.truths or [""] * len(batch.ids)
    texts = describe_samples(model.objective.truths(batch.targets), "truth", len(batch.ids))
    return ["" if text == "unknown" else text for text in texts]


def predict_window(
    registry: Registry, entry: Entry, source: WindowSource, local: Path, *, settings: Settings, by: str
) -> tuple[Window, WatchedModel]:
    """Predict a window with the champion, and return the window, without a number, and its samples.

    Downloads the champion, and runs the code that the champion's sidecar names. Prints a note if some samples cannot be
    decoded or predicted. Writes nothing to the registry.

    Args:
        registry: The registry of the model.
        entry: The champion's entry in the log.
        source: The addresses of samples and truth, with the fields of strftime filled in.
        local: The path of the images or the table on this machine.
        settings: Settings for loading data.
        by: The Flyte execution or user, for the record.

    Raises:
        UserError: The champion has no reference, or cannot be read. The samples or the truth cannot be read, or do not
            fit the model. More than a tenth of the samples cannot be decoded or predicted.
    """
    version = registry.read_version(entry.version, entry.manifest)
    if REFERENCE not in version.files:
        raise UserError(
            f"version {version.name[:12]} of {registry.name} has no {REFERENCE}: the version was released before "
            "monitoring existed, or the objective's answers failed; fix the objective, and release another model with "
            "release_wf, for instance with another seed"
        )
    verdict = Verdict.from_json(registry.read_version_file(version, VERDICT))
    with TemporaryDirectory() as folder:
        weights, sidecar = (registry.download_file(version, name, Path(folder)) for name in (WEIGHTS, SIDECAR))
        model = SavedModel(weights, sidecar, settings)
        reference = Reference.from_bytes(registry.read_version_file(version, REFERENCE))
        watched = WatchedModel(model, reference.columns)
        batches = read_window_batches(model, source, local, watched.bad)
        watched.predict_batches(add_truth_to_batches(model, source.truth, batches) if source.truth else batches)
    samples, bad = len(watched.ids), watched.bad.names
    if bad:
        counted = f"{len(bad):,} of {format_count(samples + len(bad), 'sample')} cannot be decoded or predicted"
        listed = join_first(sorted(f"{name} ({reason})" for name, reason in bad.items()))
        if len(bad) > MOST_BAD * (samples + len(bad)):
            raise UserError(f"{source.address}: {counted}, and at most a tenth may fail; repair the samples: {listed}")
        Progress(settings.progress).print_note(f"{source.address}: {counted}: {listed}")
    digest = watched.digest.hexdigest()
    seed = int(digest[:16], 16)
    drawn = draw_random_samples(watched.columns, SAMPLES, seed)
    held_out = HeldOut(verdict.challenger_score, verdict.samples, reference.measured)
    found = Window(
        version=entry.version,
        address=source.address,
        time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        by=by,
        digest=digest,
        samples=samples,
        bad=len(bad),
        columns=compare_columns(watched.reference, drawn) if samples >= FEWEST else [],
        measure=verdict.measure,
        held_out=held_out.score,
        **vars(score_window(model.objective, watched.measured, held_out, seed)),
    )
    return found, watched


def read_window_batches(model: SavedModel, source: WindowSource, local: Path, bad: BadSamples) -> Iterator[Batch]:
    """Return an iterator of the batches of the source's images, table or data set.

    A data set is first downloaded and prepared if needed. ``local`` is the path of the images or the table on this
    machine. Undecodable samples are recorded in ``bad``.
    """
    if source.images:
        return read_image_batches(model, local, list_image_files(local), model.batch_size, bad)
    if source.table:
        return read_row_batches(model, str(local), None, bad)
    sample = read_sample_setting(model.files[1])
    data = find_or_fetch_data_set(source.dataset, source.data_source, "", sample=sample)
    return read_test_batches(model, open_prepared(data), bad=bad)
