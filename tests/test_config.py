"""Hyperparameters: the same values are refused, and the same accepted, on every path by which they arrive."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from cli import pyflyte
from flytekit import FlyteContextManager
from flytekit.core.type_engine import DataclassTransformer, TypeEngine
from flytekit.models.literals import Binary, Literal, Scalar
from google.protobuf import struct_pb2

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError

Values = dict[str, Any]


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

# Of each number: the lowest and highest that are right, and the nearest that are not; None where there is no end.
RANGES: dict[str, tuple[float, float, float | None, float | None]] = {
    "validation_fraction": (0, 0.999999, -1e-9, 1),
    "image_size": (0, 4096, -1, 4097),
    "epochs": (1, 100_000, 0, 100_001),
    "max_steps": (0, 2**53, -1, 2**54),
    "batch_size": (1, 1_000_000, 0, 1_000_001),
    "test_batch_size": (1, 1_000_000, 0, 1_000_001),
    "accumulation_steps": (1, 100_000, 0, 100_001),
    "learning_rate": (1e-300, 1000, 0, 1000.1),
    "momentum": (0, 0.999999, -0.1, 1),
    "weight_decay": (0, 1, -1e-9, 1.001),
    "warmup_steps": (0, 2**53, -1, 2**54),
    "label_smoothing": (0, 0.999999, -0.1, 1),
    "grad_clip_norm": (0, 1e300, -0.1, None),
    "ema_decay": (0, 0.999999, -0.1, 1),
    "early_stop_patience": (0, 2**53, -1, 2**54),
    "seed": (0, 2**31, -1, 2**31 + 1),
    "num_ranks": (0, 4096, -1, 4097),
    "log_interval": (1, 2**53, 0, 2**54),
    "eval_interval": (1, 100_000, 0, 100_001),
}
# What lets a number stand at the end of its range.
BESIDE: Values = {"batch_size": 1_000_000, "nesterov": False}

# Values, and what the message must name: the field, the value, the rule.
BAD: dict[str, tuple[Values, tuple[str, ...]]] = {
    "misspelt": ({"epoch": 3}, ("'epoch'", "did you mean 'epochs'")),
    "unknown": ({"colour": "red"}, ("unknown hyperparameter 'colour'", "choose one of", "batch_size")),
    "capitals": ({"Epochs": 3}, ("'Epochs'", "'epochs'")),
    "empty key": ({"": 3}, ("unknown hyperparameter ''",)),
    "hook's name": ({"__pre_deserialize__": 3}, ("unknown hyperparameter",)),
    "text for int": ({"epochs": "4"}, ("epochs='4'", "whole number")),
    "text for float": ({"learning_rate": "0.1"}, ("learning_rate='0.1'", "number")),
    "text for bool": ({"nesterov": "false"}, ("nesterov='false'", "true or false")),
    "empty text for int": ({"epochs": ""}, ("epochs=''", "whole number")),
    "fraction for int": ({"epochs": 3.7}, ("epochs=3.7", "whole number")),
    "small fraction for int": ({"batch_size": 128.0000001}, ("batch_size=128.0000001", "whole number")),
    "one for bool": ({"nesterov": 1}, ("nesterov=1", "true or false")),
    "zero for bool": ({"compile": 0}, ("compile=0", "true or false")),
    "float for bool": ({"deterministic": 0.5}, ("deterministic=0.5", "true or false")),
    "true for int": ({"epochs": True}, ("epochs=True", "whole number")),
    "false for int": ({"num_ranks": False}, ("num_ranks=False", "whole number")),
    "true for float": ({"learning_rate": True}, ("learning_rate=True", "number")),
    "false for float": ({"weight_decay": False}, ("weight_decay=False", "number")),
    "number for text": ({"dataset": 7}, ("dataset=7", "text")),
    "true for text": ({"channels_last": True}, ("channels_last=True", "text")),
    "null for int": ({"epochs": None}, ("epochs=None", "whole number")),
    "null for float": ({"momentum": None}, ("momentum=None", "number")),
    "null for bool": ({"nesterov": None}, ("nesterov=None", "true or false")),
    "null for text": ({"data_source": None}, ("data_source=None", "text")),
    "list for int": ({"epochs": [3]}, ("epochs=[3", "whole number")),
    "list for text": ({"dataset": ["digits"]}, ("dataset=['digits']", "text")),
    "empty list for float": ({"learning_rate": []}, ("learning_rate=[]", "number")),
    "object for int": ({"epochs": {"value": 3}}, ("epochs={'value': 3", "whole number")),
    "object for bool": ({"nesterov": {}}, ("nesterov={}", "true or false")),
    "huge float for int": ({"max_steps": 1e300}, ("max_steps=", "at most 9007199254740992")),
    "unknown dataset": ({"dataset": "imagenet"}, ("dataset 'imagenet'", "digits", "fashion_mnist", "package.module")),
    "misspelt dataset": ({"dataset": "fashion-mnist"}, ("'fashion-mnist'", "did you mean 'fashion_mnist'")),
    "empty dataset": ({"dataset": ""}, ("dataset ''", "cifar10")),
    "unknown model": ({"model": "my_net"}, ("model 'my_net'", "choose one of", "README")),
    "misspelt model": ({"model": "resnet_18"}, ("'resnet_18'", "did you mean 'resnet18'")),
    "detector": ({"model": "fasterrcnn_resnet50_fpn"}, ("'fasterrcnn_resnet50_fpn'", "detects objects", "resnet18")),
    "empty model": ({"model": ""}, ("model ''",)),
    "unknown optimizer": ({"optimizer": "SGD"}, ("optimizer 'SGD'", "adam, adamw, sgd")),
    "unknown schedule": ({"schedule": "onecycle"}, ("schedule 'onecycle'", "constant, cosine, one_cycle")),
    "unknown augment": ({"augment": "flip"}, ("augment 'flip'", "crop, crop_flip, none")),
    "unknown keep": ({"keep": "first"}, ("keep 'first'", "best, ema, last")),
    "unknown backend": ({"backend": "mpi"}, ("backend 'mpi'", "auto, gloo, nccl")),
    "unknown precision": ({"precision": "fp16"}, ("precision 'fp16'", "auto, bf16, fp32")),
    "unknown order": ({"channels_last": "yes"}, ("channels_last 'yes'", "auto, off, on")),
    "batch below ranks": ({"batch_size": 2, "num_ranks": 4}, ("batch_size=2", "num_ranks=4")),
    "batch below parts": ({"batch_size": 4, "accumulation_steps": 5}, ("batch_size=4", "accumulation_steps", "5")),
    "batch below product": (
        {"batch_size": 11, "num_ranks": 3, "accumulation_steps": 4},
        ("batch_size=11", "accumulation_steps x ranks = 12"),
    ),
    "nesterov alone": ({"momentum": 0}, ("nesterov=True", "momentum above 0")),
    "patience without split": (
        {"early_stop_patience": 2, "validation_fraction": 0},
        ("early_stop_patience=2", "validation_fraction above 0"),
    ),
    "best without split": ({"keep": "best", "validation_fraction": 0}, ("keep='best'", "validation_fraction above 0")),
    "ema without average": ({"keep": "ema"}, ("keep='ema'", "ema_decay")),
    "second of two": ({"epochs": 3, "seed": "1"}, ("seed='1'",)),
    **{
        f"{field} {side}": ({field: value}, (f"{field}={value}", "must be"))
        for field, (_, _, *outside) in RANGES.items()
        for side, value in zip(("too low", "too high"), outside, strict=True)
        if value is not None
    },
}

# Numbers that a protobuf Struct, or msgpack, cannot hold.
NOT_EVERYWHERE: dict[str, tuple[Values, tuple[str, ...]]] = {
    "nan": ({"learning_rate": float("nan")}, ("learning_rate=nan", "finite")),
    "infinity": ({"learning_rate": float("inf")}, ("learning_rate=inf", "finite")),
    "minus infinity": ({"momentum": float("-inf")}, ("momentum=-inf", "finite")),
    "nan for int": ({"epochs": float("nan")}, ("epochs=nan", "whole number")),
    "infinity for int": ({"max_steps": float("inf")}, ("max_steps=inf", "whole number")),
    "huge int": ({"max_steps": 10**400}, ("max_steps=1000", "whole number")),
    "huge int for float": ({"grad_clip_norm": 10**400}, ("grad_clip_norm=1000", "finite")),
    "int next to a double": ({"max_steps": 2**53 + 1}, ("max_steps=9007199254740993", "at most 9007199254740992")),
}
UNKNOWN = ("misspelt", "unknown", "capitals", "empty key", "hook's name")  # in a call Python itself refuses these
EVERYWHERE = [(path, name) for path in PATHS for name in BAD if path != "python" or name not in UNKNOWN]
ELSEWHERE = [(path, name) for path in ("python", "dict", "json") for name in NOT_EVERYWHERE]


@pytest.mark.parametrize(("path", "name"), [*EVERYWHERE, *ELSEWHERE])
def test_bad_values_are_refused_on_every_path(path: str, name: str) -> None:
    values, words = {**BAD, **NOT_EVERYWHERE}[name]
    with pytest.raises(UserError) as refusal:
        PATHS[path](values)
    message = refusal.value.message
    for word in words:
        assert without_zeros(word) in without_zeros(message), message
    assert "\n" not in message
    assert len(message) < 700


def test_python_itself_refuses_an_unknown_name() -> None:
    with pytest.raises(TypeError, match="epoch"):
        Hyperparameters(epoch=3)  # type: ignore[call-arg]


def without_zeros(text: str) -> str:
    """For a comparison in which 1.0 is 1: a float field's value is a float by then, and every number of a Struct is."""
    return text.replace(".0", "")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_struct_with_a_number_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"NaN|Infinity"):
        from_struct({"learning_rate": value})


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf")], ids=["nan", "infinity", "minus infinity"]
)
def test_msgpack_with_a_number_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(UserError, match="must be a finite number"):
        from_msgpack({"learning_rate": value})


