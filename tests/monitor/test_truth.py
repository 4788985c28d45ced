"""The user's file of truths: ids and truths that are written in another form, and those that are not known yet."""

import re
from pathlib import Path

import pytest

from flyte_ddp.core.errors import UserError
from flyte_ddp.monitor.truth import TruthFile, index_by_form, is_unknown, truth_to_class
from flyte_ddp.release.slices import read_id_table


def write(path: Path, *lines: str) -> TruthFile:
    path.write_text("\n".join(["id,truth", *lines, ""]))
    return TruthFile(str(path))


@pytest.mark.parametrize("form", ["{:06}", "{}", "{}.0", " {} ", "{:03}"])
def test_ids_match_in_each_form(tmp_path: Path, form: str) -> None:
    """As pandas writes them after leading zeros are lost, or where an id is missing in another row."""
    file = write(tmp_path / "truth.csv", *(f"{form.format(number)},{number}" for number in (7, 70)))
    assert [file.look_up(sample) for sample in ("000007", "000070", "000071")] == ["7", "70", ""]
    assert file.missing == ["000071"]
    note = file.check_and_describe_ids()
    assert note == "" if form == "{:06}" else note.startswith("2 ids are written differently: ")


def test_an_exact_id_comes_first_and_an_id_is_of_one_sample(tmp_path: Path) -> None:
    file = write(tmp_path / "truth.csv", "7,a", "007,b", "8,c")
    assert [file.look_up(sample) for sample in ("7", "007", "8")] == ["a", "b", "c"]
    assert file.look_up("07") == "", "which of the two is not known"
    with pytest.raises(UserError, match=r"id '8' matches two samples, '8' and '08'"):
        file.look_up("08")
    assert file.look_up("8") == "c", "the same sample twice"


def test_a_cell_that_is_missing_at_the_end_of_a_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "truth.csv"
    path.write_text("truth,id\na,1\nb\n")
    assert read_id_table("truth", "truth", str(path)) == [(2, "1", "a"), (3, "", "b")]
    path.write_text("id,truth\n1\n")
    assert read_id_table("truth", "truth", str(path)) == [(2, "1", "")]


@pytest.mark.parametrize(
    ("ids", "samples", "rejected"),
    [
        (["0", "1"], ["000.png"], True),
        (["in/000.png"], ["000.png"], True),
        (["train_1"], ["test_1"], True),
        (["900.png"], ["000.png"], False),
        (["row 8", "row 9"], ["row 0"], False),
        (["a17f-03", "b20c-77"], ["c4d1-e9"], False),
        ([], ["000.png"], False),
    ],
)
def test_a_file_of_other_samples_is_no_error_and_ids_of_another_kind_are(
    tmp_path: Path, ids: list[str], samples: list[str], rejected: bool
) -> None:
    file = write(tmp_path / "truth.csv", *(f"{name},1" for name in ids))
    assert [file.look_up(sample) for sample in samples] == [""]
    if rejected:
        with pytest.raises(UserError, match=re.escape(f"none of the ids of the samples, such as {samples[0]}; give")):
            file.check_and_describe_ids()
    else:
        assert file.check_and_describe_ids() == ""


def test_truths_that_are_not_known_yet() -> None:
    for unknown in ("", " ", "nan", "NaN", "None", "NULL", "NA", "<NA>", "N/A"):
        assert is_unknown(unknown)
        assert truth_to_class(unknown, {"cold": "cold", "hot": "hot"}) == ""
    assert truth_to_class("None", {"None": "None", "some": "some"}) == "None", "a class of that name"
    assert not is_unknown("0")


def test_classes_match_in_each_form() -> None:
    def name(truth: str, *classes: str) -> str:
        return truth_to_class(truth, {**index_by_form(classes), **dict(zip(classes, classes, strict=True))})

    assert [name(truth, "0", "1") for truth in ("1", "1.0", " 1", "01", "2", "one")] == ["1", "1", "1", "1", "2", "one"]
    assert name("1", "1.0", "0.0") == "1.0"
    assert [name(truth, "1", "01") for truth in ("1", "01", "1.0")] == ["1", "01", "1"]
    assert name(" hot", "cold", "hot") == "hot"
    assert name("Hot", "cold", "hot") == "Hot", "which is refused with the classes' names"
