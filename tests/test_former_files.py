"""Files that an earlier release has written are read, and are written in the same form."""

import json
from pathlib import Path

import pytest

from flyte_ddp.core.models.sidecar import read_sidecar
from flyte_ddp.core.runs.metrics import (
    EvaluationRecord,
    FunctionEnd,
    FunctionStart,
    TrainingEnd,
    TrainingStart,
    TrainRecord,
    ValuesRecord,
    read_metrics,
)
from flyte_ddp.release.listing import describe_history, describe_version
from flyte_ddp.release.registry import Registry
from flyte_ddp.sweep.halving import RungProgress, parse_progress

FOLDER = Path(__file__).with_name("former_files")
VERSION = "e8b295f60044f0e2e40a0f42ee258d3a7fdab4b267f30dd0738eec9c44f7f5c2"


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("metrics.jsonl", [TrainingStart, EvaluationRecord, TrainRecord, TrainRecord, EvaluationRecord, TrainingEnd]),
        ("function.jsonl", [FunctionStart, ValuesRecord, ValuesRecord, FunctionEnd]),
    ],
)
def test_records_of_a_run(name: str, kinds: list[type]) -> None:
    records, lines = read_metrics(FOLDER / name), (FOLDER / name).read_text().splitlines()
    assert [type(record) for record in records] == kinds
    assert [record.to_json_value() for record in records] == [json.loads(line) for line in lines]


def test_the_sidecar() -> None:
    path = FOLDER / f"registry/digits/versions/{VERSION}/model.json"
    sidecar = read_sidecar(path)
    assert (sidecar.model, sidecar.objective, sidecar.digests.weights) == ("small_cnn", "classification", VERSION)
    assert sidecar.metrics.test["accuracy"] == sidecar.metrics.history["accuracies"][-1]
    assert sidecar.to_json_value() == json.loads(path.read_bytes())


def test_the_registry() -> None:
    registry = Registry(str(FOLDER / "registry"), "digits")
    [entry] = registry.read_log()
    assert (entry.version, entry.by, entry.previous) == (VERSION, "me@here", "")
    written = json.loads((FOLDER / "registry/digits/log/00000001.json").read_bytes())
    assert {**entry.to_json_value(), "digest": ""} == {**written, "digest": ""}
    shown = "\n".join((*describe_version(registry), *describe_history(registry)))
    assert all(text in shown for text in ("champion", "47.81", "better than the best constant answer", "digits, data"))


def test_the_stored_result_of_a_rung() -> None:
    text = b'{"step": 3, "steps": 27, "value": 0.5, "higher": false, "curve": [[2, 0.7], [3, 0.5]], "seconds": 1.5}'
    result = RungProgress(3, 27, 0.5, higher=False, curve=[[2, 0.7], [3, 0.5]], seconds=1.5)
    assert parse_progress(text, "a file") == result
    assert result.to_json_value() == json.loads(text)
    with pytest.raises(ValueError, match=r"a file is damaged; .*value='a': must be a finite number"):
        parse_progress(text.replace(b"0.5,", b'"a",', 1), "a file")
