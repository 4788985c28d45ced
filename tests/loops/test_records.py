"""What a user's function records: metrics.jsonl, the page, and events."""

from pathlib import Path

import own_functions
import pytest
from engines import Run

from flyte_ddp.core.text.json_lines import read_records


def test_numbers_of_all_kinds(run: Run, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    run(own_functions.record_values, num_ranks=1)
    start, *records, end = read_records(tmp_path / "run/metrics.jsonl")
    assert all(isinstance(record.pop("time"), float) for record in (start, *records, end))
    assert start == {
        "kind": "start",
        "function": "own_functions:record_values",
        "hyperparameters": {},
        "num_ranks": 1,
        "num_nodes": 1,
        "device": "cpu",
        "backend": "gloo",
        "resumed_after_step": 0,
    }
    first = {"number": 1, "real": 0.5, "flag": 1.0, "tensor": 2, "loss": 3.0}
    second = {"array": 1.0, "single": 0.5, "nothing": None, "endless": None}
    assert records == [
        {"kind": "record", "step": 1, **first},
        {"kind": "record", "step": 1, **second},
        {"kind": "record", "step": 2, "real": 0.25},
    ]
    assert (end["kind"], end["step"]) == ("end", 2)
    assert end["seconds"] >= 0
    assert "own_functions:record_values" in (tmp_path / "run/report.html").read_text()
    assert [str(warning.message) for warning in recwarn] == []


def test_a_page_that_cannot_be_made_costs_the_function_nothing(run: Run, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr("flyte_ddp.report.function_page.draw_line_chart", None)
    run(own_functions.record_values, num_ranks=1)
    assert "report.html could not be written (TypeError: 'NoneType' object" in capfd.readouterr().err
    assert len(read_records(tmp_path / "run/metrics.jsonl")) == 5
    assert not (tmp_path / "run/report.html").exists()


def test_deleted_records_cost_the_function_nothing(run: Run, tmp_path: Path, capfd) -> None:
    assert run(own_functions.delete_records, num_ranks=1) == "the value"
    assert "report.html could not be written (UserError: " in capfd.readouterr().err


def test_no_number_costs_what_the_function_returns(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither in the records nor on the page."""
    assert run(own_functions.record_extremes, num_ranks=1) == "the value"
    first, *_ = [record for record in read_records(tmp_path / "run/metrics.jsonl") if record["kind"] == "record"]
    assert (first["huge"], first["count"], first["flag"]) == (None, 2.0**64, 1)
    assert "1.7e+308" in (tmp_path / "run/report.html").read_text()
    assert "no report.html" not in capfd.readouterr().err


def test_a_new_run_in_the_folder_begins_anew_and_keeps_own_files(run: Run, tmp_path: Path) -> None:
    """Own files in the folder of checkpoints, too."""
    own = tmp_path / "run/checkpoints/epoch-3.pt"
    own.parent.mkdir(parents=True)
    own.write_text("of the function")
    for _ in range(2):
        run(own_functions.train, 3, num_ranks=1)
        records = read_records(tmp_path / "run/metrics.jsonl")
        assert [record["kind"] for record in records] == ["start", *["record"] * 3, "end"]
        assert [path.name for path in own.parent.iterdir()] == [own.name]
    assert len(read_records(tmp_path / "run/results/events.jsonl")) == 1


def test_arguments_are_hyperparameters(run: Run, tmp_path: Path) -> None:
    run(own_functions.give_back, 3, lr=0.5, layers=(1, 2), path=Path("a"), num_ranks=1)
    [start, _] = read_records(tmp_path / "run/metrics.jsonl")
    assert start["hyperparameters"] == {"value": 3, "named": {"lr": 0.5, "layers": [1, 2], "path": "a"}}
    assert not (tmp_path / "run/report.html").exists()
