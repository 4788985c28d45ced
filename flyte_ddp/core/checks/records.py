"""Dataclasses that are read from JSON values and written as JSON values. A field's type is the form of its value."""

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from flyte_ddp.core.checks.fields import LARGEST_INT, TYPES, short_repr
from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.errors import UserError

Count = Annotated[int, range(LARGEST_INT + 1)]  # a whole number from 0
WORDS: dict[Any, str] = {**TYPES, dict: "an object", list: "a list", None: "null"}
LISTS = (list, tuple, Sequence)  # types of fields that hold a list of JSON
EMPTY: tuple[Any, ...] = (None, "", [], {})  # values that are not written if they are their field's default


class MisfitError(ValueError):
    """A part of a JSON value does not have its field's type. The text has place, value and rule."""


class JsonRecord:
    """Base class of dataclasses that stand for JSON objects.

    A field's type is bool, int, float, str, None, Any or a JsonRecord, or a list, tuple, Sequence, Mapping or union of
    types. ``Annotated`` adds the range of a whole number, or a set of texts. A field with a default may be missing in
    the object. A Mapping with the metadata ``prefix`` holds the object's entries whose keys begin with the
    prefix. Other entries of the object are ignored. If a subclass has a ``kind``, the written object has this entry.
    """

    kind: ClassVar[str] = ""

    @classmethod
    def from_json_value(cls, value: Any, where: str) -> Self:
        """Return the record that a JSON object stands for.

        Raises:
            UserError: A field is missing, or a value has another type. The error begins with ``where``, and has the
                place of the first wrong value.
        """
        try:
            record: Self = convert_from_json(value, cls, "")
        except MisfitError as error:
            raise UserError(f"{where}: {error}") from None
        return record

    def to_json_value(self) -> JsonObject:
        """Return the record as a JSON object. Skips None and empty values if they are the default of the field."""
        values: JsonObject = {"kind": self.kind} if self.kind else {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = convert_to_json_value(getattr(self, field.name))
            if "prefix" in field.metadata:
                values |= {field.metadata["prefix"] + key: item for key, item in value.items()}
            elif not (value in EMPTY and value == convert_to_json_value(get_default(field))):
                values[field.name] = value
        return values


def convert_to_json_value(value: Any) -> Any:
    if isinstance(value, JsonRecord):
        return value.to_json_value()
    if isinstance(value, Mapping):
        return {key: convert_to_json_value(item) for key, item in value.items()}
    return [*map(convert_to_json_value, value)] if isinstance(value, (list, tuple)) else value


def get_default(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field, or ``dataclasses.MISSING`` if the field has no default."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


find_types = functools.cache(functools.partial(get_type_hints, include_extras=True))


def convert_from_json(value: Any, kind: Any, place: str) -> Any:
    """Return a JSON value converted to a field's type ``kind``, such as a JsonRecord or a tuple.

    Raises:
        MisfitError: The value does not have this type. The error has ``place``, the value's position in the whole.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return convert_to_first_fitting_type(value, inner, place)
    is_record = isinstance(kind, type) and issubclass(kind, JsonRecord)
    form = {} if is_record or origin in (dict, Mapping) else [] if origin in LISTS else kind
    form = inner[1] if origin is Annotated else None if kind is NoneType else form
    if kind is not Any and not has_outer_form(value, form):
        raise MisfitError(f"{place or 'all'}={short_repr(value)}: must be {describe_form(form)}")
    if is_record:
        return convert_to_record(value, kind, f"{place}." if place else "")
    if origin in LISTS:
        items = [convert_from_json(each, inner[0], f"{place}[{at}]") for at, each in enumerate(value)]
        return tuple(items) if origin is tuple else items
    return (
        {key: convert_from_json(each, inner[1], f"{place}.{key}") for key, each in value.items()}
        if form == {}
        else value
    )


def convert_to_first_fitting_type(value: Any, options: Sequence[Any], place: str) -> Any:
    """Return a JSON value converted to the first type of ``options`` that fits.

    Raises:
        MisfitError: No type fits. The error is about the last type other than None.
    """
    if value is None and NoneType in options:
        return None
    *others, last = (each for each in options if each is not NoneType)
    for each in others:
        with suppress(MisfitError):
            return convert_from_json(value, each, place)
    return convert_from_json(value, last, place)


def convert_to_record(value: JsonObject, kind: Any, place: str) -> JsonRecord:
    """Return the JsonRecord of class ``kind`` that a JSON object stands for.

    ``place`` is "", or the position of the object with a final dot.

    Raises:
        MisfitError: A field is missing, or a value has another type.
    """
    types, values = find_types(kind), JsonObject()
    for field in dataclasses.fields(kind):
        name, form, prefix = field.name, types[field.name], field.metadata.get("prefix")
        if prefix is not None:
            further = [key for key in value if key.startswith(prefix) and key not in (*types, "kind")]
            inner = get_args(form)[1]
            values[name] = {
                key.removeprefix(prefix): convert_from_json(value[key], inner, f"{place}{key}") for key in further
            }
        elif name in value:
            values[name] = convert_from_json(value[name], form, f"{place}{name}")
        elif get_default(field) is dataclasses.MISSING:
            raise MisfitError(f"{place}{name} is missing")
    record: JsonRecord = kind(**values)
    return record


def has_outer_form(value: Any, form: Any) -> bool:
    """Return whether a value itself has a form, without a check of the items of lists and objects.

    A form is a type, None, a range of whole numbers, or a set of texts. An empty list stands for any list, and an empty
    dict for any object. The form ``float`` accepts whole numbers, and rejects NaN and infinity.
    """
    if isinstance(form, range):
        return type(value) is int and value in form
    if isinstance(form, set):
        return isinstance(value, str) and value in form
    if form is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    kind = type(form) if isinstance(form, (dict, list)) else form or type(None)
    return isinstance(value, kind) and (kind is not int or type(value) is int)


def describe_form(form: Any) -> str:
    """Return in words what a form requires of a value itself, without the value's parts."""
    if isinstance(form, range):
        return f"a whole number from {form.start} to {form.stop - 1}"
    if isinstance(form, set):
        return f"one of {', '.join(sorted(form))}"
    return WORDS[type(form) if isinstance(form, (dict, list)) else form]
