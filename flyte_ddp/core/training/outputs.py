"""Write a run's model, sidecar, predictions, start and end record of the metrics, and notes for the report."""

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import replace_file
from flyte_ddp.core.models import saving
from flyte_ddp.core.models.sidecar import CLASSIFICATION, Digests, Metrics, Sidecar
from flyte_ddp.core.objectives.objective import (
    Objective,
    compute_mean_losses,
    convert_float_tensors,
    list_float_tensors,
)
from flyte_ddp.core.objectives.table_columns import (
    MOST_COLUMNS,
    TableColumns,
    describe_samples,
    format_sample_inputs,
    merge_columns,
)
from flyte_ddp.core.parallel.batch_norm import has_unsynchronised_batch_norm
from flyte_ddp.core.parallel.distributed import hide_process_group, rank, wait_for_all_ranks, world_size
from flyte_ddp.core.parallel.dropout import make_dropout_rank_independent
from flyte_ddp.core.runs.checkpoint import Arithmetic, Checkpoint, Identity, write_and_make_room
from flyte_ddp.core.runs.metrics import RungResult, TrainingEnd, TrainingStart
from flyte_ddp.core.runs.run_folder import PREDICTIONS, RUNG
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.samples.leaves import Leaves, call_with_leaves
from flyte_ddp.core.text.formatting import join_first
from flyte_ddp.core.text.json_lines import format_record, replace_non_finite
from flyte_ddp.core.text.sections import Pictures, encode_sections
from flyte_ddp.core.training.evaluate import Evaluation
from flyte_ddp.core.training.recording import Recorder, describe_waiting_for_data
from flyte_ddp.core.training.training_state import TrainingState
from flyte_ddp.core.user_code.digest import library_digest
from flyte_ddp.core.user_code.version import VERSION

OF_SHOWN = ("masks", "true_masks", "values")  # arrays of only those test samples that the report shows
LEAST_STEPS = 30  # a shorter run is a trial
VERIFIED_SAMPLES = 64
MOST_APART = 1e-3  # share of the largest logit; a GPU may compute convolutions in TF32, with 10 bits

Arrays = dict[str, NDArray[Any]]  # of the predictions file, by name
Values = TypeVar("Values")


class PredictedBatch(NamedTuple):
    """A batch of test samples for the predictions file."""

    inputs: tuple[str, ...]  # the names of inputs whose values the report shows
    columns: TableColumns  # answers and truths
    arrays: Arrays  # [samples, ...] by name


def write_start_record(state: TrainingState, recorder: Recorder, *, resumed_from: Checkpoint | None) -> None:
    """Append the start record to metrics.jsonl, and print notes and warnings. Does nothing on ranks other than 0.

    Warnings are also kept for the report.
    """
    if rank() != 0:
        return
    hardware, ranks = state.hardware, world_size()
    skipped = state.plan.model.list_randomly_initialised_tensors(state.model.state_dict())
    recorder.write(
        TrainingStart(
            resumed_after_step=resumed_from.step if resumed_from else 0,
            hyperparameters=state.plan.hyperparameters.to_dict(),
            num_ranks=ranks,
            num_nodes=hardware.num_nodes,
            device=torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else "cpu",
            backend=hardware.backend if ranks > 1 else "none",
            strategy=hardware.strategy if ranks > 1 else "none",
            precision=hardware.precision,
            channels_last=hardware.channels_last,
            threads_per_rank=hardware.threads,
            parameters=sum(parameter.numel() for parameter in state.model.parameters()),
            training_samples=len(state.training),
            validation_samples=len(state.validation),
            test_samples=len(state.test),
            steps=state.total_steps,
            classes=[*state.objective.facts.classes],
            measures={name: state.objective.measures[name] for name in state.objective.order_measures()},
            loss_unit=state.objective.loss_unit,
            init_skipped=skipped,
        )
    )
    recorder.progress.print_note(f"ranks: {ranks}, nodes: {hardware.num_nodes}")
    if skipped:
        recorder.add_warning(f"Started with random weights and not from init_from: {', '.join(skipped)}.")
    if uncovered := state.user_sources.list_uncovered(state.model):
        recorder.add_warning(
            f"Your code uses {join_first(sorted(uncovered))}, which the cache key does not cover: changes "
            "are not detected. Import the files by name at the top of a module, from a folder on Python's path."
        )


