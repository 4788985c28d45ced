"""Shards as a user of ``pyflyte`` gets to know them: packed, looked at, and trained on."""

from pathlib import Path

import pytest
from cli import Ended, pyflyte, train
from encoded_runs import labelled
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.core.errors import UserError
from tasks.shards import verify_packed


def run(home: Path, file: str, name: str, **arguments: object) -> Ended:
    """Run a task or a workflow, which must succeed."""
    words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    ended = pyflyte("run", file, name, *words, home=home)
    assert ended.exit_code == 0, ended.output
    return ended


@pytest.mark.slow
def test_from_a_folder_of_images_to_a_model(tmp_path: Path) -> None:
    source = labelled(tmp_path / "images", 60)
    run(tmp_path, "workflows/shards.py", "shards_wf", source=source, samples_per_shard=10)
    (index,) = (tmp_path / "runs").glob("shards-*/train.json")
    assert len(list(index.parent.glob("*.tar"))) == 6

    hp = {"dataset": f"shards:{index}", "image_size": 16, "epochs": 8, "batch_size": 8, "num_ranks": 2}
    trained = train(hp, home=tmp_path)
    assert trained.exit_code == 0, trained.output
    assert "test accuracy 100.00%" in trained.output

    (source / "red/0.jpg").write_bytes(b"no image")
    (trained_in,) = (tmp_path / "runs").glob("shards.train-*")
    model = {"model_state": trained_in / "model.pt", "sidecar": trained_in / "model.json"}
    predicted = run(tmp_path, "workflows/prediction.py", "predict_wf", **model, images=source, bad_samples=1)
    assert "no prediction for 1 image(s), which cannot be decoded: " in predicted.output
    (table,) = (tmp_path / "runs").glob("predictions-*/predictions.csv")
    rows = table.read_text().splitlines()
    assert len(rows) == 61
    assert [row for row in rows if ",," in row] == ["red/0.jpg,,,,,"]

    damaged = bytearray((index.parent / "train-000002.tar").read_bytes())
    damaged[600] ^= 1
    (index.parent / "train-000002.tar").write_bytes(damaged)
    with pytest.raises(UserError, match=r"train-000002\.tar"):
        verify_packed(packed=FlyteDirectory(str(index.parent)), name="train")
