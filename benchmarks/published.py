"""ResNet18 on FashionMNIST on 1, 2 and 4 ranks, against a published table of losses.

The table is from "Distributed training from scratch", part II (our seed 003). It has losses of 10 epochs with SGD
0.001, synchronised BatchNorm, no augmentation and images in [0, 1].

Training is the library's own. The validation is a copy of the document's, for this benchmark only. With N ranks, the
document's validation uses the first 10,000 / N test images in order, in the batches of training. It leaves BatchNorm
in training mode and averages the batches' means. The library's exact figures are reported too, over all 10,000 images
with the running statistics.

The document's program has a global batch of 128 by default. As these runs show, the table was made with a batch of
16. Both batch sizes are measured, and the bounds are set for 16.

Each run has a folder under build/published. After an interruption, the run resumes from this folder. The runs take
hours in all on two cores.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import resnet18

from benchmarks.measuring import Options, Result, Target
from benchmarks.running import ROOT, fashion_mnist
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.runs.run_folder import is_finished
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.datasets import open_arrays
from flyte_ddp.run import run_training

FOLDER = "FLYTE_DDP_PUBLISHED_WEIGHTS"  # environment: where the weights of each epoch go
# Epoch by epoch, in the document's order; it titles both of the first two "2 GPUs", and says that they are of 2 and 4.
TRAIN = {
    2: (0.5944, 0.3944, 0.3384, 0.3009, 0.2744, 0.2497, 0.2325, 0.2161, 0.2022, 0.1876),
    4: (0.5937, 0.3910, 0.3356, 0.3019, 0.2735, 0.2505, 0.2317, 0.2144, 0.2006, 0.1860),
    1: (0.5893, 0.3940, 0.3376, 0.3005, 0.2735, 0.2520, 0.2330, 0.2176, 0.2005, 0.1881),
}
VALIDATION = {
    2: (0.4728, 0.4090, 0.3770, 0.3555, 0.3463, 0.3527, 0.3287, 0.3372, 0.3346, 0.3350),
    4: (0.4382, 0.3805, 0.3603, 0.3261, 0.3098, 0.3067, 0.3118, 0.2965, 0.2921, 0.2902),
    1: (0.4605, 0.3993, 0.3635, 0.3473, 0.3341, 0.3263, 0.3237, 0.3175, 0.3121, 0.3189),
}
IMAGES = 60_000
RUNS = ((2, 16), (1, 16), (4, 16), (2, 128))  # numbers of ranks, and global batches
THEIRS = 16  # the global batch of the table
HP = Hyperparameters(
    dataset="fashion_mnist",
    validation_fraction=0.0,
    model="benchmarks.published:build",
    epochs=10,
    learning_rate=0.001,
    momentum=0.0,
    nesterov=False,
    weight_decay=0.0,
    schedule="constant",
    augment="none",
    keep="last",
    backend="gloo",
    precision="fp32",
    log_interval=1,
)


def measure(options: Options) -> Result:
    folder = options.folder if options.quick else ROOT / "build" / "published"
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)  # where the model is found
    data = unnormalised(folder)
    result = Result(settings={"hyperparameters": HP.to_json()})
    found: dict[tuple[int, int], dict[str, list[float]]] = {}
    for ranks, batch in RUNS:
        run = folder / f"ranks-{ranks}-batch-{batch}"
        train(ranks, batch, data, run, max_steps=2 if options.quick else 0)
        found[ranks, batch] = losses(run, batch)
        weights = sorted((run / "weights").glob("*.pt"), key=lambda path: int(path.stem))  # named by the step
        found[ranks, batch]["validation"] = [documents_validation(path, data, ranks, batch) for path in weights]
        for kind, values in found[ranks, batch].items():
            for loss in values:
                result.add(f"{ranks} ranks, batches of {batch}: {kind} loss, epoch by epoch", loss, "")
    for (ranks, batch), ours in found.items():
        for kind, published, bound in (("train", TRAIN, 0.02), ("validation", VALIDATION, 0.05)):
            worst = max(abs(a - b) for a, b in zip(ours[kind], published[ranks], strict=False))
            what = f"{ranks} ranks, batches of {batch}: largest distance of a {kind} loss from the table's"
            result.targets.append(Target(what, worst, "", at_most=bound if batch == THEIRS else None))
    return result


def unnormalised(folder: Path) -> Path:
    """Return FashionMNIST with a mean of 0 and a deviation of 1. The model then gets pixels in [0, 1]."""
    target = folder / "unnormalised"
    if not target.exists():
        partial = folder / "unnormalised.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(fashion_mnist(folder), partial)
        description = json.loads((partial / "dataset.json").read_text())
        description |= {"mean": [0.0], "std": [1.0], "digest": f"{description['digest']}-unnormalised"}
        (partial / "dataset.json").write_text(json.dumps(description))
        partial.rename(target)
    return target


def train(ranks: int, batch: int, data: Path, run: Path, max_steps: int) -> None:
    if is_finished(run):
        return
    (run / "weights").mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER] = str(run / "weights")
    values: dict[str, Any] = {**HP.to_dict(), "num_ranks": ranks, "batch_size": batch, "max_steps": max_steps}
    run_training(Hyperparameters(**values), data, run, Settings(wandb_mode="disabled"))


def losses(run: Path, batch: int) -> dict[str, list[float]]:
    """Return the mean training loss of each epoch, by batches as in the document, and the library's test losses."""
    records = read_records(run / "metrics.jsonl")
    steps = [record["loss"] for record in records if record["kind"] == "train"]
    of_epoch = -(-IMAGES // batch)
    epochs = [steps[start : start + of_epoch] for start in range(0, len(steps), of_epoch)]
    exact = [record["test_loss"] for record in records if record["kind"] == "evaluation"]
    return {"train": [float(np.mean(epoch)) for epoch in epochs], "exact test": exact}


def documents_validation(weights: Path, data: Path, ranks: int, batch: int) -> float:
    """Return the document's validation loss of N ranks, computed in a single process."""
    arrays = open_arrays(data)
    count = len(arrays.test_targets) // ranks
    images = torch.tensor(np.array(arrays.test_inputs[:count])).permute(0, 3, 1, 2) / 255
    labels = torch.tensor(np.array(arrays.test_targets[:count]))
    model = Published(len(arrays.classes))
    model.net.load_state_dict(torch.load(weights, weights_only=True))
    with torch.no_grad():  # the model stays in training mode
        means = [
            functional.cross_entropy(model(inputs), truth).item()
            for inputs, truth in zip(images.split(batch), labels.split(batch), strict=True)
        ]
    return float(np.mean(means))


class Published(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = resnet18(num_classes=num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, classes] of images [N, 1, 28, 28]."""
        return cast("Tensor", self.net(images.expand(-1, 3, -1, -1)))

    def train(self, mode: bool = True) -> Published:
        """Handle ``train(False)``, with which an evaluation in the library begins after the last step of an epoch."""
        if self.training and not mode and (folder := os.environ.get(FOLDER)):
            path = Path(folder, f"{int(self.net.bn1.num_batches_tracked)}.pt")
            first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
            if first_rank and not path.exists():
                partial = path.with_suffix(".partial")
                torch.save(self.net.state_dict(), partial)
                partial.rename(path)  # whole or not at all, as the run may be cut off here
        return super().train(mode)


def build(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    if input_shape != (1, 28, 28):
        raise ValueError(f"images of {input_shape}: the published runs are on FashionMNIST")
    return Published(num_classes)
