"""The console's form for hyperparameters: a field for each with its help, its default and its choices.

The console draws one from a JSON schema of an older draft than flytekit writes into the type of a dataclass. This is
flytekit's own transformer of dataclasses for this one, with such a schema beside the other; what is sent is as before.
"""

import dataclasses
from typing import Any

from flytekit.core.type_engine import DataclassTransformer, TypeEngine, TypeTransformer
from flytekit.models.types import LiteralType

from flyte_ddp.config import Hyperparameters

NAME = Hyperparameters.__name__
KINDS = {bool: {"type": "boolean"}, int: {"type": "integer"}, float: {"type": "number"}, str: {"type": "string"}}


class HyperparametersTransformer(DataclassTransformer):  # type: ignore[misc]  # which flytekit leaves untyped
    """flytekit's, with a schema that the console understands."""

    def __init__(self) -> None:
        super().__init__()
        TypeTransformer.__init__(self, name=NAME, t=Hyperparameters)

    def get_literal_type(self, t: type[Hyperparameters]) -> LiteralType:
        """The type as Flyte stores it."""
        found = super().get_literal_type(t)
        found.metadata |= {"$ref": f"#/definitions/{NAME}", "definitions": {NAME: schema()}}
        return found

    def guess_python_type(self, literal_type: LiteralType) -> type[Hyperparameters]:
        """The dataclass of such a type."""
        if literal_type.metadata and NAME in literal_type.metadata.get("definitions", {}):
            return Hyperparameters
        raise ValueError(f"{literal_type} is not the type of hyperparameters")


def schema() -> dict[str, Any]:
    """The fields, in JSON schema's draft 7."""
    return {
        "type": "object",
        "properties": {field.name: described(field) for field in dataclasses.fields(Hyperparameters)},
    }


def described(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """The schema of a field."""
    assert isinstance(field.type, type)
    found = {**KINDS[field.type], "title": field.name, "default": field.default, "description": field.metadata["doc"]}
    choices = field.metadata["choices"]
    return {**found, "enum": [*choices]} if choices else found


TypeEngine.register(HyperparametersTransformer())
