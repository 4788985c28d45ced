"""Hyperparameters: the same values are refused, and the same accepted, on every path by which they arrive."""

import dataclasses
import inspect
import json
import pickle
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import yaml
from flytekit import FlyteContextManager
from flytekit.core.type_engine import DataclassTransformer, TypeEngine
from flytekit.models.literals import Binary, Literal, Scalar
from google.protobuf import struct_pb2
from hyperparameter_values import BAD, GOOD, NOT_EVERYWHERE, RANGES, TYPES, Values

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError


def python(literal: Literal) -> Hyperparameters:
    return TypeEngine.to_python_value(FlyteContextManager.current_context(), literal, Hyperparameters)


def from_msgpack(values: Any) -> Hyperparameters:
    """What a pod receives."""
    return python(Literal(scalar=Scalar(binary=Binary(value=msgpack.packb(values), tag="msgpack"))))


def from_struct(values: Values) -> Hyperparameters:
    """What the console's form sends: numbers are doubles."""
    struct = struct_pb2.Struct()
    struct.update(values)
    return python(Literal(scalar=Scalar(generic=struct)))


PATHS: dict[str, Callable[[Values], Hyperparameters]] = {
    "python": lambda values: Hyperparameters(**values),
    "dict": Hyperparameters.from_dict,
    "json": lambda values: Hyperparameters.from_json(json.dumps(values)),
    "msgpack": from_msgpack,
    "struct": from_struct,
}


@pytest.mark.parametrize("name", [*BAD, *NOT_EVERYWHERE])
def test_bad_values_are_refused_on_every_path(name: str) -> None:
    values, words = {**BAD, **NOT_EVERYWHERE}[name]
    for path in PATHS if name in BAD else ("python", "dict", "json"):
        with pytest.raises(UserError) as refusal:
            PATHS[path](values)
        message = refusal.value.message
        for word in words:  # a float field's value is a float by then, and every number of a Struct is
            assert word.replace(".0", "") in message.replace(".0", ""), message
        assert "\n" not in message
        assert len(message) < 700


@pytest.mark.parametrize("text", ["1e-1", "2E3", ".5e0", "+1e2"])
def test_numbers_that_yaml_takes_for_text(text: str) -> None:
    """Those only: on the command line, where a YAML file may be what was read, and nowhere else."""
    read = yaml.safe_load(f"grad_clip_norm: {text}")
    assert read == {"grad_clip_norm": text}
    assert Hyperparameters.from_json(json.dumps(read)) == Hyperparameters(grad_clip_norm=float(text))
    for path in ("python", "dict", "msgpack", "struct"):
        with pytest.raises(UserError, match=r"grad_clip_norm='.*': must be a finite number"):
            PATHS[path](read)


def test_a_key_that_is_there_twice_is_refused() -> None:
    for text, key in {
        '{"epochs": 3, "learning_rate": 0.5, "epochs": 50}': "epochs",
        '{"options": {"model": {"width": 8, "width": 80}}}': "width",
        json.dumps({"options": '{"model": {"width": 8}, "model": {"width": 80}}'}): "model",
    }.items():
        with pytest.raises(UserError, match=f"the key '{key}' occurs twice"):
            Hyperparameters.from_json(text)
    both = Hyperparameters.from_json('{"options": {"model": {"width": 8}, "objective": {"width": 8}}}')
    assert both.parse_options() == {"model": {"width": 8}, "objective": {"width": 8}}


def test_a_text_of_options_that_may_be_a_number_is_refused() -> None:
    """PyYAML reads 1e-6 as a text, which a model would get."""
    for options in ({"model": {"eps": "1e-6"}}, {"objective": {"weights": [1, "2E3"]}}):
        for given in (options, json.dumps(options)):
            with pytest.raises(UserError, match=r"options=.* is text, not a number"):
                Hyperparameters.from_json(json.dumps({"options": given}))
    read = yaml.safe_load("{model: {eps: 1.0e-6, name: e5, 1e-6: x}}")
    assert Hyperparameters.from_json(json.dumps({"options": read})).parse_options()["model"]["eps"] == 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"NaN|Infinity"):
        from_struct({"learning_rate": value})
    with pytest.raises(UserError, match="must be a finite number"):
        from_msgpack({"learning_rate": value})


