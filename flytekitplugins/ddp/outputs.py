"""What a task's body has returned on rank 0, as the task declares it: looked at before the run's saves are removed."""

import copy
import dataclasses
import os
import reprlib
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

import numpy as np
from flytekit.core.type_engine import TypeEngine, TypeTransformerFailedError

from flyte_ddp.errors import UserError, shorten_path
from flyte_ddp.loops.call import RETURNED, pickle_by_value
from flytekitplugins.ddp.inputs import Remote, find_files


class UndeclaredError(Exception):
    """A value is not what is declared; the text says what it is, and the fix."""


def convert_outputs(task: str, value: Any, outputs: tuple[dict[str, Any], str | None], kept: Path | None) -> Any:
    """Return what a body has returned, with Python's own numbers and texts in place of NumPy's; None without outputs.

    ``outputs`` are the declared types by name, and a declared tuple's name. Raises UserError for another type, or a
    file that is not there; then writes the value, pickled, into the folder ``kept``.
    """
    kinds = tuple(outputs[0].values())
    if not kinds:
        return None  # as flytekit does
    is_single = len(kinds) == 1 and not (outputs[1] and isinstance(value, tuple))
    values = (value,) if is_single else value
    try:
        if not isinstance(values, (list, tuple)) or len(values) != len(kinds):
            refuse(value, *kinds)
        converted = tuple(map(convert_value, map(to_python, values), kinds))
        for file in find_files(converted):
            if not file.remote_source:
                refuse_missing_file(file.path)
    except Exception as error:  # an object's own code may raise anything
        rest = "its saves stay"
        if kept is not None:
            with suppress(Exception):  # an object's own code may raise anything
                (kept / RETURNED).write_bytes(pickle_by_value(value))
                rest += f", and all that it returned is in {shorten_path(kept / RETURNED)}, pickled"
        said = str(error)
        if not isinstance(error, (UndeclaredError, UserError)):
            said = f"{reprlib.repr(value)}, which cannot be converted ({type(error).__name__}: {error}); return another"
        raise UserError(f"{task}: rank 0 returned {said}\n{rest}") from None
    return converted[0] if is_single else converted


def refuse(value: Any, *kinds: Any) -> NoReturn:
    names = ", ".join(str(kind if get_origin(kind) else getattr(kind, "__name__", kind)) for kind in kinds)
    names = names.replace("typing.", "")
    if value is None:
        raise UndeclaredError(f"None, and the task declares {names}; return it on rank 0")
    found = f"{reprlib.repr(value)} of type {type(value).__name__}"
    raise UndeclaredError(f"{found}, and the task declares {names}; return that, or declare the other")


def refuse_missing_file(path: str | os.PathLike[str]) -> None:
    if "://" not in str(path) and not Path(path).exists():
        raise UserError(f"{path}, which is not there; write it first")


def to_python(value: Any) -> Any:
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
    """Return a value as ``kind``, a declared type: 0-d tensors and arrays as scalars, whole numbers as floats."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return convert_value(value, inner[0])
    if origin in (Union, UnionType):
        for each in sorted(inner, key=lambda each: each is not type(value)):
            with suppress(UndeclaredError):
                return convert_value(value, each)
    if kind in (bool, int, float, str):
        value = value.item() if getattr(value, "ndim", None) == 0 else value
        value = float(value) if kind is float and type(value) is int else value
        return value if type(value) is kind else refuse(value, kind)
    if origin is list and isinstance(value, list):
        return [convert_value(each, inner[0]) for each in value]
    if origin is dict and isinstance(value, dict):
        return {key: convert_value(each, inner[1]) for key, each in value.items()}
    transformer = TypeEngine.get_transformer(kind)
    try:
        if transformer.type_assertions_enabled:
            transformer.assert_type(kind, value)
    except (TypeTransformerFailedError, TypeError):
        refuse(value, kind)
    if isinstance(kind, type) and issubclass(kind, Remote) and isinstance(value, (str, Path)):
        refuse_missing_file(value)
    return value
