"""Shards as a user of ``pyflyte`` gets to know them: packed, looked at, and trained on."""

import json
from pathlib import Path

import cli
import pytest
from PIL import Image
from test_cli_errors import also, without_pauses

SHARD_TASKS = "tasks/shards.py"


def images(folder: Path) -> Path:
    """60 images of two classes."""
    for number in range(60):
        path = folder / ("dark", "light")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + number, 30), (number + 120 * (number % 2),) * 3).save(path)
    return folder


@pytest.mark.slow
def test_from_a_folder_of_images_to_a_model(tmp_path: Path) -> None:
    source = images(tmp_path / "images")
    packed = cli.pyflyte(
        "run", "workflows/shards.py", "shards_wf", "--source", str(source), "--samples_per_shard", "10", home=tmp_path
    )
    assert packed.exit_code == 0, packed.output
    (index,) = (tmp_path / "runs").glob("shards-*/train.json")
    assert len(list(index.parent.glob("*.tar"))) == 6

    shown = cli.pyflyte("run", SHARD_TASKS, "show_shards", "--index", str(index), home=tmp_path)
    assert "60 (10 a shard)" in shown.output
    request = json.dumps({"index": str(index), "ranks": 2})
    planned = cli.pyflyte("run", SHARD_TASKS, "plan_shards", "--request", request, home=tmp_path)
    assert "1 nodes x 2 = 2" in planned.output
    sample = cli.pyflyte("run", SHARD_TASKS, "sample_shards", "--index", str(index), "--number", "3", home=tmp_path)
    assert sample.exit_code == 0, sample.output
    names = {path.suffix for path in (tmp_path / "runs").glob("sample-*/*")}
    assert names == {".png", ".cls"}

    hp = {"dataset": f"shards:{index}", "image_size": 16, "epochs": 8, "batch_size": 8, "num_ranks": 2}
    trained = cli.train(hp, home=tmp_path)
    assert trained.exit_code == 0, trained.output
    assert "test accuracy 100.00%" in trained.output

    (source / "dark" / "0.png").write_bytes(b"no image")
    (run,) = (tmp_path / "runs").glob("shards.train-*")
    model = ("--model_state", str(run / "model.pt"), "--sidecar", str(run / "model.json"), "--images", str(source))
    allowed = ("--bad_samples", "1")
    predicted = cli.pyflyte("run", "workflows/prediction.py", "predict_wf", *model, *allowed, home=tmp_path)
    assert predicted.exit_code == 0, predicted.output
    assert "no prediction for 1 image(s), which cannot be decoded: " in predicted.output
    (table,) = (tmp_path / "runs").glob("predictions-*/predictions.csv")
    rows = table.read_text().splitlines()
    assert len(rows) == 61
    assert [row for row in rows if ",," in row] == ["dark/0.png,,,,"]

    damaged = bytearray((index.parent / "train-000002.tar").read_bytes())
    damaged[600] ^= 1
    (index.parent / "train-000002.tar").write_bytes(damaged)
    verified = cli.pyflyte("run", SHARD_TASKS, "verify_shards", "--index", str(index), home=tmp_path)
    assert verified.exit_code == 1
    assert "train-000002.tar" in verified.panel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hp", "word"),
    [
        ({"dataset": "shards:nowhere.json"}, "nowhere.json: cannot be read"),
        also({"dataset": "shards:"}, "dataset='shards:': must name an address"),
        also({"dataset": "shards:s3://"}, "must name a bucket after s3://"),
        also({"dataset": "image_folder:https://127.0.0.1:9/images"}, "cannot be listed"),
        also({"dataset": "digits", "augment": "resized_crop"}, "choose none, crop or crop_flip"),
    ],
)
def test_mistakes_end_in_one_panel(tmp_path: Path, hp: dict[str, str], word: str) -> None:
    ended = cli.train(hp, home=tmp_path, **without_pauses(tmp_path))
    assert ended.exit_code == 1
    assert word in ended.panel, ended.output
    assert "Traceback" not in ended.output
