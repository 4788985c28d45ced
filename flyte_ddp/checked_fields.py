"""Flat, frozen dataclasses that people fill in: each field has a documentation and a range, and each value is checked.

On every path by which a value arrives: Python, command-line JSON, the console's form, a pod's msgpack.
"""

# No "from __future__ import annotations" here: flytekit derives the console's form from real types.
import dataclasses
import json
import operator
import re
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from dataclasses_json import DataClassJsonMixin

from flyte_ddp.credentials import refuse_credentials
from flyte_ddp.errors import UserError, unknown_name

# Numbers that YAML 1.1, and so flytekit when it reads a YAML file, takes for text: 1e-1, 1.5e3.
YAML_NUMBER = re.compile(r"[-+]?(\d+e[-+]?\d+|(\d+\.\d*|\.\d+)e\d+)", re.IGNORECASE)
BOUNDS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}
TYPES: dict[type, str] = {bool: "true or false", str: "text", int: "a whole number", float: "a finite number"}
LARGEST_INT = 2**53  # the console's form (protobuf Struct) carries doubles: larger ones would be rounded silently


def setting(default: Any, doc: str, *, choices: tuple[str, ...] | None = None, **bounds: float) -> Any:
    """Return a dataclass field with its documentation and its range, by the names of ``BOUNDS``."""
    if type(default) is int:
        bounds.setdefault("at_most", LARGEST_INT)
    return dataclasses.field(default=default, metadata={"doc": doc, "choices": choices, **bounds})


class CheckedFields(DataClassJsonMixin):
    """What such a dataclass inherits; ``called`` is what its fields are called in errors.

    Raises:
        UserError: an unknown field, a value of the wrong type, or a value out of range.
    """

    called: ClassVar[str]

    def __init_subclass__(cls, *, called: str) -> None:
        super().__init_subclass__()
        cls.called = called

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Refuse an unknown name as all other paths do, with the nearest known one, before ``__init__`` does."""
        cls.known(values)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, checked(field, getattr(self, field.name)))

    @classmethod
    def known(cls, values: Any) -> dict[str, Any]:
        """Return a copy of the mapping; UserError if it is none, or if a key is no field's name."""
        if not isinstance(values, Mapping):
            raise UserError(f"{cls.called}s must be a JSON object, got {shown(values)}")
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in values:
            if key not in names:
                raise unknown_name(cls.called, str(key), names)
        return dict(values)

    @classmethod
    def from_dict(cls, kvs: Any, **_: Any) -> Self:
        """Build from untrusted key-value pairs, such as decoded JSON; the inherited one drops and converts."""
        return cls(**cls.known(kvs))

    @classmethod
    def from_json(cls, s: Any, **_: Any) -> Self:
        """Build from JSON, as the command line does (``--hp '{...}'``, ``--hp preset.json``, ``--inputs-file``)."""
        try:
            values = json.loads(s)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{cls.called}s are not valid JSON: {error}") from None
        values = cls.known(values)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            text = values.get(field.name)
            if field.type in (int, float) and isinstance(text, str) and YAML_NUMBER.fullmatch(text):
                values[field.name] = float(text)
        return cls(**values)

    @classmethod
    def __pre_deserialize__(cls, values: Any) -> dict[str, Any]:
        """Mashumaro's hook: the only place that sees raw values on a cluster, before they are silently converted."""
        return {**vars(cls.from_dict(values))}


def checked(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Return the value in the field's own type.

    A whole number given as ``3.0`` is taken for an int, because the console's form (protobuf Struct) has only doubles.

    Raises:
        UserError: another type, a value out of range, or a text with an address that has a user name or a password.
    """
    rule = field.metadata
    kind: Any = field.type
    if kind is bool or kind is str:
        fits = isinstance(value, kind)
    else:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        fits = fits and (kind is float or value == int(value))
    if not fits:
        misread = kind is str and isinstance(value, bool)
        hint = "; YAML takes on, off, yes and no for true and false unless they are in quotes" if misread else ""
        raise UserError(f"{field.name}={shown(value)}: must be {TYPES[kind]}{hint}")
    value = kind(value)
    if kind is str:
        if value.encode(errors="replace").decode() != value:
            raise UserError(f"{field.name}={shown(value)}: must be UTF-8, as a model's files are; rename what it names")
        refuse_credentials(field.name, value)
    if rule["choices"] is not None and value not in rule["choices"]:
        raise unknown_name(field.name, value, rule["choices"])
    for key, holds in BOUNDS.items():
        if key in rule and not holds(value, rule[key]):
            raise UserError(f"{field.name}={shown(value)}: must be {key.replace('_', ' ')} {rule[key]}")
    return value


def shown(value: Any) -> str:
    """Return a value as an error message shows it: on one line and not too long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
