"""Columns of samples, by which windows of data are compared: columns of a model's inputs and of the outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.core.checks.arrays import read_arrays
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import replace_file
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.samples.leaves import Leaves, name_leaves
from flyte_ddp.objectives import Classification, Language, Objective
from flyte_ddp.objectives.classification import split_logits
from flyte_ddp.objectives.language import extract_token_logits
from flyte_ddp.objectives.threshold import predict_classes
from flyte_ddp.predict.prediction_batches import SavedModel

REFERENCE_SAMPLES = 5000
REFERENCE_BYTES = 2**30  # most of a reference in memory: 5,000 samples with some hundred texts
SHORT = "U100"  # type of a row's texts, which may be long
MEASURED_NUMBERS = 250_000  # of the objective's columns in a reference
COLUMNS = 64  # rows with more numbers have only the columns mean and deviation

SampleColumns = dict[str, NDArray[Any]]  # by name [n]: float64, int64, or texts, which are categories
Column = Tensor | NDArray[Any]  # [n], of any type


def compute_sample_columns(
    model: SavedModel, inputs: Leaves, outputs: Any, rows: Mapping[str, NDArray[Any]] | None = None
) -> SampleColumns:
    """Return numbers and texts that describe n samples, by column name, from the model's inputs and outputs.

    ``rows`` are columns of the samples as they were read. Up to COLUMNS (64) of them are included, with names such as
    "row NAME". Calls user-defined ``answers``, whose errors pass through.

    Raises:
        UserError: An answer has the name of an input's column.
    """
    spec, leaves = model.spec, dict[str, Tensor]()
    if isinstance(spec, InputSpec):
        found: dict[str, Column] = {**compute_image_columns(inputs, spec)}
    else:
        # Only the inputs' leaves, because collate="padded" adds a mask as wide as the batch's longest sample.
        without_mask = inputs[0] if spec.form == "leaf" and isinstance(inputs, tuple) else inputs
        given = name_leaves(without_mask)
        leaves = {name: given[name].cpu() for name, _ in spec.leaves if isinstance(given[name], Tensor)}
        found, shapes = {}, {name: leaf.shape for name, leaf in spec.leaves}
        columns = model.sidecar.preprocessing.columns  # of frames
        for name, leaf in leaves.items():
            varies = shapes[name][:1] == (None,)
            found |= compute_tensor_columns(f"input {name}".rstrip(), leaf, columns.get(name, ()), varies=varies)
    of_rows = [*(rows or {}).items()][:COLUMNS]
    shown = {f"row {name}": each.astype(SHORT) if each.dtype.kind == "U" else each for name, each in of_rows}
    found = {**shown, **found}
    own = type(model.objective).answers
    if own is Classification.answers:
        found |= compute_prediction_columns(outputs, model.objective)
    elif own is Language.answers:
        found |= compute_text_columns(extract_token_logits(outputs), leaves)
    else:
        answers = {name: np.asarray(values) for name, values in model.objective.answers(outputs).items()}
        numbers = [values for values in answers.values() if values.dtype.kind in "biuf"]
        many = len(numbers) > COLUMNS
        outputs_found = split_into_columns("output", np.stack(numbers, axis=1), ()) if many else answers
        if shared := [*(found.keys() & outputs_found.keys())]:
            raise UserError(f"the objective's answers and the inputs both have a column {shared[0]!r}; rename one")
        found |= outputs_found
    return {name: convert_column(values) for name, values in found.items()}


def compute_image_columns(images: Tensor, spec: InputSpec) -> dict[str, Tensor]:
    """Return brightness, contrast and sharpness of normalised images [n, C, H, W].

    Sharpness is the log variance of the Laplacian.
    """
    mean, std = (torch.tensor(values, device=images.device) for values in (spec.mean, spec.std))
    grey = torch.einsum("nchw,c->nhw", images.float(), std / len(std)) + mean.mean()
    around = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
    sharpness = ((around - 4 * grey[:, 1:-1, 1:-1]).var((1, 2)) + 1e-8).log()
    return {"brightness": grey.mean((1, 2)), "contrast": grey.std((1, 2)), "sharpness": sharpness}


def compute_tensor_columns(name: str, leaf: Tensor, columns: Sequence[str], *, varies: bool) -> Mapping[str, Column]:
    """Return the numbers of an input tensor [n, ...] as columns.

    If the length is fixed, each number of a sample is a column. Above 64 numbers, the columns are mean and deviation.
    If the length varies, the columns are length and mean. Booleans whose length varies have no columns.

    Integers [n, k] are a text if the length varies, or if k is above 64. The columns of a text are its length and a
    single token, at the position (sum of the tokens) mod length. The position does not depend on the batch, so samples
    stay independent.

    Args:
        name: The beginning of the columns' names.
        leaf: The tensor, on the CPU.
        columns: The names of the tensor's columns. If empty, columns are numbered.
        varies: Whether the length of samples differs between batches.
    """
    leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    leaf = leaf.double() if leaf.is_floating_point() else leaf  # NumPy has no bfloat16
    is_text = not leaf.is_floating_point() and leaf.dtype != torch.bool and leaf.dim() == 2
    if not varies and not (is_text and leaf.shape[1] > COLUMNS):
        return split_into_columns(name, leaf.reshape(len(leaf), -1).numpy(), columns)
    if leaf.dtype == torch.bool:  # a mask has the same lengths as the masked leaf
        return {}
    lengths = measure_lengths(leaf)
    if is_text:
        tokens = leaf.gather(1, (leaf.long().sum(1) % lengths.clamp(min=1))[:, None])[:, 0]
        return {f"{name} length": lengths, f"{name} token": tokens.numpy().astype(str)}
    numbers = lengths * leaf[0, 0].numel()
    return {f"{name} length": lengths, f"{name} mean": leaf.flatten(1).sum(1) / numbers.clamp(min=1)}


def measure_lengths(leaf: Tensor) -> Tensor:
    """Return the lengths [n] of padded samples [n, longest, ...]. Zeros at the end of a sample are padding."""
    there = (leaf != 0).reshape(*leaf.shape[:2], -1).any(2)
    return (there * torch.arange(1, leaf.shape[1] + 1)).amax(1)


def compute_prediction_columns(logits: Tensor, objective: Objective) -> dict[str, Column]:
    """Return the columns ``prediction``, ``confidence`` and ``entropy`` for the logits [n, classes] of n samples.

    ``prediction`` is the class's name, by the objective's threshold if the objective has a threshold. ``confidence`` is
    the probability of this class, and ``entropy`` is in nats.
    """
    predicted, names = predict_classes(objective, logits).cpu(), np.array(objective.facts.classes)
    confidence, entropy = torch.empty(2, len(logits), dtype=torch.float64)
    start = 0
    for part in split_logits(logits):  # whose copies in fp64 are large
        logs, rows = part.double().log_softmax(1).cpu(), slice(start, start := start + len(part))
        confidence[rows] = logs.gather(1, predicted[rows, None])[:, 0].exp()
        entropy[rows] = torch.special.entr(logs.exp()).sum(1)
    return {"prediction": names[predicted.numpy()], "confidence": confidence, "entropy": entropy}


def compute_text_columns(logits: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Column]:
    """Return the mean confidence and entropy of each text's tokens. ``logits`` have the shape [n, longest, tokens].

    ``leaves`` are the inputs by name. If an input has the tokens, places after the end of a text are skipped.
    """
    tokens = [leaf for leaf in leaves.values() if leaf.shape == logits.shape[:2]] or [torch.ones(logits.shape[:2])]
    found = []
    for text, length in zip(logits, measure_lengths(tokens[0]).tolist(), strict=True):  # each is large
        shares = text[: max(1, length)].softmax(1)
        found.append((shares.amax(1).mean().item(), torch.special.entr(shares).sum(1).mean().item()))
    return dict(zip(("confidence", "entropy"), np.array(found).T, strict=True))


def split_into_columns(name: str, rows: NDArray[Any], names: Sequence[str]) -> SampleColumns:
    """Split rows [n, k] into k columns by name. If k is above COLUMNS (64), return mean and deviation instead.

    If there are not k ``names``, columns are numbered.
    """
    width = rows.shape[1]
    if width > COLUMNS:
        return {f"{name} mean": rows.mean(1, np.float64), f"{name} deviation": rows.std(1, np.float64)}
    called = names if len(names) == width else [*map(str, range(width))]
    return {f"{name} {each}" if width > 1 or names else name: rows[:, place] for place, each in enumerate(called)}


def convert_column(values: Column) -> NDArray[Any]:
    array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    return array if array.dtype.kind == "U" else array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def join_columns(parts: Sequence[SampleColumns]) -> SampleColumns:
    """Return the columns of all parts, which have the same names, or {} without any part."""
    return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def draw_random_samples(columns: SampleColumns, most: int, seed: int) -> SampleColumns:
    """Return up to ``most`` randomly drawn samples, in their order, without replacement.

    The same ``seed`` draws the same samples. ``columns`` must have at least one column.
    """
    samples = len(next(iter(columns.values())))
    chosen = np.sort(np.random.default_rng(seed).choice(samples, min(samples, most), replace=False))
    return {name: values[chosen] for name, values in columns.items()}


def draw_objective_columns(columns: Mapping[str, Tensor], seed: int) -> SampleColumns:
    """Return the objective's columns [n] or [n, k] for randomly drawn samples, with at most 250,000 numbers.

    The same ``seed`` draws the same samples.
    """
    arrays = {name: column.numpy() for name, column in columns.items()}
    return draw_random_samples(
        arrays, max(1, MEASURED_NUMBERS // sum(array[0].size for array in arrays.values())), seed
    )


@dataclass(frozen=True)
class Reference:
    """Columns of a model's held-out samples, and the objective's columns of some of these samples."""

    columns: SampleColumns
    measured: Mapping[str, Tensor]  # empty in a file that is older than these columns

    def write_file(self, path: Path) -> None:
        """Write randomly drawn samples to a file: up to 5,000, and fewer with the objective's columns.

        At most 250,000 numbers of the objective's columns are written. The seed of the draw is fixed. Replaces an
        existing file.
        """
        drawn = draw_random_samples(self.columns, REFERENCE_SAMPLES, 0), draw_objective_columns(self.measured, 0)
        # Names are in arrays, because a name may equal a parameter of NumPy's function.
        arrays = (array for columns in drawn for array in (np.array([*columns]), *columns.values()))
        with replace_file(path) as file:
            np.savez_compressed(file, *arrays)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Return the reference in a file's content.

        Raises:
            UserError: The file is damaged.
        """
        columns, measured = SampleColumns(), SampleColumns()
        try:
            arrays = iter(read_arrays(content, REFERENCE_BYTES).values())
            for group, names in zip((columns, measured), arrays, strict=False):
                group.update({str(name): next(arrays) for name in names.tolist()})
            lengths = {len(array) for array in columns.values()}
            found = cls(columns, {name: torch.from_numpy(array) for name, array in measured.items()})
        except (ValueError, TypeError, LookupError, StopIteration) as error:
            raise damaged_error(repr(error)) from error
        if len(lengths) != 1:
            raise damaged_error(f"the columns have {lengths or 'no'} samples")
        return found


def damaged_error(problem: str) -> UserError:
    return UserError(f"the model's reference of held-out samples is damaged ({problem}); release it again")
