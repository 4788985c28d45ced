"""The losses of one small run, step by step: a change that is not meant to change the computation must leave them.

``python tests/training/test_golden.py`` writes those of today; that is right only for a change that is meant to.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import QUIET, losses, records_of

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch
from flyte_ddp.run import run_training

LOSSES = Path(__file__).with_name("golden_losses.json")
# In fp64, whose differences between processors stay far below the tolerance (measured: AVX2 against AVX-512, 5e-16;
# initial weights are drawn in fp32 and need fused multiply-add). All that draws random numbers takes part.
RUN = Hyperparameters(batch_size=100, accumulation_steps=2, epochs=5, max_steps=60, augment="crop_flip", seed=7)
RUN = replace(RUN, label_smoothing=0.1, grad_clip_norm=5.0, ema_decay=0.9, keep="ema", num_ranks=2, backend="gloo")
RUN = replace(RUN, learning_rate=0.2, warmup_steps=5, schedule="cosine")
RUN = replace(RUN, precision="fp64", channels_last="off", log_interval=1)


def train(folder: Path) -> dict[str, list[float]]:
    """The training loss of each step and the test loss of each epoch."""
    data = fetch("digits", "", folder / "digits", progress="off")
    run = run_training(RUN, data, folder / "run", QUIET)
    return {"train": losses(run), "test": [record["test_loss"] for record in records_of(run, "evaluation")]}


@pytest.mark.slow
def test_the_losses_are_what_they_were(tmp_path: Path) -> None:
    golden = json.loads(LOSSES.read_text())
    now = train(tmp_path)
    assert len(now["train"]) == RUN.max_steps
    for kind in ("train", "test"):
        assert now[kind] == pytest.approx(golden[kind], rel=1e-11, abs=0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        LOSSES.write_text(json.dumps(train(Path(made)), indent=1) + "\n")
