"""Convert inputs, targets, ids and weights that users give into the arrays that are stored."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.samples.leaves import (
    Leaves,
    Ragged,
    convert_to_array,
    describe_form,
    get_leaves_form,
    is_tensor,
    label_leaf,
    name_leaves,
    require_numbers,
    restore_leaves,
)
from flyte_ddp.datasets import columns

MOST_CLASSES = 1_000_000  # the maximum of the hyperparameter num_classes
# Reserved names of inputs: "self" is a parameter of every module's call, and "outputs" is the output in ONNX files.
RESERVED = ("self", "outputs")
# Types that torch does not compute with, and the types that replace them.
STORED_TYPES = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


def convert_inputs_and_ids(
    prefix: str, inputs: Any, given_ids: Any, *, distinct: bool = False
) -> tuple[Leaves, NDArray[np.str_] | None]:
    """Return inputs as arrays or Ragged, and ids as texts, or None without ids.

    Floats become float32. Arrays that fit are not copied.

    Args:
        prefix: The start of the names in errors, for example "train_".
        inputs: The leaves of the inputs as the user gave them.
        given_ids: An id for each sample, or None.
        distinct: Whether to reject a column if float32 keeps at most half of the column's different values.

    Raises:
        UserError: Inputs are empty, not numeric, not finite, or of unequal lengths, or a name of a leaf is unfit.
    """
    stored, ids = convert_new_inputs_and_ids(prefix, inputs, given_ids, distinct=distinct)
    given = name_leaves(inputs)
    for key, leaf in name_leaves(stored).items():
        leaf_name = label_leaf(f"{prefix}inputs", key)
        if isinstance(leaf, Ragged):
            columns.require_finite(leaf_name, leaf.values, None, ids, leaf.ends)
        else:
            columns.require_finite(leaf_name, leaf, given[key], ids)
    return stored, ids


def convert_new_inputs_and_ids(
    prefix: str, inputs: Any, given_ids: Any, *, distinct: bool = False
) -> tuple[Leaves, NDArray[np.str_] | None]:
    """Return inputs as arrays or Ragged, and ids as texts, or None without ids. NaN and infinite inputs are accepted.

    The arguments are those of :func:`convert_inputs_and_ids`.

    Raises:
        UserError: Inputs are empty, not numeric, or of unequal lengths, or a name of a leaf is unfit.
    """
    name = f"{prefix}inputs"
    stored = convert_leaves(name, inputs, distinct=distinct)
    if stored is None:
        raise UserError(f"{name}: are None; give at least one array")
    ids = None if given_ids is None else np.array([*map(convert_id, given_ids)])
    require_one_length({name: stored, f"{prefix}ids": ids})
    return stored, ids


def convert_id(given: Any) -> str:
    """Return an id, given as a text, bytes, number or tensor of one element, as a text.

    Whole floats become whole numbers, because pandas turns whole ids with gaps into floats. Bytes are decoded as UTF-8,
    and invalid bytes become escapes such as ``\\xff``.
    """
    given = given.item() if is_tensor(given) else given
    if isinstance(given, bytes):
        return given.decode(errors="backslashreplace")
    whole = isinstance(given, (float, np.floating)) and given.is_integer()
    return str(int(given)) if whole else str(given)


def convert_leaves(name: str, leaves: Any, *, distinct: bool = False) -> Leaves:
    """Return leaves as contiguous arrays or Ragged, in the same form. None stays None.

    Floats become float32, and other values a type that torch supports. Arrays that fit are not copied.

    Args:
        name: What the leaves are called in errors. If the name ends with "inputs", reserved names of leaves are
            rejected.
        leaves: The leaves as the user gave them.
        distinct: Whether to reject a column if float32 keeps at most half of the column's different values.

    Raises:
        UserError: A dict or tuple is empty, a name is unfit, or a leaf is not numeric or has no samples.
    """
    require_identifiers(name, leaves)
    named = name_leaves(leaves)
    if not named and leaves is not None:
        raise UserError(f"{name}: has no array; give at least one")
    stored = {key: convert_leaf(label_leaf(name, key), leaf, distinct=distinct) for key, leaf in named.items()}
    return restore_leaves(get_leaves_form(leaves), stored)


def require_identifiers(name: str, leaves: Leaves) -> None:
    """Raise UserError if a name in a dict of leaves is no Python identifier.

    If ``name`` ends with "inputs", reserved names are also rejected.
    """
    for key in name_leaves(leaves) if get_leaves_form(leaves) == "dict" else ():
        if not isinstance(key, str) or not key.isidentifier():
            raise UserError(
                f"{name}: the name {key!r} must be a Python identifier, because it becomes an argument of forward"
            )
        if key in RESERVED and name.endswith("inputs"):
            raise UserError(f"{name}: the name {key!r} is reserved; rename it here and in the model's forward")


def convert_leaf(name: str, given: Any, *, distinct: bool = False) -> NDArray[Any] | Ragged:
    """Return a leaf as a contiguous array [N, ...] in the stored type, or as Ragged if samples have different lengths.

    Args:
        name: The name of the leaf in errors.
        given: The leaf as the user gave it.
        distinct: Whether to reject a column if float32 keeps at most half of the column's different values.

    Raises:
        UserError: The leaf is not numeric, has no samples, or has samples that differ beyond the first dimension.
    """
    values = columns.unpack_values(name, given)
    try:
        array = convert_to_array(name, values)
    except UserError:
        if hasattr(values, "to_list"):  # an awkward array with samples of different lengths
            return convert_leaf(name, values.to_list(), distinct=distinct)
        if not isinstance(values, list):
            raise
        # A list of arrays of different shapes.
        samples = [convert_to_array(f"{name}[{place}]", value) for place, value in enumerate(values)]
        return convert_ragged(name, samples, distinct=distinct)
    is_column = array.ndim == 1 and array.dtype == object and not isinstance(values, list)
    if is_column and all(isinstance(sample, (list, np.ndarray)) for sample in array):  # a column of lists
        return convert_leaf(name, [*array], distinct=distinct)
    array = columns.convert_columns(name, given, array)
    if not array.ndim or not len(array):
        raise UserError(f"{name}: must be an array [samples, ...] with at least one sample, got {list(array.shape)}")
    stored = np.ascontiguousarray(convert_values(name, array))
    if distinct:
        columns.require_distinct(name, given, array)
    return stored


def convert_ragged(name: str, samples: Sequence[NDArray[Any]], *, distinct: bool = False) -> Ragged:
    """Return samples [length, ...] of different lengths as Ragged. Empty samples may have the shape [0] and any type.

    Raises:
        UserError: Samples are not numeric or differ beyond the first dimension. If ``distinct`` is set, also if float32
            cannot distinguish float64 values.
    """
    # An empty list is an array of floats [0], and must not turn whole numbers of other samples into floats.
    filled = {place: sample for place, sample in enumerate(samples) if sample.shape != (0,)} or {0: samples[0]}
    first, expected = next((place, sample.shape) for place, sample in filled.items())
    for place, sample in filled.items():
        require_numbers(f"{name}[{place}]", sample, "convert them to numbers")
        if not sample.ndim or sample.shape[1:] != expected[1:]:
            problem = f"sample {place} has shape {list(sample.shape)} and sample {first} has {list(expected)}"
            raise UserError(f"{name}: {problem}; only the first dimension may differ")
    values = np.concatenate([*filled.values()])
    stored = convert_values(name, values)
    if distinct:
        columns.require_distinct(name, None, values)
    return Ragged(stored, np.cumsum([*map(len, samples)], dtype=np.int64))


def convert_values(name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return values in the type in which values are stored, for example floats as float32.

    Raises:
        UserError: A number is too large for float32.
    """
    try:
        with np.errstate(over="raise"):
            return values.astype(stored_type(values.dtype), copy=False)
    except FloatingPointError:
        raise UserError(
            f"{name}: a number is too large for float32, the type of stored floats; scale the values"
        ) from None


