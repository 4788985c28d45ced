"""Flyte types of this project's dataclasses, each created once, with forms for the console.

A form shows help, default and choices for each field of a dataclass. The console draws forms from an older draft of
JSON schema than flytekit writes. Therefore the types contain both schemas.
"""

import copy
import dataclasses
import sys
from typing import Any

from flytekit.core.constants import CACHE_KEY_METADATA, MESSAGEPACK, SERIALIZATION_FORMAT
from flytekit.core.type_engine import DataclassTransformer, TypeEngine, TypeTransformer
from flytekit.models.annotation import TypeAnnotation
from flytekit.models.interface import Parameter, Variable
from flytekit.models.types import LiteralType, SimpleType, TypeStructure

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.checks.fields import CheckedFields
from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.release.policy import Policy
from flyte_ddp.sweep.space import Sweep

KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"}


class KnownTransformer(DataclassTransformer):  # type: ignore[misc]  # which flytekit leaves untyped
    """Flytekit's transformer of a dataclass, with a cached type: flytekit requests a type up to 16 times."""

    def __init__(self, known: type[Any]) -> None:
        super().__init__()
        TypeTransformer.__init__(self, name=self.name, t=known)  # the name is a part of optional types
        self.literal_type: LiteralType | None = None

    def get_literal_type(self, t: type[Any]) -> LiteralType:
        """Return a copy of the type, which the first call creates. Callers may replace the copy's metadata."""
        if self.literal_type is None:
            self.literal_type = self.make_literal_type(t)
        return copy.copy(self.literal_type)

    def make_literal_type(self, t: type[Any]) -> LiteralType:
        return super().get_literal_type(t)

    def guess_python_type(self, literal_type: LiteralType) -> type[Any]:
        raise ValueError(f"{literal_type}: flytekit makes a class from its schema")


class FormTransformer(KnownTransformer):
    """Flytekit's transformer of a dataclass of checked fields, with a schema for the console.

    Apart from the schema, the type equals flytekit's. However, flytekit would need 0.1 s and a compiled class for each
    field.
    """

    def make_literal_type(self, t: type[CheckedFields]) -> LiteralType:
        """Return the type with a schema for the console. For ``--help`` of pyflyte, omit the schema."""
        types = {field.name: field.type for field in dataclasses.fields(t)}  # type: ignore[arg-type]
        values = t()
        schema = {
            "type": "object",
            "title": t.__name__,
            "properties": {
                name: {"type": KINDS[kind], "default": getattr(values, name)}  # type: ignore[index]
                for name, kind in types.items()
            },
            "additionalProperties": False,
        }
        return LiteralType(
            simple=SimpleType.STRUCT,
            # pyflyte's --help would print the whole schema. print_fields() prints columns instead.
            metadata={} if "--help" in sys.argv else schema | make_form_schema(values),
            structure=TypeStructure("", {name: TypeEngine.to_literal_type(kind) for name, kind in types.items()}),
            annotation=TypeAnnotation({CACHE_KEY_METADATA: {SERIALIZATION_FORMAT: MESSAGEPACK}}),
        )

    def guess_python_type(self, literal_type: LiteralType) -> type[Any]:
        """Return this transformer's dataclass if the type has its schema. Raises ValueError for any other type."""
        if literal_type.metadata and self.python_type.__name__ in literal_type.metadata.get("definitions", {}):
            form: type[Any] = self.python_type
            return form
        raise ValueError(f"{literal_type} is not the type {self.python_type.__name__}")


def prefill_form(parameter: Parameter, values: CheckedFields) -> Parameter:
    """Return a copy of a launch plan's parameter whose console form starts with ``values``.

    The console reads the initial values from the type, ignores the parameter's default, and sends all values of the
    form.
    """
    found = LiteralType.from_flyte_idl(parameter.var.type.to_flyte_idl())  # the type may be shared
    found.metadata = {**(found.metadata or {}), **make_form_schema(values)}
    return Parameter(Variable(found, parameter.var.description), default=parameter.default)


def make_form_schema(values: CheckedFields) -> JsonObject:
    """Return a JSON schema (draft 7) of a dataclass for the console's form, with ``values`` as defaults.

    Flyte stores the schema as a protobuf Struct, which preserves the order of lists but not of objects. Therefore each
    field is a separate schema in a list. Without a title, the console would turn the list into an object.
    """
    name, fields = type(values).__name__, []
    for field in dataclasses.fields(values):  # type: ignore[arg-type]
        assert isinstance(field.type, type)
        kind, rule = KINDS[field.type], field.metadata
        schema = {
            "type": kind,
            "default": getattr(values, field.name),
            "title": f"{field.name} ({kind})",
            "description": rule["doc"],
            **({"enum": [*rule["choices"]]} if rule["choices"] and not rule["own"] else {}),
        }
        fields.append({"properties": {field.name: schema}})
    return {
        "$ref": f"#/definitions/{name}",
        "definitions": {name: {"title": name, "type": "object", "allOf": fields}},
    }


for filled_in in (Hyperparameters, Policy, Sweep, WindowSource):
    TypeEngine.register(FormTransformer(filled_in))
