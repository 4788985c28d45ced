"""Check a task's declared output types before ranks start, and convert the body's results to these types."""

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from flyte_ddp.core.checks.fields import short_repr
from flyte_ddp.core.errors import UserError
from flytekitplugins.ddp.inputs import Remote

PLAIN = (bool, int, float, str, datetime, timedelta, date)
LARGEST_EXACT = 2**53  # up to here a float can represent every integer
LARGEST_INT = 2**63  # Flyte's integers are below


def refuse_unwritable_types(types: Mapping[str, Any]) -> None:
    """Raise UserError for a declared dataclass with a field type that flytekit cannot serialize."""
    from mashumaro.codecs.msgpack import MessagePackEncoder  # flytekit creates this encoder only when it has a value

    for name, declared in types.items():
        for kind in list_kinds(declared):
            try:
                _ = MessagePackEncoder(kind) if dataclasses.is_dataclass(kind) else None
            except Exception as error:  # mashumaro raises many classes
                raise UserError(f"output {name}: {error}; declare the field with a type that Flyte supports") from None


def list_kinds(kind: Any) -> Iterator[Any]:
    yield kind
    for inner in get_args(kind):
        yield from list_kinds(inner)


def convert_outputs(value: Any, types: Mapping[str, Any], tuple_name: str | None = None) -> Any:
    """Return the results of a body in the declared types, or None if no outputs are declared.

    ``types`` are the declared types by output name. ``tuple_name`` is the name of a declared NamedTuple. Several
    results are returned as a tuple.

    Raises:
        UserError: A value has no equal in the declared type, the number of outputs differs, or a file does not exist.
    """
    if not types:
        return None
    if len(types) == 1 and not (tuple_name and isinstance(value, tuple)):
        [(name, kind)] = types.items()
        return convert_value(value, kind, name)
    if not isinstance(value, (tuple, list)) or len(value) != len(types):
        raise UserError(f"the task declares {len(types)} outputs but returned {short_repr(value)}; return one for each")
    parts = [convert_value(part, kind, name) for part, (name, kind) in zip(value, types.items(), strict=True)]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def convert_value(value: Any, kind: Any, where: str) -> Any:
    """Return a value in the declared type ``kind``, at any depth.

    Values of types that only flytekit knows stay unchanged. ``where`` names the output in errors.

    Raises:
        UserError: The value has no equal in the declared type, or a file does not exist.
    """
    origin, kinds = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        return value if kinds[0] is dict else convert_value(value, kinds[0], where)  # flytekit may pickle such a dict
    if origin is Literal:
        return to_plain(value)
    convert: Callable[[Any, Any, str], Any] = lambda value, *_: value  # noqa: E731
    if origin in (Union, UnionType):
        convert = convert_to_member
    elif origin in (dict, list, tuple) and not kinds:
        convert = to_plain_parts
    elif kind in PLAIN:
        convert = convert_plain
    elif kinds and origin in (list, dict, tuple):
        convert = convert_container
    elif isinstance(value, Remote) or (isinstance(kind, type) and issubclass(kind, Remote)):
        convert = require_file
    elif kind in type(value).__mro__ and list_parts(value):  # isinstance() rejects Any and other typing constructs
        convert = convert_parts
    return convert(value, kind, where)


def convert_plain(value: Any, kind: type, where: str) -> Any:
    """Return a number, text, truth value or time in the type ``kind``.

    ``where`` names the output in errors.

    Raises:
        UserError: The conversion would change the value, or an integer is beyond Flyte's range.
    """
    value = to_plain(value)
    if kind is float and type(value) is int and abs(value) <= LARGEST_EXACT:
        value = float(value)
    if kind is date and type(value) is datetime and value.time() == time():
        value = value.date()
    if type(value) is not kind:
        raise misfit_error(value, kind, where)
    if isinstance(value, int) and not -LARGEST_INT <= value < LARGEST_INT:
        raise UserError(f"output {where} is {value}: Flyte's int must be below 2**63; declare float or str")
    return value


