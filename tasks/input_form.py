"""The console's forms for hyperparameters and policies: a field for each with its help, its default and its choices.

The console draws one from a JSON schema of an older draft than flytekit writes into the type of a dataclass. This is
flytekit's own transformer of dataclasses for these two, with such a schema beside the other; what is sent is as before.
"""

import dataclasses
from typing import Any

from flytekit.core.type_engine import DataclassTransformer, TypeEngine, TypeTransformer
from flytekit.models.interface import Parameter, Variable
from flytekit.models.types import LiteralType

from flyte_ddp.checked_fields import CheckedFields
from flyte_ddp.config import Hyperparameters
from flyte_ddp.release.policy import Policy

KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"}


class FormTransformer(DataclassTransformer):  # type: ignore[misc]  # which flytekit leaves untyped
    """Flytekit's transformer of dataclasses, with a schema that the console understands."""

    def __init__(self, form: type[CheckedFields]) -> None:
        super().__init__()
        self.form = form
        TypeTransformer.__init__(self, name=form.__name__, t=form)

    def get_literal_type(self, t: type[CheckedFields]) -> LiteralType:
        """Return the type as Flyte stores it, with the console's schema."""
        found = super().get_literal_type(t)
        found.metadata |= form_metadata(self.form())
        return found

    def guess_python_type(self, literal_type: LiteralType) -> type[CheckedFields]:
        """Return the dataclass of such a type; raise ValueError for another type."""
        if literal_type.metadata and self.form.__name__ in literal_type.metadata.get("definitions", {}):
            return self.form
        raise ValueError(f"{literal_type} is not the type {self.form.__name__}")


def prefill(parameter: Parameter, values: CheckedFields) -> Parameter:
    """Return a launch plan's parameter with a form that starts with these values.

    The console takes what the form starts with from the type, not from the parameter's default, and sends all that the
    form shows.
    """
    found = LiteralType.from_flyte_idl(parameter.var.type.to_flyte_idl())  # the type may be shared
    found.metadata |= form_metadata(values)
    return Parameter(Variable(found, parameter.var.description), default=parameter.default)


def form_metadata(values: CheckedFields) -> dict[str, Any]:
    """Return what the console looks for in the metadata of a type."""
    name = type(values).__name__
    return {"$ref": f"#/definitions/{name}", "definitions": {name: form_schema(values)}}


def form_schema(values: CheckedFields) -> dict[str, Any]:
    """Return the fields in JSON schema's draft 7, in the order of the dataclass, with the values as defaults.

    Flyte keeps the schema as a protobuf Struct, whose objects have no order but whose lists have one, so each field is
    a schema of its own in a list. Because there is a title, the console takes the schema as it is: without one it would
    turn that list into an object.
    """
    fields = dataclasses.fields(values)  # type: ignore[arg-type]
    in_order = [{"properties": {field.name: field_schema(field, getattr(values, field.name))}} for field in fields]
    return {"title": type(values).__name__, "type": "object", "allOf": in_order}


def field_schema(field: "dataclasses.Field[Any]", default: object) -> dict[str, Any]:
    """Return the schema of one field: its type, its label with the type, its default, its help and its choices."""
    assert isinstance(field.type, type)
    kind = KINDS[field.type]
    texts = {"title": f"{field.name} ({kind})", "description": field.metadata["doc"]}
    choices = field.metadata["choices"]
    return {"type": kind, "default": default, **texts, **({"enum": [*choices]} if choices else {})}


for filled_in in (Hyperparameters, Policy):
    TypeEngine.register(FormTransformer(filled_in))
