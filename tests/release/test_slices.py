"""Files that say which samples belong together."""

from pathlib import Path

import pytest

from flyte_ddp.errors import UserError
from flyte_ddp.release.slices import group_by_slice


def members(table: Path, ids: list[str], undecoded: tuple[str, ...] = ()) -> dict[str, list[int]]:
    return {name: found.tolist() for name, found in group_by_slice(str(table), ids, undecoded).items()}


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_slices(tmp_path: Path, start: bytes) -> None:
    table = tmp_path / "slices.csv"
    table.write_bytes(start + b"slice,id\r\nnight,2\r\nnight,0\r\n\r\nday,1\r\nrain,2\r\n")
    assert members(table, ["0", "1", "2"]) == {"night": [0, 2], "day": [1], "rain": [2]}
    assert members(table, ["0", "1"], ("2",)) == {"night": [0], "day": [1]}, "what cannot be decoded is in none"
    with pytest.raises(UserError, match="id '1' in line 5 is not in the test split; correct it"):
        members(table, ["0", "2"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n", "must have the columns id and slice"),
        (b"", "must have the columns id and slice"),
        (b"id,slice\n0\n", "line 2 has no id or no slice; complete it"),
        (b"id,slice\n0,\n", "line 2 has no id or no slice; complete it"),
        (b"id,slice\n0,n\xe4chts\n", "is no CSV file in UTF-8"),
        (b'id,slice\n0,"night\n', "is no CSV file in UTF-8"),
        (b"id,slice\n0," + b"x" * 140_000 + b"\n", "is no CSV file in UTF-8"),
        (None, "cannot be read: no such file; check the address"),
    ],
)
def test_what_is_no_such_file(tmp_path: Path, content: bytes | None, said: str) -> None:
    table = tmp_path / "slices.csv"
    if content is not None:
        table.write_bytes(content)
    with pytest.raises(UserError, match=said):
        members(table, ["0"])
