"""The console's forms for hyperparameters and policies: a field for each with its help, its default and its choices.

The console draws one from a JSON schema of an older draft than flytekit writes into the type of a dataclass. This is
flytekit's own transformer of dataclasses for these two, with such a schema beside the other; what is sent is as before.
"""

import dataclasses
from typing import Any

from flytekit.core.type_engine import DataclassTransformer, TypeEngine, TypeTransformer
from flytekit.models.types import LiteralType

from flyte_ddp.checked_fields import CheckedFields
from flyte_ddp.config import Hyperparameters
from flyte_ddp.release.policy import Policy

KINDS = {bool: {"type": "boolean"}, int: {"type": "integer"}, float: {"type": "number"}, str: {"type": "string"}}


class FormTransformer(DataclassTransformer):  # type: ignore[misc]  # which flytekit leaves untyped
    """flytekit's, with a schema that the console understands."""

    def __init__(self, form: type[CheckedFields]) -> None:
        super().__init__()
        self.form = form
        TypeTransformer.__init__(self, name=form.__name__, t=form)

    def get_literal_type(self, t: type[CheckedFields]) -> LiteralType:
        """The type as Flyte stores it."""
        found, name = super().get_literal_type(t), self.form.__name__
        found.metadata |= {"$ref": f"#/definitions/{name}", "definitions": {name: schema(self.form)}}
        return found

    def guess_python_type(self, literal_type: LiteralType) -> type[CheckedFields]:
        """The dataclass of such a type."""
        if literal_type.metadata and self.form.__name__ in literal_type.metadata.get("definitions", {}):
            return self.form
        raise ValueError(f"{literal_type} is not the type {self.form.__name__}")


def schema(form: type[CheckedFields]) -> dict[str, Any]:
    """The fields, in JSON schema's draft 7."""
    fields = dataclasses.fields(form)  # type: ignore[arg-type]
    return {"type": "object", "properties": {field.name: described(field) for field in fields}}


def described(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """The schema of a field."""
    assert isinstance(field.type, type)
    found = {**KINDS[field.type], "title": field.name, "default": field.default, "description": field.metadata["doc"]}
    choices = field.metadata["choices"]
    return {**found, "enum": [*choices]} if choices else found


for filled_in in (Hyperparameters, Policy):
    TypeEngine.register(FormTransformer(filled_in))
