"""The console's forms of checked dataclasses: a field for each with its help, its default and its choices.

The console draws a form from a JSON schema of an older draft than flytekit writes into the type of a dataclass. So
these transformers add such a schema to flytekit's.
"""

import copy
import dataclasses
import sys
from typing import Any

from flytekit.core.type_engine import DataclassTransformer, TypeEngine, TypeTransformer
from flytekit.models.interface import Parameter, Variable
from flytekit.models.types import LiteralType

from flyte_ddp.checks.fields import CheckedFields
from flyte_ddp.config import Hyperparameters
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.release.policy import Policy
from flyte_ddp.sweep.space import Sweep

KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"}


class FormTransformer(DataclassTransformer):  # type: ignore[misc]  # which flytekit leaves untyped
    """Flytekit's transformer of one dataclass, with a schema for the console."""

    def __init__(self, form: type[CheckedFields]) -> None:
        super().__init__()
        self.form = form
        TypeTransformer.__init__(self, name=form.__name__, t=form)
        self.literal_type: LiteralType | None = None

    def get_literal_type(self, t: type[CheckedFields]) -> LiteralType:
        """Return a new object for each call. Flytekit asks many times, and the schema takes 60 ms."""
        if self.literal_type is None:
            self.literal_type = super().get_literal_type(t)
            # pyflyte's help would print all of it; set_up_command() prints columns.
            is_help = "--help" in sys.argv
            self.literal_type.metadata = {} if is_help else self.literal_type.metadata | form_metadata(self.form())
        return copy.copy(self.literal_type)

    def guess_python_type(self, literal_type: LiteralType) -> type[CheckedFields]:
        if literal_type.metadata and self.form.__name__ in literal_type.metadata.get("definitions", {}):
            return self.form
        raise ValueError(f"{literal_type} is not the type {self.form.__name__}")


def prefill_form(parameter: Parameter, values: CheckedFields) -> Parameter:
    """Return a copy of a launch plan's parameter, whose form in the console begins with these values.

    The console takes the values from the type, ignores the parameter's default, and sends all values of the form.
    """
    found = LiteralType.from_flyte_idl(parameter.var.type.to_flyte_idl())  # the type may be shared
    found.metadata = {**(found.metadata or {}), **form_metadata(values)}
    return Parameter(Variable(found, parameter.var.description), default=parameter.default)


def form_metadata(values: CheckedFields) -> dict[str, Any]:
    """Return the metadata of a dataclass's type, with a JSON schema (draft 7) for the console and these values in it.

    Flyte keeps the schema as a protobuf Struct, which keeps the order of lists but not of objects. So each field is a
    schema of its own in a list. Without a title the console would turn the list into an object.
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