def write_outputs(work: Work, state: TrainingState, recorder: Recorder) -> None:
    """Write model.pt, model.json, the predictions, and finally the end record of metrics.jsonl. Collective.

    Rank 0 writes, and other ranks return when rank 0 begins. On rank 0, loads the kept weights into the trained model.
    Builds another model on all ranks, which draws random numbers. If the disk is full, deletes the older checkpoint.

    Raises:
        UserError: The saved model gives other outputs than the trained model, or a file cannot be written.
    """
    bad = state.splits.gather_bad_samples()
    # Built on all ranks, because a user's model may wait for other ranks while it is built, such as for a download.
    # Built anew and not copied, because load_model will also build the model.
    plan = state.plan
    new_model = plan.model.build(state.objective.outputs, state.spec)
    wait_for_all_ranks()  # detects a rank that hangs: rank 0's work from here on has no time limit
    if rank() != 0:
        return
    test = state.selection.test
    if plan.selection.keep == "best" and math.isinf(state.selection.best):
        recorder.add_warning(
            f"select_by={plan.selection.select_by!r} is not defined on the validation split, so the first evaluation's "
            "weights are kept; hold out more samples (validation_fraction)."
        )
    model = state.kept_model()
    model.load_state_dict(state.selection.weights)
    sidecar = make_sidecar(state, work.identity, recorder.epoch_accuracies)
    model_path, _ = write_and_make_room(
        work.output_folder, lambda: saving.save_model(work.output_folder, model.state_dict(), sidecar)
    )
    verify_saved_model(new_model, model_path, sidecar, state)
    rows, objective = min(state.settings.wandb_table_rows, len(state.test)), state.objective
    recorder.add_warning(objective.describe_single_prediction(test.columns))
    try:
        described = compute_prediction_arrays(state, objective.with_threshold(test.threshold), test, rows)
    except Exception as error:
        if not plan.objective.describes_by_user_code:
            raise
        recorder.add_warning(f"objective={plan.objective.name!r} could not describe its predictions: {error!r}")
        described = compute_prediction_arrays(state, Objective(objective.facts), test, rows)
    with replace_file(work.output_folder / PREDICTIONS) as file:
        np.savez(file, **described)  # type: ignore[arg-type]  # NumPy's types have allow_pickle among the arrays
    if state.step >= LEAST_STEPS:
        pictures, loaders = state.spec.pictures, state.training.source.loaders
        recorder.add_warning(describe_waiting_for_data(state.clock.seconds, state.hardware, loaders, pictures=pictures))
    notes = [*recorder.warnings, *list_report_notes(state, recorder.arithmetic, work.checkpoint)]
    if bad:
        what = f"{len(bad):,} samples could not be decoded and were replaced by other samples"
        notes.append(f"{what}: {join_first(sorted(bad))}.")
    recorder.write(
        TrainingEnd(
            test=test.measures,
            seconds=recorder.seconds_by_activity(),
            samples_per_second=recorder.samples_in_all / max(recorder.training_seconds, 1e-9),
            stopped=state.selection.stopped,
            notes=notes,
        )
    )


def write_rung_result(folder: Path, state: TrainingState, validation: Evaluation) -> None:
    """Write rung.json: the step, and the validation measure of the weights to keep. Only rank 0 writes.

    A rung is a stop of a sweep's run before its last step.
    """
    if rank() == 0:
        result = RungResult(state.step, state.selection.get_measure_of_kept_weights(validation))
        with replace_file(folder / RUNG) as file:
            file.write(format_record(result.to_json_value()))


def make_sidecar(state: TrainingState, identity: Identity, history: list[float]) -> Sidecar:
    """Return the content of model.json: how to build the model, its measures, and digests of code and data.

    ``identity`` has the digests of code and files. ``history`` has the main measure after each evaluation.
    """
    plan, data, main = state.plan, state.data, state.objective.main_measure
    facts, weights = state.objective.facts, state.objective.class_weights
    is_classification = plan.objective.name == CLASSIFICATION
    return Sidecar(
        model=plan.model.name,
        classes=[*facts.classes],
        objective=plan.objective.name,
        outputs=None if is_classification else state.objective.outputs,
        target_shape=None if is_classification else [*facts.target_shape],
        class_weights=None if weights is None else weights.tolist(),
        threshold=state.selection.test.threshold,
        options=plan.options,
        input=state.spec.to_sidecar_input(data.crop),
        hyperparameters=plan.hyperparameters.to_dict(),
        metrics=Metrics(
            test=replace_non_finite(state.selection.test.measures),
            history=replace_non_finite({"accuracies" if main == "accuracy" else main: history}),
            kept_epoch=state.selection.epoch,
        ),
        digests=Digests(
            data=data.digest,
            code=library_digest(),
            user_code=identity.user_code,
            init_from=identity.initial_weights,
            weights="",  # which save_model() sets
        ),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": version("torchvision"),
            "flyte_ddp": VERSION,
        },
        num_ranks=world_size(),
        num_nodes=state.hardware.num_nodes,
        threads_per_rank=state.hardware.threads,
        sources=state.user_sources.texts,
        preprocessing=data.preprocessing,
    )


