"""Inputs of tasks with many fields, such as the hyperparameters, in the form that Flyte 2 reads without losses.

`flyte run` drops unknown fields of a dataclass without an error. The pydantic models of this module keep all fields,
and the dataclass checks the values.
"""

import copy
import dataclasses
import sys
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, create_model

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.checks.fields import CheckedFields
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.release.policy import Policy
from flyte_ddp.schedules.arguments import refuse_misread_arguments
from flyte_ddp.sweep.space import Sweep

Form = TypeVar("Form", bound=CheckedFields)


class FormInput(BaseModel, Generic[Form]):
    """The unchecked values of a dataclass of checked fields. The console shows the fields with help and defaults."""

    model_config = ConfigDict(extra="allow")
    kind: ClassVar[type[CheckedFields]]

    @classmethod
    def model_validate_json(cls, json_data: Any, **_: Any) -> Self:
        """Return the model of a JSON text, for an option of `flyte run`.

        Raises:
            UserError: A value is not allowed, or `flyte run` has misread an option, such as a duplicate key.
        """
        refuse_misread_arguments()
        values: Any = cls.kind.from_json(json_data)
        return cls(**dataclasses.asdict(values))

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the JSON schema, from which the console makes a form. Empty for ``--help``, which would print all."""
        return {} if "--help" in sys.argv else copy.deepcopy(cls.make_json_schema(*args, **kwargs))

    @classmethod
    @cache
    def make_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return pydantic's JSON schema. Cached, because the SDK asks for the schema several times in each run."""
        return super().model_json_schema(*args, **kwargs)

    def check(self) -> Form:
        """Return the values as the dataclass.

        Raises:
            UserError: A field is unknown, or a value is not allowed.
        """
        checked: Any = self.kind.from_dict(self.model_dump(warnings=False))  # of values of another type
        return checked


def make_input_model(kind: type[CheckedFields]) -> Any:
    """Return a FormInput with the fields of a dataclass, whose values are not checked."""
    fields: dict[str, Any] = {  # whose values the dataclass checks
        field.name: (Annotated[field.type, SkipValidation], Field(field.default, description=field.metadata["doc"]))
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
    }
    model = create_model(kind.__name__, __base__=FormInput, __module__=__name__, **fields)
    model.kind = kind
    return model


HyperparametersInput = make_input_model(Hyperparameters)
PolicyInput = make_input_model(Policy)
SweepInput = make_input_model(Sweep)
WindowInput = make_input_model(WindowSource)


def to_input(value: Any) -> Any:
    """Return a dataclass of checked fields as its input model, and any other value unchanged."""
    models = {model.kind: model for model in (HyperparametersInput, PolicyInput, SweepInput, WindowInput)}
    return models[type(value)](**dataclasses.asdict(value)) if type(value) in models else value