@pytest.mark.parametrize("values", [None, [], ["epochs"], "epochs", 3, True, [["epochs", 3]]])
def test_anything_but_an_object_is_refused(values: Any) -> None:
    for read in (Hyperparameters.from_dict, lambda given: Hyperparameters.from_json(json.dumps(given)), from_msgpack):
        with pytest.raises(UserError, match="must be a JSON object, got"):
            read(values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"learning_rate": 1e400}', "learning_rate=inf"),
        ('{"learning_rate": NaN}', "learning_rate=nan"),
        ('{"max_steps": -Infinity}', "max_steps=-inf"),
        ('{"epochs": 3', "not valid JSON"),
        ("", "not valid JSON"),
        ("epochs=3", "not valid JSON"),
        ("{'epochs': 3}", "not valid JSON"),
        ('{"epochs": 0x10}', "not valid JSON"),
        ('{"epochs": True}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_json_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        Hyperparameters.from_json(text)
    assert words in refusal.value.message


def test_a_user_error_is_what_callers_and_pyflyte_expect() -> None:
    import click

    with pytest.raises(ValueError, match="epochs=0") as refusal:
        Hyperparameters(epochs=0)
    assert isinstance(refusal.value, click.ClickException)
    assert refusal.value.exit_code != 0
    copy = pickle.loads(pickle.dumps(refusal.value))  # ranks report their errors to the launcher
    assert type(copy) is UserError
    assert copy.message == refusal.value.message


PRESETS = sorted((Path(__file__).parents[1] / "config").glob("*.json"))
GOOD: dict[str, tuple[Values, Values]] = {  # given, and as it must arrive
    "defaults": ({}, {}),
    "whole double for int": ({"epochs": 3.0, "seed": 0.0}, {"epochs": 3, "seed": 0}),
    "int for float": ({"learning_rate": 1, "weight_decay": 0}, {"learning_rate": 1.0, "weight_decay": 0.0}),
    "largest seed": ({"seed": 2**31}, {"seed": 2**31}),
    "no short decimal": ({"learning_rate": 1 / 3}, {"learning_rate": 1 / 3}),
    "smallest double": ({"learning_rate": 5e-324}, {"learning_rate": 5e-324}),
    "own code": ({"model": "my_package.models:Net"}, {"model": "my_package.models:Net"}),
    "own data": ({"dataset": "flowers:load", "data_source": "s3://b/k"},) * 2,
    "text beyond ASCII": ({"data_source": "/données/été 🌞\n"}, {"data_source": "/données/été 🌞\n"}),
    "every choice": ({"optimizer": "adamw", "schedule": "cosine", "keep": "best", "precision": "bf16"},) * 2,
    "moving average": ({"keep": "ema", "ema_decay": 0.99},) * 2,
    "batch of ranks and parts": ({"batch_size": 12, "num_ranks": 3, "accumulation_steps": 4},) * 2,
    "no momentum": ({"momentum": 0.0, "nesterov": False},) * 2,
    "adam needs no momentum": ({"optimizer": "adam", "momentum": 0.0},) * 2,
    "bool": ({"nesterov": False, "compile": True, "deterministic": True},) * 2,
    **{path.stem: (json.loads(path.read_text()),) * 2 for path in PRESETS},
    **{
        f"{field} {end}": ({**BESIDE, field: value},) * 2
        for field, (low, high, *_) in RANGES.items()
        for end, value in (("lowest", low), ("highest", high))
    },
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("path", PATHS)
def test_good_values_arrive_unchanged_on_every_path(path: str, name: str) -> None:
    given, expected = GOOD[name]
    arrived = PATHS[path](given)
    defaults = {field.name: field.default for field in dataclasses.fields(Hyperparameters)}
    for field, value in {**defaults, **expected}.items():
        got = getattr(arrived, field)
        assert got == value, field
        assert type(got) is type(defaults[field]), field


@pytest.mark.parametrize("name", GOOD)
def test_there_and_back(name: str) -> None:
    hp = Hyperparameters(**GOOD[name][0])
    transformer = TypeEngine.get_transformer(Hyperparameters)
    assert isinstance(transformer, DataclassTransformer)
    context, kind = FlyteContextManager.current_context(), TypeEngine.to_literal_type(Hyperparameters)
    assert python(transformer.to_literal(context, hp, Hyperparameters, kind)) == hp
    assert python(transformer.to_generic_literal(context, hp, Hyperparameters, kind)) == hp
    assert Hyperparameters.from_json(hp.to_json()) == hp
    assert Hyperparameters.from_dict(hp.to_dict()) == hp
    assert pickle.loads(pickle.dumps(hp)) == hp


def test_equal_values_have_one_cache_key() -> None:
    first, second = Hyperparameters(epochs=3.0, learning_rate=1), Hyperparameters(epochs=3, learning_rate=1.0)  # type: ignore[arg-type]
    assert (first, hash(first), first.to_json()) == (second, hash(second), second.to_json())


def test_frozen_and_hashable() -> None:
    hp = Hyperparameters()
    with pytest.raises(dataclasses.FrozenInstanceError):
        hp.epochs = 4  # type: ignore[misc]
    assert {hp: "found"}[Hyperparameters()] == "found"
    assert dataclasses.replace(hp, epochs=4).epochs == 4
    with pytest.raises(UserError, match="epochs=0"):
        dataclasses.replace(hp, epochs=0)


TYPES: dict[str, type] = {
    **dict.fromkeys(("dataset", "data_source", "model", "init_from", "optimizer", "schedule", "augment"), str),
    **dict.fromkeys(("keep", "backend", "precision", "channels_last"), str),
    **dict.fromkeys(("validation_fraction", "learning_rate", "momentum", "weight_decay"), float),
    **dict.fromkeys(("label_smoothing", "grad_clip_norm", "ema_decay"), float),
    **dict.fromkeys(("image_size", "epochs", "max_steps", "batch_size", "test_batch_size"), int),
    **dict.fromkeys(("accumulation_steps", "warmup_steps", "early_stop_patience", "seed", "num_ranks"), int),
    **dict.fromkeys(("log_interval", "eval_interval"), int),
    **dict.fromkeys(("nesterov", "compile", "deterministic"), bool),
}


def test_the_console_knows_every_field_its_type_and_default() -> None:
    kind = TypeEngine.to_literal_type(Hyperparameters)
    in_schema = {str: "string", float: "number", int: "integer", bool: "boolean"}
    expected = {
        name: {"type": in_schema[kind], "default": getattr(Hyperparameters(), name)} for name, kind in TYPES.items()
    }
    assert kind.metadata["properties"] == expected
    assert kind.metadata["title"] == "Hyperparameters"
    structure = {name: TypeEngine.to_literal_type(kind) for name, kind in TYPES.items()}
    assert kind.structure.dataclass_type == structure  # by which Flyte itself reads hp.dataset


def test_every_field_is_documented() -> None:
    for field in dataclasses.fields(Hyperparameters):
        assert len(field.metadata["doc"]) > 10, field.name
        assert field.metadata["doc"].endswith("."), field.name


def test_every_number_has_a_range_in_the_table_above() -> None:
    assert set(RANGES) == {name for name, kind in TYPES.items() if kind in (int, float)}


@pytest.mark.parametrize(
    "name",
    [
        *("misspelt", "text for int"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("unknown model", "momentum too high")),
    ],
)
def test_bad_values_end_pyflyte_with_one_panel(name: str, tmp_path: Path) -> None:
    values, words = BAD[name]
    arguments = ("run", "workflows/training.py", "training_wf", "--hp", json.dumps(values))
    ended = pyflyte(*arguments, home=tmp_path)
    assert ended.exit_code != 0
    assert "Traceback" not in ended.output
    for word in words:
        assert word in ended.panel
    assert not list(tmp_path.rglob("*.*"))  # nothing was begun