def verify_saved_model(fresh: nn.Module, model_path: Path, sidecar: Sidecar, state: TrainingState) -> None:
    """Raise UserError if a new model with the saved weights gives other outputs than the trained model.

    Compares up to 64 test samples. Outputs may differ by a thousandth of the largest output.

    Args:
        fresh: A new model. Gets the saved weights, moves to the device, and gets other dropout layers' ``forward``.
        state: Has the trained model with the kept weights, and the test split.

    Raises:
        UserError: The outputs differ, or the weights do not fit the new model.
    """
    first = state.test.order.samples_at(slice(0, min(VERIFIED_SAMPLES, len(state.test))))
    inputs, targets, _ = state.test.load_batch(first)
    saving.load_weights(fresh, model_path, sidecar)
    model = fresh.to(state.device).eval()
    make_dropout_rank_independent(model, state.this_pass)  # a user's model may use dropout in evaluations, too
    if state.dtype == torch.float64:
        model.double()
    with torch.no_grad(), state.evaluation_mode():
        expected = flatten_outputs(state.predict(inputs, targets, len(first)))
        state.this_pass.begin_pass(state.plan.loop.seed, 0, np.arange(len(first)), state.device)
        model = model.to(memory_format=state.memory_format)
        found = flatten_outputs(call_with_leaves(model, state.prepare_inputs(inputs)))
    largest = expected.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max().item()
    # A model may mask classes by infinite logits, which must be equal and do not count as the largest logit.
    if not torch.allclose(found, expected, rtol=0.0, atol=MOST_APART * largest, equal_nan=True):
        apart = (found - expected).abs().nan_to_num(nan=0.0, posinf=torch.inf).max().item()
        raise UserError(
            f"model {state.plan.model.name!r}: the state_dict is incomplete: a new model with the saved weights gives "
            f"different outputs (by up to {apart:.2g}, where the largest output is {largest:.2g}); keep all values "
            "that forward uses in parameters or buffers, or set the same values in each new model"
        )


def flatten_outputs(outputs: Any) -> Tensor:
    return torch.cat([values.flatten().cpu() for values in list_float_tensors(outputs)] or [torch.zeros(1)])


def list_report_notes(state: TrainingState, arithmetic: Arithmetic, resumed_from: Checkpoint | None) -> list[str]:
    """Return sentences for the report: why the result may depend on the number of ranks, and the resume, if any.

    Call this function on rank 0 only. ``arithmetic`` has the facts that decide this run's rounding. ``resumed_from`` is
    None if the run did not resume.
    """
    other = "another number of ranks would give another result."
    by_rank_0 = "and rank 0's values were used: another number of ranks may give another result."
    changed = sorted(state.buffers.list_changed_buffers())
    unsaved = sorted({*changed}.intersection(state.buffers.unsaved_names))
    separate = has_unsynchronised_batch_norm(state.model, synchronised=state.plan.loop.sync_batchnorm)
    saw_reduced_loss = state.objective.saw_reduced_loss
    notes: list[tuple[str, object]] = [
        (f"The model draws random numbers outside torch's Dropout layers: {other}", state.this_pass.model_draws),
        (f"The loss is a single number: unless the number is the mean over samples, {other}", saw_reduced_loss),
        (f"BatchNorm used the statistics of each rank's part of the batch: {other}", separate),
        (f"The model changes {join_first(changed)} in its forward passes, {by_rank_0}", changed),
        (f"{join_first(unsaved)} is not in the state_dict: evaluations used the values of a new model.", unsaved),
    ]
    texts = [note for note, applies in notes if applies] + state.data.list_notes()
    if resumed_from is not None:
        changes = arithmetic.describe_changes(resumed_from.trained_in)
        since = f"; since then these changed: {changes}; so the result is exact up to rounding" if changes else ""
        texts.append(f"The run resumed from a checkpoint after step {resumed_from.step:,}{since}.")
    return texts


