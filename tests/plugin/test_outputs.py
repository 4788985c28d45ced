"""What a task's body returns: NumPy's numbers where Python's are declared, and what is of no declared type."""

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

import numpy as np
import pytest
import torch
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.errors import UserError
from flytekitplugins.ddp.outputs import convert_outputs


@dataclass(frozen=True)
class Scores:
    loss: float
    counts: list[int]


HALF = object.__new__(Scores)  # without the values of its fields


class Named(NamedTuple):
    accuracy: float


def convert(value: Any, *kinds: Any, name: str | None = None, kept: Path | None = None) -> Any:
    return convert_outputs("own.train", value, ({f"o{place}": kind for place, kind in enumerate(kinds)}, name), kept)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (np.float64(0.5), float, 0.5),
        (np.float32(0.5), Annotated[float, "a note"], 0.5),
        (np.int64(3), float, 3.0),
        (3, float, 3.0),
        (np.int64(3), int, 3),
        (np.bool_(True), bool, True),
        (np.str_("a"), str, "a"),
        (np.array(2.5), float, 2.5),
        (torch.tensor(2.5, requires_grad=True), float, 2.5),
        (np.float64(1.5), int | float, 1.5),
        (3, float | int, 3),
        (np.int64(3), float | str | int, 3),
        (None, float | None, None),
        ([np.float32(1), 2], list[float], [1.0, 2.0]),
        ({"a": [np.int64(1)]}, dict[str, list[int]], {"a": [1]}),
        (Scores(np.float32(0.25), [np.int64(1)]), Scores, Scores(0.25, [1])),
    ],
)
def test_numbers_of_numpy_and_torch_become_pythons(value: Any, kind: Any, expected: Any) -> None:
    converted = convert(value, kind)
    assert (converted, type(converted)) == (expected, type(expected))
    assert repr(converted) == repr(expected)  # which names NumPy's types, also within others


def test_one_output_several_and_a_named_tuple() -> None:
    assert convert((np.float64(0.5), "a"), float, str) == (0.5, "a")
    assert convert(Named(np.float64(0.5)), float, name="Named") == (0.5,)
    assert convert(object()) is None, "which flytekit leaves out, too"


@pytest.mark.parametrize(
    ("value", "kinds", "message"),
    [
        (
            "high",
            [float],
            "returned 'high' of type str, and the task declares float; return that, or declare the other",
        ),
        (2.5, [int], "returned 2.5 of type float, and the task declares int"),
        (True, [int], "returned True of type bool, and the task declares int"),
        ([0.5, "a"], [list[float]], "returned 'a' of type str, and the task declares float"),
        ((0.5, 3), [float], r"returned (0.5, 3) of type tuple, and the task declares float"),
        (0.5, [float, FlyteFile], "returned 0.5 of type float, and the task declares float, FlyteFile"),
        (None, [float, FlyteFile], "returned None, and the task declares float, FlyteFile; return it on rank 0"),
        (5, [FlyteFile], "returned 5 of type int, and the task declares FlyteFile"),
        ("x", [float | None], "returned 'x' of type str, and the task declares float | None; return that"),
        ("x", [Optional[float]], "returned 'x' of type str, and the task declares "),  # noqa: UP045
        (["x"], [dict[str, int]], "returned ['x'] of type list, and the task declares dict[str, int]; return that"),
        ("/nowhere/a.pt", [FlyteFile], "returned /nowhere/a.pt, which is not there; write it first"),
        (Path("/nowhere/a.pt"), [FlyteFile | None], "returned /nowhere/a.pt, which is not there; write it first"),
        (["/nowhere/a"], [list[FlyteDirectory]], "returned /nowhere/a, which is not there; write it first"),
        (10**400, [float], "returned 1000000000000"),
        (HALF, [Scores], "returned <Scores instance at "),
        (FlyteFile("/nowhere/model.pt"), [FlyteFile], "returned /nowhere/model.pt, which is not there; write it first"),
    ],
)
def test_other_types_are_mistakes_and_the_value_is_kept(
    tmp_path: Path, value: Any, kinds: list[Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"^own.train: rank 0 {re.escape(message)}") as caught:
        convert(value, *kinds, kept=tmp_path)
    assert "its saves stay, and all that it returned is in " in str(caught.value)
    kept = pickle.loads((tmp_path / "returned.pickle").read_bytes())
    assert type(kept) is type(value)
    assert value is HALF or str(kept) == str(value)