def convert_parts(value: Any, kind: type, where: str) -> Any:
    """Return a copy of a NamedTuple or of a dataclass's instance, with each field's value in the field's type."""
    hints = get_type_hints(kind, include_extras=True)
    parts = {}
    for name in list_parts(value):
        part = convert_value(getattr(value, name), hints.get(name), f"{where}.{name}")
        parts[name] = part if isinstance(value, tuple) else to_plain_parts(part)  # also fields declared as Any
    if isinstance(value, tuple):
        return type(value)(**parts)
    converted = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(converted, name, part)  # also works for frozen dataclasses
    return converted


def convert_container(value: Any, kind: Any, where: str) -> Any:
    """Return a list, dict or tuple with all parts in their declared types.

    A tuple or array is accepted as a list, and any mapping as a dict. ``where`` names the output in errors.

    Raises:
        UserError: The value is another container, or a part has no equal in its declared type.
    """
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is dict and isinstance(value, Mapping):
        parts = {key: convert_value(each, kinds[1], f"{where}[{key!r}]") for key, each in value.items()}
        return {convert_value(key, kinds[0], f"{where}, a key,"): each for key, each in parts.items()}
    if origin is list and (isinstance(value, (list, tuple)) or getattr(value, "ndim", False)):
        return [convert_value(each, kinds[0], f"{where}[{place}]") for place, each in enumerate(value)]
    if origin is tuple and isinstance(value, tuple):
        kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        if len(kinds) == len(value):
            return tuple(convert_value(each, one, where) for each, one in zip(value, kinds, strict=True))
    raise misfit_error(value, kind, where)


def convert_to_member(value: Any, kind: Any, where: str) -> Any:
    """Return a value in the first member type of a union that accepts the value.

    Types that the value already has are tried first. ``where`` names the output in errors.

    Raises:
        UserError: No member type accepts the value.
    """
    members = get_args(kind)
    if type(value) not in members and any(member in PLAIN for member in members):
        value = to_plain(value)

    def is_other(member: Any) -> bool:
        return (get_origin(member) or member) not in type(value).__mro__

    for member in sorted(members, key=is_other):
        if member is type(None) and value is not None:
            continue
        try:
            return convert_value(value, member, where)
        except UserError:
            continue
    raise misfit_error(value, kind, where)


def misfit_error(value: Any, kind: Any, where: str) -> UserError:
    """Return the error for a value that has no equal in the declared type ``kind``. ``where`` names the output."""
    declared = kind.__name__ if kind in PLAIN else str(kind)
    return UserError(
        f"output {where} is {short_repr(value)}, of type {type(value).__name__}, but the task declares {declared}; "
        "return the declared type, or declare the returned type"
    )


def to_plain(value: Any) -> Any:
    """Return a number, text or time of NumPy, torch or pandas as a Python object, and any other value unchanged.

    NumPy's times are cut to microseconds.
    """
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    if kind in ("m", "M"):
        value = value.astype(f"{kind}8[us]")  # Python has no nanoseconds
    for name in ("item", "to_pydatetime", "to_pytimedelta"):
        if hasattr(value, name):
            try:
                return getattr(value, name)()
            except (TypeError, ValueError, RuntimeError):  # several elements
                return value
    return value


def to_plain_parts(value: Any, *_: Any) -> Any:
    """Return a value with arrays as lists, and with numbers, texts and times as Python objects, at any depth."""
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain_parts(each) for key, each in value.items()}
    return type(value)(map(to_plain_parts, value)) if type(value) in (list, tuple, set) else to_plain(value)


def list_parts(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return [*getattr(value, "_fields", ())]


def require_file(value: Any, _: Any, where: str) -> Any:
    """Return a file or folder unchanged.

    Checked in the ranks, because flytekit would report a missing file only after the run.

    Raises:
        UserError: The local file or folder does not exist.
    """
    path = getattr(value, "path", value)
    is_local = isinstance(path, (str, os.PathLike)) and "://" not in os.fspath(path)
    if is_local and not getattr(value, "remote_source", None) and not Path(path).exists():
        raise UserError(
            f"output {where}: file or folder {os.fspath(path)!r} does not exist; write it before you return"
        )
    return value
