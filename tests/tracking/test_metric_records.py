"""Records of a run come back from metrics.jsonl as they were written, and are followed as they are."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from wandb_runs import IMAGES, RECORDS

from flyte_ddp.core.files import replace_file
from flyte_ddp.core.objectives.table_columns import merge_columns
from flyte_ddp.core.text.json_lines import JsonLines, read_records
from flyte_ddp.core.training.outputs import split_columns_by_type
from flyte_ddp.objectives import Classification, Facts
from flyte_ddp.tracking import wandb_feed


def test_records_come_back_as_written_and_every_line_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = {"kind": "x", "loss": math.nan, "nested": {"edges": [1.0, -math.inf]}, "pair": (1, math.inf)}
    before = time.time()
    with JsonLines(path) as log:
        for record in (*RECORDS, odd):
            log.write(record)
            lines = path.read_text().splitlines()  # while the log is open: it doesn't keep anything back
            assert before <= json.loads(lines[-1], parse_constant=pytest.fail)["time"] <= time.time()
    expected = [{**record} for record in RECORDS]
    expected[2]["loss"] = None
    found = [{key: value for key, value in record.items() if key != "time"} for record in read_records(path)]
    assert found == [*expected, {"kind": "x", "loss": None, "nested": {"edges": [1.0, None]}, "pair": [1, None]}]


def test_half_a_line_costs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "tra')
    assert read_records(path) == [{"kind": "train", "step": 1}]
    with JsonLines(path) as log:
        log.write({"kind": "train", "step": 2})
    assert [record["step"] for record in read_records(path)] == [1, 2]


# What wandb is fed from


def over_after(*actions: Callable[[], object]) -> Callable[[float], bool]:
    """The end of a run after some looks at the file, each of which may first change it."""
    left = list(actions)

    def over(_: float) -> bool:
        left.pop(0)()
        return not left

    return over


def test_records_are_followed_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def write(text: str) -> Callable[[], object]:
        def action() -> None:
            with path.open("a") as file:
                file.write(text)

        return action

    def nothing() -> None:
        assert not path.exists()

    texts = ('{"step": 1}\n{"st', 'ep": 2}\n', '{"step": 3}\nrubbish\n{"step": 4}\n{"s')
    over = over_after(nothing, *map(write, texts))
    assert list(wandb_feed.follow_metrics_file(tmp_path, 0, over)) == [{"step": step} for step in (1, 2, 3, 4)]
    later = wandb_feed.follow_metrics_file(tmp_path, len('{"step": 1}\n'), over_after(lambda: None))
    assert list(later) == [{"step": step} for step in (2, 3, 4)], "not those of an earlier attempt"


@pytest.mark.parametrize("earlier", [b"", b'{"step": 0}\n'], ids=["a new run", "a resumed run"])
def test_records_of_a_run_that_is_started_again_are_followed_once(earlier: bytes, tmp_path: Path) -> None:
    """The file is replaced by one with what the checkpoint had, and grows from there."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(earlier + b'{"step": 1}\n{"step": 2}\n{"st')

    def start_again() -> None:
        with replace_file(path) as file:
            file.write(earlier + b'{"step": 1}\n')
        with path.open("a") as file:
            file.write('{"step": 2, "again": true}\n')

    over = over_after(lambda: None, start_again)
    steps = [{"step": 1}, {"step": 2}, {"step": 2, "again": True}]
    assert list(wandb_feed.follow_metrics_file(tmp_path, len(earlier), over)) == steps


@pytest.mark.parametrize("names", [[f"class/{number}.jpg" for number in range(6)], []])
@pytest.mark.parametrize("classes", [3, 1001])
def test_the_table_has_names_and_not_too_many_scores(tmp_path: Path, names: list[str], classes: int) -> None:
    """Of many classes only the score of the prediction: wandb would take a column for each class."""
    scores = torch.full((3, classes), 0.5 / (classes - 1), dtype=torch.float64)
    scores[range(3), [2, 1, 0]] = 0.5
    objective = Classification(Facts(tuple(f"class {k}" for k in range(classes))))
    columns = merge_columns(objective.answers(scores.log()), objective.truths(torch.tensor([0, 1, 1])))
    texts, numbers = split_columns_by_type(columns)
    arrays = {
        "index": np.arange(6),
        "images": IMAGES,
        "texts": np.array([columns[name] for name in texts]).T,
        "text_columns": np.array(texts),
        "numbers": np.array([columns[name] for name in numbers]).T,
        "make_number_columns": np.array(numbers),
        "table_rows": np.array(3),
    }
    np.savez(tmp_path / "predictions.npz", **arrays, names=np.array(names, dtype=np.str_))
    table = wandb_feed.make_predictions_table(tmp_path / "predictions.npz")
    assert [row[0] for row in table.data] == (names[:3] or [0, 1, 2])
    assert [row[2:4] for row in table.data] == [["class 2", "class 0"], ["class 1", "class 1"], ["class 0", "class 1"]]
    assert table.columns[4:] == ["score", *(f"score_class {k}" for k in range(classes if classes < 1001 else 0))]
    np.testing.assert_allclose(table.data[0][4:], [0.5] if classes > 1000 else [0.5, 0.25, 0.25, 0.5])