def stored_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which values are stored: float32 for floats, else a type that torch supports."""
    return np.dtype(np.float32 if dtype.kind == "f" else STORED_TYPES.get(dtype.name, dtype.newbyteorder("=")))


def require_one_length(parts: Mapping[str, Leaves]) -> None:
    """Raise UserError if leaves have different numbers of samples. ``parts`` has leaves by name, or None."""
    lengths = {
        label_leaf(name, key): len(leaf) for name, leaves in parts.items() for key, leaf in name_leaves(leaves).items()
    }
    first, samples = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != samples:
            raise UserError(
                f"{name} has {length} samples, but {first} has {samples}; all must have the same number of samples"
            )


def unify_sides(kind: str, train: Leaves, test: Leaves) -> tuple[Leaves, Leaves]:
    """Return the leaves of both sides with equal types. If a leaf is ragged in one side, both become ragged.

    ``kind`` names the leaves in errors, for example "inputs".

    Raises:
        UserError: The forms, the shapes of samples, or the kinds of numbers differ.
    """
    named = name_leaves(train), name_leaves(test)
    if get_leaves_form(train) != get_leaves_form(test) or named[0].keys() != named[1].keys():
        texts = map(describe_form, (train, test))
        raise UserError(f"train_{kind} are {next(texts)}, and test_{kind} {next(texts)}: both must have the same form")
    unified = dict[str, NDArray[Any] | Ragged](), dict[str, NDArray[Any] | Ragged]()
    for name, leaf in named[0].items():
        pair = leaf, named[1][name]
        ragged = any(isinstance(each, Ragged) for each in pair)
        shapes = [("?", *each.shape[2:]) if ragged and each.shape[1:] else each.shape[1:] for each in pair]
        kinds = [each.dtype.kind.replace("u", "i") for each in pair]
        if shapes[0] != shapes[1] or kinds[0] != kinds[1]:
            described = (
                f"{each.dtype} [{', '.join(map(str, shape))}]" for each, shape in zip(pair, shapes, strict=True)
            )
            where = label_leaf(kind, name)
            found = f"a sample of train_{where} is {next(described)}, and of test_{where} {next(described)}"
            raise UserError(f"{found}: both must have the same type and shape")
        common = stored_type(np.result_type(*(each.dtype for each in pair)))
        for side, each in zip(unified, pair, strict=True):
            if ragged:
                ends = np.arange(1, len(each) + 1, dtype=np.int64) * (each.shape[1] or 0)  # unused if Ragged
                whole = each if isinstance(each, Ragged) else Ragged(each.reshape(-1, *each.shape[2:]), ends)
                side[name] = Ragged(whole.values.astype(common, copy=False), whole.ends)
            else:
                side[name] = each.astype(common, copy=False)
    return restore_leaves(get_leaves_form(train), unified[0]), restore_leaves(get_leaves_form(train), unified[1])


def require_class_numbers(name: str, targets: NDArray[Any], classes: int) -> None:
    """Raise UserError, with the first such sample, if a class number is outside 0..classes-1."""
    wrong = np.flatnonzero((targets < 0) | (targets >= classes))
    if len(wrong):
        problem = f"label {targets[wrong[0]]} of sample {wrong[0]} is not one of the {classes} classes"
        raise UserError(f"{name}: {problem}: must be 0..{classes - 1}")


def convert_weights(values: Any, samples: int) -> NDArray[np.float64] | None:
    """Return ``values`` as float64 [samples], or None for None. ``samples`` is the number of training samples.

    Raises:
        UserError: The number of weights is another, a weight is negative or not finite, or all weights are 0.
    """
    if values is None:
        return None
    weights = convert_to_array("sample_weights", values)
    if weights.dtype.kind not in "fiu":
        raise UserError(f"sample_weights: must be numbers, got {weights.dtype}")
    if weights.shape != (samples,):
        rule = f"must be one number for each of the {samples} training samples"
        raise UserError(f"sample_weights: {rule}, got {list(weights.shape)}")
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        problem = f"weight {weights[wrong[0]]} of sample {wrong[0]}"
        raise UserError(f"sample_weights: {problem}: must be a finite number of at least 0")
    if not weights.any():
        raise UserError("sample_weights: are all 0; at least one weight must be above 0")
    return np.ascontiguousarray(weights, dtype=np.float64)


def is_class_numbers(targets: Leaves) -> bool:
    return isinstance(targets, np.ndarray) and targets.ndim == 1 and targets.dtype.kind in "iu"


def number_truth_values(targets: Leaves) -> Leaves:
    """Return truth values [N] as uint8, and any other targets unchanged."""
    is_truth = isinstance(targets, np.ndarray) and targets.ndim == 1 and targets.dtype.kind == "b"
    return targets.astype(np.uint8) if is_truth else targets


def name_class_numbers(parts: dict[str, Leaves]) -> tuple[str, ...]:
    """Return "0", "1", ... up to the largest class number, or () if the targets are no class numbers [N].

    ``parts`` holds the leaves "train_targets" and "test_targets".

    Raises:
        UserError: A class number is negative, or is 1,000,000 or more.
    """
    targets = [parts[f"{side}_targets"] for side in ("train", "test")]
    if not all(map(is_class_numbers, targets)):
        return ()
    smallest, largest = (int(find(map(find, targets))) for find in (min, max))
    if smallest < 0:
        fix = "pass numbers to predict as floats, and classes as 0, 1, 2, ..."
        raise UserError(f"targets: whole numbers are classes and must be at least 0, but one is {smallest}; {fix}")
    if largest >= MOST_CLASSES:
        problem = f"whole numbers are classes and must be below {MOST_CLASSES:,}, but one is {largest}"
        raise UserError(f"targets: {problem}; pass numbers to predict as floats")
    return tuple(map(str, range(largest + 1)))
