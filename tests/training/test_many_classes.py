"""A run on thousands of classes: what it leaves grows with the samples, not with the square of the classes."""

from pathlib import Path

import numpy as np
import pytest
from training_runs import QUIET, train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import image_arrays
from flyte_ddp.datasets.prepared_folder import write_prepared_set
from flyte_ddp.release.judge import judge_challenger
from flyte_ddp.release.page import write_page
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.registry import Registry

CLASSES = 2500


@pytest.mark.slow
def test_nothing_holds_the_square_of_the_classes(tmp_path: Path) -> None:
    labels = np.arange(2 * CLASSES) % CLASSES
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 8, 8, 1), dtype=np.uint8)
    arrays = image_arrays(images, labels, images, labels, classes=[f"class {k}" for k in range(CLASSES)], name="many")
    (tmp_path / "data").mkdir()
    write_prepared_set(arrays, tmp_path / "data", {"source": "made for a test"})
    hp = Hyperparameters(dataset="many:classes", epochs=1, max_steps=2, num_ranks=1)
    result = train_in(tmp_path / "run", hp, tmp_path / "data", checkpoint_seconds=0.0)
    square = CLASSES**2
    written = {path.name: path.stat().st_size for path in result.run_folder.iterdir() if path.is_file()}
    assert written.keys() >= {"model.pt", "model.json", "metrics.jsonl", "predictions.npz", "report.html"}
    assert max(written.values()) < square / 2
    page = result.report.read_text()
    assert "2,500 classes are too many for a picture" in page
    assert "Most frequent mistakes" in page
    files = result.model, result.sidecar
    judged = judge_challenger(
        *files, tmp_path / "data", Registry(str(tmp_path / "registry"), "many"), Policy(), settings=QUIET
    )
    verdict = write_page(judged, "many", tmp_path / "verdict.html")
    assert "confusion matrix" not in verdict.read_text()
    assert "Most frequent mistakes" in verdict.read_text()