@pytest.mark.parametrize("values", [None, "epochs", [["epochs", 3]]])
def test_anything_but_an_object_is_refused(values: Any) -> None:
    for read in (Hyperparameters.from_dict, PATHS["json"], from_msgpack):
        with pytest.raises(UserError, match="must be a JSON object, got"):
            read(values)


@pytest.mark.usefixtures("no_collection")
def test_bad_json_is_refused() -> None:
    for text, words in {
        '{"learning_rate": 1e400}': "learning_rate=inf",
        '{"max_steps": -Infinity}': "max_steps=-inf",
        **dict.fromkeys(('{"epochs": 3', "", "{'epochs': 3}", '{"epochs": True}', "[" * 100_000), "not valid JSON"),
    }.items():
        with pytest.raises(UserError, match=words):
            Hyperparameters.from_json(text)


@pytest.mark.parametrize("name", GOOD)
def test_good_values_arrive_unchanged_on_every_path_and_come_back(name: str) -> None:
    given, expected = GOOD[name]
    defaults = {field.name: field.default for field in dataclasses.fields(Hyperparameters)}
    for path in PATHS.values():
        arrived = vars(path(given))
        assert arrived == {**defaults, **expected}
        assert {name: type(value) for name, value in arrived.items()} == TYPES
    hp = Hyperparameters(**given)
    transformer = TypeEngine.get_transformer(Hyperparameters)
    assert isinstance(transformer, DataclassTransformer)
    context, kind = FlyteContextManager.current_context(), TypeEngine.to_literal_type(Hyperparameters)
    assert python(transformer.to_literal(context, hp, Hyperparameters, kind)) == hp
    assert python(transformer.to_generic_literal(context, hp, Hyperparameters, kind)) == hp
    assert Hyperparameters.from_json(hp.to_json()) == hp
    assert Hyperparameters.from_dict(hp.to_dict()) == hp
    assert pickle.loads(pickle.dumps(hp)) == hp


def test_equal_values_are_one_frozen_value_with_one_cache_key() -> None:
    first, second = Hyperparameters(epochs=3.0, learning_rate=1), Hyperparameters(epochs=3, learning_rate=1.0)  # type: ignore[arg-type]
    assert (first, hash(first), first.to_json()) == (second, hash(second), second.to_json())
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.epochs = 4  # type: ignore[misc]
    assert dataclasses.replace(first, epochs=4).epochs == 4
    with pytest.raises(UserError, match="epochs=0"):
        dataclasses.replace(first, epochs=0)


def test_the_console_knows_every_field_its_type_and_default() -> None:
    kind = TypeEngine.to_literal_type(Hyperparameters)
    in_schema = {str: "string", float: "number", int: "integer", bool: "boolean"}
    assert kind.metadata["properties"] == {
        name: {"type": in_schema[kind], "default": getattr(Hyperparameters(), name)} for name, kind in TYPES.items()
    }
    assert kind.metadata["title"] == "Hyperparameters"
    structure = {name: TypeEngine.to_literal_type(kind) for name, kind in TYPES.items()}
    assert kind.structure.dataclass_type == structure  # by which Flyte itself reads hp.dataset


def test_every_field_is_documented_and_every_number_has_a_range() -> None:
    assert set(inspect.signature(Hyperparameters).parameters) == set(TYPES)  # which editors and help() show
    assert set(RANGES) == {name for name, kind in TYPES.items() if kind in (int, float)}
    for field in dataclasses.fields(Hyperparameters):
        assert len(field.metadata["doc"]) > 10, field.name
        assert field.metadata["doc"].endswith("."), field.name


def test_hyperparameters_are_printed_without_defaults() -> None:
    """As a call that makes equal ones, since flytekit prints a sweep's outputs."""
    hp = Hyperparameters(epochs=9, learning_rate=0.25)
    assert repr(hp) == "Hyperparameters(epochs=9, learning_rate=0.25)"
    assert eval(repr(hp)) == hp
    assert repr(Hyperparameters()) == "Hyperparameters()"
