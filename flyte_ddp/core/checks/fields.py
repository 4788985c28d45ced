"""Flat, frozen dataclasses for user settings. Each field has a help text and a range, and each value is checked.

Values are checked in Python calls, command-line JSON, the console's form, and a pod's msgpack.
"""

# No "from __future__ import annotations" here: flytekit derives the console's form from real types.
import dataclasses
import json
import operator
import reprlib
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from dataclasses_json import DataClassJsonMixin

from flyte_ddp.core.checks.parsing import JsonObject, parse_json, parse_yaml_number
from flyte_ddp.core.errors import UserError, unknown_name_error
from flyte_ddp.core.text.credentials import check_no_credentials

BOUNDS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}
TYPES: dict[type, str] = {
    bool: "true or false",
    str: "text; put the value in quotes",
    int: "a whole number",
    float: "a finite number",
}
LARGEST_INT = 2**53  # the console's form (protobuf Struct) carries doubles: larger ones would be rounded silently
BRIEF = reprlib.Repr()  # examines few parts of a value, because aliases of YAML may stand for millions
BRIEF.maxlevel = 4
BRIEF.maxdict = BRIEF.maxlist = BRIEF.maxtuple = BRIEF.maxset = BRIEF.maxfrozenset = 12
BRIEF.maxstring = BRIEF.maxlong = BRIEF.maxother = sys.maxsize  # cut at the end, not in the middle
OWN_CODE = "package.module:callable"  # the form of a name of user code


def setting(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] | None = None,
    own: bool = False,
    json: bool = False,
    number: bool = False,
    **bounds: float,
) -> Any:
    """Return a dataclass field with a default, a help text, and rules that values are checked against.

    Args:
        default: The default value.
        doc: The help text.
        choices: The accepted values.
        own: Whether a user-defined ``package.module:callable`` is also accepted.
        json: Whether the field accepts a JSON object, or its text.
        number: Whether the text may also be given as a number.
        bounds: Bounds of a number: at_least, at_most (by default 2**53 for whole numbers), above, below.
    """
    if type(default) is int:
        bounds.setdefault("at_most", LARGEST_INT)
    rule = {"doc": doc, "choices": choices, "own": own, "json": json, "number": number, **bounds}
    return dataclasses.field(default=default, metadata=rule)


class CheckedFields(DataClassJsonMixin):
    """Base class of dataclasses with fields made by :func:`setting`. All values are checked at instantiation.

    A subclass gives ``called``, the noun for a field in errors.
    """

    called: ClassVar[str]

    def __init_subclass__(cls, *, called: str) -> None:
        super().__init_subclass__()
        cls.called = called

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Raise UserError for an unknown field, with the nearest known field. ``__init__`` would raise a TypeError."""
        cls.check_field_names(values)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, check_and_convert_value(field, getattr(self, field.name)))

    def __repr__(self) -> str:
        """Return the call that makes an equal object, without fields that have their defaults."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = ((each.name, getattr(self, each.name)) for each in fields if getattr(self, each.name) != each.default)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"

    @classmethod
    def check_field_names(cls, values: Any) -> JsonObject:
        """Raise UserError if ``values`` is no mapping or has an unknown key. Returns the mapping as a new dict."""
        if not isinstance(values, Mapping):
            raise UserError(f"{cls.called}s must be a JSON object, got {short_repr(values)}")
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in values:
            if key not in names:
                raise unknown_name_error(cls.called, str(key), names)
        return dict(values)

    @classmethod
    def from_dict(cls, kvs: Any, **_: Any) -> Self:
        """Return an instance from an untrusted mapping. Unlike the inherited method, rejects unknown keys.

        Raises:
            UserError: ``kvs`` is no mapping, a field is unknown, or a value does not fit.
        """
        return cls(**cls.check_field_names(kvs))

    @classmethod
    def from_json(cls, s: Any, **_: Any) -> Self:
        """Return an instance from JSON text.

        Texts in number fields, for example "1e-1", become numbers, because flytekit's YAML reader leaves them as texts.

        Raises:
            UserError: The text is not a JSON object, a field is unknown, or a value does not fit.
        """
        try:
            values = parse_json(s)
        except ValueError as error:
            raise UserError(f"{cls.called}s are not valid JSON: {error}") from None
        values = cls.check_field_names(values)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.type in (int, float) and field.name in values:
                values[field.name] = parse_yaml_number(values[field.name])
        return cls(**values)

    def json(self) -> str:
        """Return JSON of the fields that differ from their defaults. flytekit shows the JSON as an option's default."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return json.dumps({each.name: value for each in fields if (value := getattr(self, each.name)) != each.default})

    @classmethod
    def __pre_deserialize__(cls, values: Any) -> JsonObject:
        """Return the checked fields of raw values. In pods, mashumaro calls this method before converting values."""
        return {**vars(cls.from_dict(values))}


def check_and_convert_value(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Check a value against the rules of a field of :func:`setting`, and return the value in the field's type.

    In an int field, 3.0 becomes 3. In a JSON field, an object becomes text. In a field with ``number``, a number
    becomes text. A field with ``own`` accepts any text with a colon, without importing the callable.

    Raises:
        UserError: The value does not fit, or is an address with a user name or a password.
    """
    rule = field.metadata
    kind: Any = field.type
    if rule["json"] and isinstance(value, Mapping):
        value = dump_sorted_json(field.name, value)
    if rule["number"] and type(value) in (int, float):
        value = repr(value)
    if kind is bool or kind is str:
        fits = isinstance(value, kind)
    else:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        fits = fits and (kind is float or value == int(value))
    if not fits:
        must = "an object, or text" if rule["json"] else TYPES[kind]
        raise UserError(f"{field.name}={short_repr(value)}: must be {must}")
    value = kind(value)
    if kind is str:
        check_text(field.name, value)
    choices = rule["choices"]
    if choices is not None and value not in choices and not (rule["own"] and ":" in value):
        raise unknown_name_error(field.name, value, [*choices, OWN_CODE] if rule["own"] else choices)
    for key, holds in BOUNDS.items():
        if key in rule and not holds(value, rule[key]):
            raise UserError(f"{field.name}={short_repr(value)}: must be {key.replace('_', ' ')} {rule[key]}")
    return value


def dump_sorted_json(name: str, value: Mapping[Any, Any]) -> str:
    """Return a mapping as JSON text with sorted keys. Values that JSON lacks, such as dates, become texts.

    Raises:
        UserError: The keys have types that cannot be sorted or written as JSON. The error begins with ``name``.
    """
    try:
        return json.dumps(value, sort_keys=True, default=str)  # YAML has dates
    except TypeError:
        raise UserError(f"{name}={short_repr(value)}: the keys must be text; put the keys in quotes") from None


def check_text(name: str, value: str) -> None:
    """Raise UserError if a text has credentials, or the character NUL, which no path may contain."""
    if "\0" in value:
        raise UserError(f"{name}={short_repr(value)}: must not contain the character NUL (\\0); remove the character")
    check_no_credentials(name, value)


def short_repr(value: Any) -> str:
    text = BRIEF.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
