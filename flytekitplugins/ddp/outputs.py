"""What a task's body has returned on rank 0, as the task declares it: looked at before the run's saves are removed."""

import copy
import dataclasses
import reprlib
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np
from flytekit.core.type_engine import TypeEngine, TypeTransformerFailedError
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.errors import UserError, shorten_path
from flyte_ddp.loops.call import RETURNED, pickle_by_value
from flytekitplugins.ddp.inputs import find_files

SCALARS = (bool, int, float, str)
Outputs = tuple[dict[str, Any], str | None]  # the declared types by name, and the name of a declared tuple


class UndeclaredError(TypeError):
    """A value is not of the type that is declared for it: the two arguments."""


def convert_outputs(task: str, value: Any, outputs: Outputs, kept: Path | None) -> Any:
    """Return what a body has returned, with Python's own numbers and texts in place of NumPy's; None without outputs.

    Raises UserError for another type than is declared, and for a file that is not there; then writes the value,
    pickled, into the folder ``kept``.
    """
    types, tuple_name = outputs
    if not types:
        return None  # as flytekit does
    is_single = len(types) == 1 and not (tuple_name and isinstance(value, tuple))
    values = [value] if is_single else value
    if not isinstance(values, (list, tuple)) or len(values) != len(types):
        mistake = describe_mistake(value, *types.values())
    else:
        try:
            converted = [
                convert_value(to_python(each), kind) for each, kind in zip(values, types.values(), strict=True)
            ]
            missing = [file.path for file in find_files(converted) if is_missing(file)]
            if not missing:
                return converted[0] if is_single else tuple(converted)
            mistake = f"returned {missing[0]}, which is not there; write it first"
        except UndeclaredError as error:
            mistake = describe_mistake(*error.args)
    rest = "its saves stay"
    if kept is not None:
        with suppress(Exception):  # an object's own code may raise anything
            (kept / RETURNED).write_bytes(pickle_by_value(value))
            rest = f"its saves stay, and all that it returned is in {shorten_path(kept / RETURNED)}, pickled"
    raise UserError(f"{task}: rank 0 {mistake}\n{rest}")


def describe_mistake(value: Any, *kinds: Any) -> str:
    """Return what is wrong with a value where ``kinds`` are declared, as a part of a sentence."""
    names = ", ".join(str(getattr(kind, "__name__", kind)) for kind in kinds)
    if value is None:
        return f"returned None, and the task declares {names}; return it on rank 0"
    found = f"returned {reprlib.repr(value)} of type {type(value).__name__}"
    return f"{found}, and the task declares {names}; return that, or declare the other"


def is_missing(file: FlyteFile | FlyteDirectory) -> bool:
    """Return whether a file that a body has returned should be on this host, and is not."""
    path = str(file.path)
    return not file.remote_source and "://" not in path and not Path(path).exists()


def to_python(value: Any) -> Any:
    """Return a value with Python's own scalars in place of NumPy's, also within lists, dicts and dataclasses."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [*map(to_python, value)]
    if isinstance(value, dict):
        return {to_python(key): to_python(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(value, field.name, to_python(getattr(value, field.name)))
    return value


def convert_value(value: Any, kind: Any) -> Any:
    """Return a value as ``kind``, a declared type: 0-d tensors and arrays as scalars, whole numbers as floats.

    Raises UndeclaredError for what flytekit would refuse.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return convert_value(value, inner[0])
    if origin in (Union, UnionType):
        for each in inner:
            with suppress(UndeclaredError):
                return convert_value(value, each)
    if kind in SCALARS:
        value = value.item() if getattr(value, "ndim", None) == 0 else value
        value = float(value) if kind is float and type(value) is int else value
        if type(value) is not kind:
            raise UndeclaredError(value, kind)
    elif origin is list and isinstance(value, list):
        return [convert_value(each, inner[0]) for each in value]
    elif origin is dict and isinstance(value, dict):
        return {key: convert_value(each, inner[1]) for key, each in value.items()}
    transformer = TypeEngine.get_transformer(kind)
    try:
        if transformer.type_assertions_enabled:
            transformer.assert_type(kind, value)
    except (TypeTransformerFailedError, TypeError):
        raise UndeclaredError(value, kind) from None
    return value
