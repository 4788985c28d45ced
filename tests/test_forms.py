"""Records of JSON values, and the first part that does not fit; JSON and arrays that harm."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from flyte_ddp.core.checks.arrays import DamagedArraysError, map_array_file, read_arrays
from flyte_ddp.core.checks.parsing import MisreadError, parse_json
from flyte_ddp.core.checks.records import JsonRecord
from flyte_ddp.core.errors import UserError


@pytest.mark.parametrize("levels", [65, 20_000])
@pytest.mark.parametrize(("opens", "closes"), ["[]", ('{"a": ', "}")])
def test_json_that_is_nested_too_deeply(opens: str, closes: str, levels: int) -> None:
    with pytest.raises(MisreadError, match="nested more than 64 levels deep"):
        parse_json(opens * levels + "1" + closes * levels)
    assert json.dumps(parse_json(opens * 63 + "1" + closes * 63))


def test_arrays_that_are_damaged_or_too_large(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, np.zeros(10**6), names=np.array(["a"]))
    assert read_arrays(file.getvalue(), 10**7)["names"].tolist() == ["a"]
    with pytest.raises(DamagedArraysError, match=r"unpack to 8,000,\d+ bytes, more than .*1,000,000"):
        read_arrays(file.getvalue(), 10**6)
    with pytest.raises(DamagedArraysError, match="BadZipFile"):
        read_arrays(file.getvalue()[:-30], 10**7)
    np.save(tmp_path / "a.npy", np.arange(3))
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content.replace(b"'shape'", b"'shape(", 1))
    with pytest.raises(DamagedArraysError, match=r"^a\.npy: "):
        map_array_file(tmp_path / "a.npy")


@dataclass(frozen=True)
class Part(JsonRecord):
    """A record inside another record."""

    size: Annotated[int, range(1, 9)]


@dataclass(frozen=True, kw_only=True)
class Whole(JsonRecord):
    """A record with fields of all types."""

    kind = "whole"
    name: Annotated[str, {"a", "b"}]
    parts: tuple[Part, ...] = ()
    either: Part | float | None = None
    numbers: Mapping[str, float | None] = field(default_factory=dict, metadata={"prefix": "n_"})
    flag: bool = False
    anything: Mapping[str, Any] = field(default_factory=dict)


WHOLE = {"kind": "whole", "name": "a", "parts": [{"size": 1}], "either": {"size": 8}, "n_x": 1.5, "n_y": None}


def test_a_record_is_read_and_written() -> None:
    record = Whole.from_json_value({**WHOLE, "further": 1}, "file")
    assert record == Whole(name="a", parts=(Part(1),), either=Part(8), numbers={"x": 1.5, "y": None})
    assert record.to_json_value() == {**WHOLE, "flag": False}
    assert Whole(name="b").to_json_value() == {"kind": "whole", "name": "b", "flag": False}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "c"}, "name='c': must be one of a, b"),
        ({"parts": [{"size": 1}, {"size": 9}]}, r"parts\[1\].size=9: must be a whole number from 1 to 8"),
        ({"parts": [{}]}, r"parts\[0\].size is missing"),
        ({"parts": {}}, r"parts={}: must be a list"),
        ({"either": "x"}, "either='x': must be a finite number"),
        ({"n_x": "1"}, "n_x='1': must be a finite number"),
        ({"flag": 1}, "flag=1: must be true or false"),
        ({"parts": [{"size": True}]}, r"parts\[0\].size=True: must be a whole number"),
        ({"n_x": float("nan")}, "n_x=nan: must be a finite number"),
        ({"n_x": 10**400}, "n_x=1000.*: must be a finite number"),
        ({"anything": []}, r"anything=\[\]: must be an object"),
    ],
)
def test_the_first_misfit_of_a_record_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^file: {said}"):
        Whole.from_json_value({**WHOLE, **change}, "file")


def test_what_is_no_object_is_no_record() -> None:
    with pytest.raises(UserError, match=r"^file: all=None: must be an object"):
        Whole.from_json_value(None, "file")
    with pytest.raises(UserError, match=r"^file: name is missing"):
        Whole.from_json_value({}, "file")
