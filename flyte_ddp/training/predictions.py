"""Collect what ``predictions.npz`` holds: the report's sections, and samples with what the model says of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.models.inputs import InputSpec
from flyte_ddp.objectives import Objective
from flyte_ddp.objectives.objective import convert_outputs, mean_losses
from flyte_ddp.objectives.table_columns import MOST_COLUMNS, TableColumns, describe_samples, merge_columns
from flyte_ddp.parallel.distributed import hide_process_group
from flyte_ddp.samples.leaves import Leaves
from flyte_ddp.text.sections import Pictures, encode_sections
from flyte_ddp.training.evaluate import Evaluation
from flyte_ddp.training.training_state import TrainingState


def collect_predictions(state: TrainingState, objective: Objective, test: Evaluation, rows: int) -> dict[str, Any]:
    """Return the predictions file's arrays, by name: of the first ``rows`` test samples and those that sections show.

    Only the first have ``texts`` and ``numbers``, [rows, columns]; only the others ``masks`` and ``true_masks``.
    """
    with hide_process_group():
        sections = objective.sections(test.columns)
    shown = [sample for section in sections if isinstance(section, Pictures) for sample in section.samples]
    index = np.array([*range(rows), *shown], dtype=np.int32)
    parts = [*describe_batches(state, objective, index)]
    columns = merge_batches([part.pop("columns") for part in parts])
    texts, numbers = name_table_columns(columns)
    arrays = merge_batches(parts)
    return {
        **{name: values[rows:] if name in ("masks", "true_masks") else values for name, values in arrays.items()},
        "index": index,
        "loss": mean_losses(test.columns)[index].float().numpy(),
        "table_rows": np.array(rows),
        "text_columns": np.array(texts, dtype=np.str_),
        "texts": np.array([columns[name][:rows] for name in texts], dtype=np.str_).reshape(len(texts), rows).T,
        "number_columns": np.array(numbers, dtype=np.str_),
        "numbers": np.array([columns[name][:rows] for name in numbers], dtype=np.float32).reshape(len(numbers), rows).T,
        "sections": np.array(encode_sections(sections)),
    }


def name_table_columns(columns: TableColumns) -> tuple[list[str], list[str]]:
    texts = [name for name, values in columns.items() if len(values) and isinstance(values[0], str)]
    numbers = [name for name in columns if name not in texts]
    return texts, [name for name in numbers if name == "score" or len(numbers) <= MOST_COLUMNS + 1]


def merge_batches(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: np.concatenate([part[name] for part in parts])
        if isinstance(first, np.ndarray)
        else [value for part in parts for value in part[name]]
        for name, first in (parts[0].items() if parts else ())
    }


def describe_batches(state: TrainingState, objective: Objective, index: NDArray[np.int32]) -> Iterator[dict[str, Any]]:
    for start in range(0, len(index), state.hp.test_batch_size):
        places = index[start : start + state.hp.test_batch_size].tolist()
        samples = [int(state.test.order.samples(slice(at, at + 1))[0]) for at in places]
        inputs, targets, names = state.test.load_batch(np.array(samples, dtype=np.int64))
        with torch.no_grad(), state.evaluation_mode():
            outputs = state.predict(inputs, targets, len(places))
        yield {
            "names": np.array(names, dtype=np.str_),
            **({"images": inputs.cpu().numpy()} if isinstance(state.spec, InputSpec) else {}),
            **describe_answers(objective, convert_outputs(outputs, torch.float32), targets, len(places)),
        }


def describe_answers(objective: Objective, outputs: Any, targets: Leaves, samples: int) -> dict[str, Any]:
    answers, truths, masks = objective.answers(outputs), objective.truths(targets), objective.masks(outputs)
    found: dict[str, Any] = {"columns": merge_columns(answers, truths)}
    found["score"] = np.array(answers.get("score", [np.nan] * samples), dtype=np.float32)
    if masks is not None:
        kind = np.uint8 if objective.outputs < 256 else np.int32
        found["masks"], found["true_masks"] = (values.cpu().numpy().astype(kind) for values in (masks, targets))
        answers = truths = {}
    for name, columns in (("prediction", answers), ("truth", truths)):
        found[name] = np.array(describe_samples(columns, name, samples), dtype=np.str_)
    return found
