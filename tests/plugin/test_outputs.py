"""What a task's body returns: as the declared types at any depth, or refused by name; types that cannot be."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.core.errors import UserError
from flytekitplugins.ddp.outputs import convert_outputs, refuse_unwritable_types


class Named(NamedTuple):
    accuracy: float


@dataclass(frozen=True)
class Inner:
    scores: dict[str, list[float]]
    when: datetime | None = None
    pair: tuple[float, int] = (0.0, 0)


@dataclass
class Outer:
    inner: list[Inner]
    seen: int | float | str
    named: Named = field(default_factory=lambda: Named(0.0))


@dataclass
class Loose:
    """Fields whose parts have no declared type, or one of an abstract class."""

    bare: list  # type: ignore[type-arg]
    any_value: Any
    numbers: Sequence[float]
    by_name: Mapping[str, Any]


NOON = datetime(2026, 1, 2, 12, tzinfo=UTC).replace(tzinfo=None)
HALF = np.float32(0.5)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (np.float64(0.5), float, 0.5),
        (np.str_("a"), str, "a"),
        (np.bool_(True), bool, True),
        (np.int64(3), int, 3),
        (torch.tensor(2.5, requires_grad=True), float, 2.5),
        (1, float, 1.0),
        (HALF, Annotated[float, "share"], 0.5),
        (HALF, float | None, 0.5),
        (None, float | None, None),
        (torch.tensor(3), float | int, 3),
        (True, int | bool, True),
        (1, str | float, 1.0),
        ({"a": [HALF]}, dict[str, float] | dict[str, list[float]], {"a": [0.5]}),
        ({"acc": HALF, np.str_("loss"): torch.tensor(0.25)}, dict[str, float], {"acc": 0.5, "loss": 0.25}),
        ({"acc": {"top": (HALF, 1)}}, dict, {"acc": {"top": (0.5, 1)}}),
        ({"of_classes": np.array([HALF]), "all": torch.ones(2)}, dict, {"of_classes": [0.5], "all": [1.0, 1.0]}),
        ({"acc": HALF}, typing.Dict, {"acc": 0.5}),  # noqa: UP006 (as users write)
        ({"acc": [HALF]}, dict[str, Any], {"acc": [HALF]}),
        (Loose([HALF], {"a": HALF}, (HALF,), {"a": [HALF]}), Loose, Loose([0.5], {"a": 0.5}, (0.5,), {"a": [0.5]})),
        (np.str_("sgd"), Literal["sgd", "adam"], "sgd"),
        (np.datetime64("2026-01-02"), date, NOON.date()),
        ((np.float64(0.5), torch.tensor(0.25), 1), list[float], [0.5, 0.25, 1.0]),
        (np.array([[1, 2], [3, 4]]), list[list[int]], [[1, 2], [3, 4]]),
        (torch.tensor([0.5, 0.25], dtype=torch.bfloat16), list[float], [0.5, 0.25]),
        (np.datetime64("2026-01-02T12:00:00", "ns"), datetime, NOON),
        (np.timedelta64(90, "s"), timedelta, timedelta(seconds=90)),
        (torch.tensor(3), torch.Tensor, torch.tensor(3)),
        ([torch.tensor(3)], list[torch.Tensor], [torch.tensor(3)]),
        (torch.tensor(3), float | torch.Tensor, torch.tensor(3)),
        (
            Outer([Inner({"a": np.array([0.5])}, np.datetime64(NOON), (HALF, np.int8(1)))], np.int64(2), Named(HALF)),
            Outer,
            Outer([Inner({"a": [0.5]}, NOON, (0.5, 1))], 2, Named(0.5)),
        ),
    ],
)
def test_equal_values_become_the_declared_type_at_any_depth(value: Any, kind: Any, expected: Any) -> None:
    """A tensor stays one where no number is declared, as in a state_dict. flytekit takes what comes out."""
    before = repr(value)
    converted = convert_outputs(value, {"o0": kind})
    assert (converted, type(converted)) == (expected, type(expected))
    assert repr(converted) == repr(expected)  # which names NumPy's types, also within others
    assert repr(value) == before, "the body's own object is unchanged"
    if not isinstance(converted, torch.Tensor) and kind != list[torch.Tensor]:
        TypeEngine.to_literal(FlyteContextManager.current_context(), converted, kind, TypeEngine.to_literal_type(kind))


def test_several_outputs_and_none() -> None:
    assert convert_outputs(("anything",), {}) is None
    for kind in (tuple, list):
        converted = convert_outputs(kind([HALF, [torch.tensor(3)]]), {"o0": float, "o1": list[int]})
        assert repr(converted) == "(0.5, [3])"
    assert repr(convert_outputs(Named(HALF), {"accuracy": float}, "Named")) == "Named(accuracy=0.5)"


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (None, float, "output o0 is None, of type NoneType, but the task declares float; return"),
        (3.0, int, "output o0 is 3.0, of type float, but the task declares int"),
        (2**53 + 1, float, "output o0 is 9007199254740993, of type int"),
        (True, float, "output o0 is True, of type bool"),
        (np.uint64(2**63), int, "output o0 is 9223372036854775808: Flyte's int must be below 2[*][*]63"),
        (NOON, date, "output o0 is datetime.datetime.*, but the task declares date"),
        (torch.ones(2), float, r"output o0 is tensor\(\[1., 1.\]\), of type Tensor"),
        ({"a": [1.0, None]}, dict[str, list[float]], r"output o0\['a'\]\[1\] is None"),
        ({1: 1.0}, dict[str, float], "output o0, a key, is 1, of type int, but the task declares str"),
        (Inner({"a": ["x"]}), Inner, r"output o0.scores\['a'\]\[0\] is 'x'"),
        (0.5, list[float], r"output o0 is 0.5, of type float, but the task declares list\[float\]"),
        ("x", float | None, r"output o0 is 'x', of type str, but the task declares float \| None"),
        ("none.pt", FlyteFile, "output o0: file or folder 'none.pt' does not exist"),
        ([FlyteFile("none.pt")], list[FlyteFile], r"output o0\[0\]: file or folder 'none.pt' does not exist"),
        (FlyteDirectory("none"), FlyteDirectory, "output o0: file or folder 'none' does not exist"),
    ],
)
def test_what_has_no_equal_value_is_refused_with_its_place(value: Any, kind: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        convert_outputs(value, {"o0": kind})


@pytest.mark.parametrize("value", [0.5, (0.5,), (1, 2, 3), None])
def test_a_wrong_number_of_outputs(value: Any) -> None:
    with pytest.raises(UserError, match=r"the task declares 2 outputs but returned"):
        convert_outputs(value, {"o0": float, "o1": float})


def test_files_that_are_there_or_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    for value in (str(tmp_path / "model.pt"), tmp_path / "model.pt", FlyteFile("s3://bucket/model.pt")):
        assert convert_outputs(value, {"o0": FlyteFile}) is value


def test_a_type_that_flytekit_cannot_write_is_refused() -> None:
    """Which flytekit notices when it has the value: after the training."""
    unwritable = dataclasses.make_dataclass("Weights", [("values", np.ndarray)])
    with pytest.raises(UserError, match='output best: Field "values" of type ndarray in Weights is not serializable'):
        refuse_unwritable_types({"n": int, "best": unwritable | None})
    refuse_unwritable_types({"n": int, "all": Outer | None, "file": FlyteFile["pt"], "folder": FlyteDirectory})
