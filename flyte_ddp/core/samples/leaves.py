"""Inputs and targets of samples: a leaf, a tuple or dict of leaves, or None for nothing.

A leaf is an array, a tensor, or a list such as the tokens of a text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError

Leaves = Any
IGNORED_TOKEN = -100  # in texts, the target at positions that do not count, as in torch's cross-entropy
IGNORED = 255  # in masks, the class number of pixels that do not count


@dataclass(frozen=True, eq=False)
class Ragged:
    """A leaf whose samples have different lengths. Sample i is ``values[ends[i - 1] : ends[i]]``."""

    values: NDArray[Any]  # [sum of the lengths, ...]
    ends: NDArray[np.int64]  # [N]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, sample: Any) -> Any:  # a slice gives a list of arrays
        if isinstance(sample, slice):
            return [self[number] for number in range(*sample.indices(len(self)))]
        return self.values[int(self.ends[sample - 1]) if sample else 0 : int(self.ends[sample])]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        return (len(self.ends), None, *self.values.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.ends.nbytes


def map_leaves(function: Callable[[Any], Any], leaves: Leaves) -> Leaves:
    """Apply a function to each leaf, and return the results in the same dict, tuple or leaf form. None stays None.

    Nested dicts and tuples are descended into. A list is one leaf.
    """
    if isinstance(leaves, Mapping):
        return {name: map_leaves(function, leaf) for name, leaf in leaves.items()}
    if isinstance(leaves, tuple):
        return tuple(map_leaves(function, leaf) for leaf in leaves)
    return None if leaves is None else function(leaves)


def name_leaves(leaves: Leaves) -> dict[str, Any]:
    """Return the leaves as a dict by name.

    The name is the key in a dict, the position in a tuple ("0", "1"), or "" for a single leaf.
    """
    if hasattr(leaves, "__array__"):  # arrays first, because the check for a Mapping is the slowest step here
        return {"": leaves}
    if isinstance(leaves, Mapping):
        return dict(leaves)
    if isinstance(leaves, tuple):
        return {str(place): leaf for place, leaf in enumerate(leaves)}
    return {} if leaves is None else {"": leaves}


def restore_leaves(form: str, named: Mapping[str, Any]) -> Leaves:
    """Undo :func:`name_leaves`: return named leaves in the form "dict", "tuple", "leaf" or "none".

    A tuple gets the leaves in the order of the dict.
    """
    if form == "dict":
        return dict(named)
    return (*named.values(),) if form == "tuple" else next(iter(named.values()), None)


def label_leaf(leaves_name: str, name: str) -> str:
    """Return how errors call a leaf, such as "inputs['age']". If ``name`` is "", return ``leaves_name``."""
    return f"{leaves_name}[{name!r}]" if name else leaves_name


def count_samples(leaves: Leaves) -> int:
    """Return the length of the first leaf."""
    return len(next(iter(name_leaves(leaves).values())))


def get_leaves_form(leaves: Leaves) -> str:
    """Return the form of leaves: "dict", "tuple", "leaf" or "none"."""
    if isinstance(leaves, Mapping):
        return "dict"
    return "none" if leaves is None else "tuple" if isinstance(leaves, tuple) else "leaf"


def group_leaves(kind: str, samples: Sequence[Leaves], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return, for each leaf's name, the list of this leaf in all samples.

    Args:
        kind: The name of the leaves in errors, such as "inputs".
        samples: The leaves of each sample.
        names: The name of each sample in errors.

    Raises:
        UserError: A sample has another form than the first sample, or leaves of other names.
    """
    named = [name_leaves(leaves) for leaves in samples]
    for name, leaves, each in zip(names, samples, named, strict=True):
        if get_leaves_form(leaves) != get_leaves_form(samples[0]) or each.keys() != named[0].keys():
            forms = f"are {describe_form(leaves)}, but those of {names[0]} are {describe_form(samples[0])}"
            raise UserError(f"the {kind} of {name} {forms}: all must have the same form")
    return {key: [each[key] for each in named] for key in named[0]}


def describe_form(leaves: Leaves) -> str:
    form = get_leaves_form(leaves)
    if form == "dict":
        return f"a dict with {', '.join(map(str, name_leaves(leaves))) or 'nothing'}"
    return {"none": "None", "leaf": "one array"}.get(form) or f"a tuple of {len(leaves)}"


def convert_to_array(name: str, values: Any) -> NDArray[Any]:
    """Return an array, a tensor or a list as a NumPy array. Tensors lose their gradients.

    Floats that NumPy lacks, for example bfloat16, become float32.

    Raises:
        UserError: The values are ragged, on a GPU or masked, or a whole number is 2**63 or more. The error begins
            with ``name``.
    """
    check_not_masked(name, values)
    try:
        array = np.asarray(prepare_tensors_for_numpy(values))
        if array.dtype.kind == "V" and "float" in array.dtype.name:  # a type of the package ml_dtypes
            array = array.astype(np.float32)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{name}: is not an array ({error}); give parts of equal shape, in CPU memory") from None
    if array.dtype == np.uint64 and array.max(initial=0) >= 2**63:
        raise UserError(f"{name}: has {array.max()}: whole numbers must be below 2**63; give floats or smaller numbers")
    return array


def prepare_tensors_for_numpy(values: Any) -> Any:
    """Return a tensor, or a list of tensors, in a form that NumPy accepts: dense and without gradients.

    Floats of 16 or fewer bits become float32. A nested tensor becomes a list of tensors. Values that are no tensors are
    returned unchanged.
    """
    if isinstance(values, list):
        return [prepare_tensors_for_numpy(each) for each in values] if values and is_tensor(values[0]) else values
    if not is_tensor(values):
        return values
    values = values.detach()
    if values.is_nested:
        return [*values.unbind()]
    small = values.is_floating_point() and values.element_size() <= 2  # includes bfloat16 and 8-bit floats
    return (values.float() if small else values).to_dense()


def is_tensor(values: Any) -> bool:
    return hasattr(values, "detach") and hasattr(values, "element_size")


def check_not_masked(name: str, values: Any) -> None:
    """Raise UserError if an array, or an array in a list, has masked values. The error begins with ``name``."""
    parts = values if isinstance(values, (list, tuple)) else [values]
    if any(isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part) for part in parts):
        fill = "fill them (.filled(0), or .filled(np.nan) for float targets)"
        fix = f"{fill}, or pass the mask as a separate array"
        raise UserError(f"{name}: has masked values, but the mask would be lost; {fix}")


def require_numbers(what: str, array: NDArray[Any], fix: str) -> None:
    """Raise UserError unless an array holds numbers or truth values. ``what`` begins the error, and ``fix`` ends it."""
    if array.dtype.kind not in "biuf":
        got = {"O": "objects", "U": "texts", "S": "bytes"}.get(array.dtype.kind, str(array.dtype))
        raise UserError(f"{what}: must be numbers or truth values, got {got}; {fix}")


def call_with_leaves(function: Callable[..., Any], leaves: Leaves) -> Any:
    """Call a function, such as a model, with the leaves as arguments, and return the result.

    The leaves of a tuple become positional arguments, and the leaves of a dict become keyword arguments.
    """
    if isinstance(leaves, Mapping):
        return function(**leaves)
    return function(*leaves) if isinstance(leaves, tuple) else function(leaves)