def compute_prediction_arrays(state: TrainingState, objective: Objective, test: Evaluation, rows: int) -> Arrays:
    """Run the kept model on some test samples, and return the arrays of the predictions file by name.

    Arrays hold the first ``rows`` test samples, then the samples that sections of the report show. Two arrays hold only
    the first ``rows`` samples: ``texts`` and ``numbers``, [rows, columns]. Three arrays hold only the shown samples:
    ``masks``, ``true_masks`` and ``values``. ``values`` [shown, k] are the inputs that ``value_columns`` [k] names.
    """
    with hide_process_group():
        sections = objective.sections(test.columns)
    shown = [sample for section in sections if isinstance(section, Pictures) for sample in section.samples]
    index = np.array([*range(rows), *shown], dtype=np.int32)
    parts = [*predict_batches(state, objective, index)]
    [inputs] = {part.inputs for part in parts} or {()}
    columns = merge_batches([part.columns for part in parts], lambda lists: [*chain.from_iterable(lists)])
    texts, numbers = split_columns_by_type(columns)
    arrays = merge_batches([part.arrays for part in parts], np.concatenate)
    return {
        **{name: values[rows:] if name in OF_SHOWN else values for name, values in arrays.items()},
        "index": index,
        "value_columns": np.array(inputs, dtype=np.str_),
        "loss": compute_mean_losses(test.columns)[index].float().numpy(),
        "table_rows": np.array(rows),
        "text_columns": np.array(texts, dtype=np.str_),
        "texts": np.array([columns[name][:rows] for name in texts], dtype=np.str_).reshape(len(texts), rows).T,
        "make_number_columns": np.array(numbers, dtype=np.str_),
        "numbers": np.array([columns[name][:rows] for name in numbers], dtype=np.float32).reshape(len(numbers), rows).T,
        "sections": np.array(encode_sections(sections)),
    }


def split_columns_by_type(columns: TableColumns) -> tuple[list[str], list[str]]:
    """Return the names of the columns of texts, and the names of the columns of numbers.

    If more than 1,001 columns are numbers, the second list has at most the column ``score``.
    """
    texts = [name for name, values in columns.items() if len(values) and isinstance(values[0], str)]
    numbers = [name for name in columns if name not in texts]
    return texts, [name for name in numbers if name == "score" or len(numbers) <= MOST_COLUMNS + 1]


def merge_batches(parts: Sequence[Mapping[str, Values]], join: Callable[[list[Values]], Values]) -> dict[str, Values]:
    """Join the values of all batches by ``join``, name by name. Names that are missing in a batch are dropped."""
    return {
        name: join([part[name] for part in parts])
        for name in (parts[0] if parts else ())
        if all(name in part for part in parts)  # a batch of shorter padded samples has fewer columns of numbers
    }


def predict_batches(state: TrainingState, objective: Objective, index: NDArray[np.int32]) -> Iterator[PredictedBatch]:
    """Run the kept model on test samples in batches, and yield each batch's columns and arrays for the predictions.

    ``index`` has the positions of the samples in the order of the test split. The model runs in evaluation mode.
    """
    batch_size = state.plan.loop.test_batch_size
    for start in range(0, len(index), batch_size):
        places = index[start : start + batch_size].tolist()
        samples = [int(state.test.order.samples_at(slice(at, at + 1))[0]) for at in places]
        numbers = np.array(samples, dtype=np.int64)
        inputs, targets, names = state.test.load_batch(numbers)
        with torch.no_grad(), state.evaluation_mode():
            outputs = state.predict(inputs, targets, len(places))
        values = state.data.make_input_columns(inputs, numbers)
        texts = [format_sample_inputs(values, row).values() for row in range(len(places))]
        answers, arrays = collect_answers(
            objective, convert_float_tensors(outputs, torch.float32), targets, len(places)
        )
        arrays["values"] = np.array([*map(list, texts)], dtype=np.str_).reshape(len(places), len(values))
        arrays["names"] = np.array(names, dtype=np.str_)
        if state.spec.pictures:
            arrays["images"] = inputs.cpu().numpy()
        yield PredictedBatch((*values,), answers, arrays)


def collect_answers(objective: Objective, outputs: Any, targets: Leaves, samples: int) -> tuple[TableColumns, Arrays]:
    """Return a batch's answers and truths as columns of a table, and as arrays for the report.

    Args:
        samples: Number of samples in the batch.

    Returns:
        The columns, and the arrays ``score`` (NaN without scores), ``prediction`` and ``truth`` (short texts). For
            objectives with masks, the texts are empty, and ``masks`` and ``true_masks`` are added.
    """
    answers = objective.answers(objective.hide_padding(outputs, targets))
    truths, masks = objective.truths(targets), objective.masks(outputs)
    merged = merge_columns(answers, truths)
    arrays: Arrays = {"score": np.array(answers.get("score", [np.nan] * samples), dtype=np.float32)}
    if masks is not None:
        kind = np.uint8 if objective.outputs < 256 else np.int32
        arrays["masks"], arrays["true_masks"] = (values.cpu().numpy().astype(kind) for values in (masks, targets))
        answers = truths = {}
    for name, columns in (("prediction", answers), ("truth", truths)):
        arrays[name] = np.array(describe_samples(columns, name, samples), dtype=np.str_)
    return merged, arrays
